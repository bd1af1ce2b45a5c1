"""Rollouts: what a model wrote behind prompts, as token ids in a folder.

`rollouts.jsonl` has a sample on each line, `rollouts.json` what wrote them and the hash of the
lines: a header without its lines, or lines that were cut, are refused. Ids are kept and no text,
because text does not always tokenize back to itself.

The role of each token that a model wrote: reasoning, call or answer, by markers as tokens.

Rollouts are ids, and their text may tokenize otherwise: markers are looked for as tokens. A marker
of several ordinary tokens may be written with others, joined to its neighbors; so roles are known
only where each marker is a token, or begins and ends with a token that is never joined.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qaudit.errors import AuditError, CorpusError
from qaudit.saved.codec import decode, encode, parse
from qaudit.types import ANSWER, REASONING, ROLES, UNSCORED, RolloutText, Window
from qaudit.whole import read_regular

_TAIL = 8  # tokens at the end of a prompt in which a template may begin the reasoning


@dataclass(frozen=True)
class TokenMarker:
    """What begins and ends a role; nothing ends with the answer."""

    role: str
    begin: tuple[int, ...]
    end: tuple[int, ...]


def separable(markers: Sequence[TokenMarker], added: Container[int]) -> tuple[TokenMarker, ...]:
    """Return the markers if tokens tell all of them; `added` tokens are joined to no other."""
    sequences = [ids for marker in markers for ids in (marker.begin, marker.end) if ids]
    is_told = all(len(ids) == 1 or (ids[0] in added and ids[-1] in added) for ids in sequences)
    return tuple(markers) if is_told else ()


def roles_of(
    prompt: Sequence[int], new_ids: Sequence[int], markers: Sequence[TokenMarker]
) -> npt.NDArray[np.int8]:
    """Return the place in `ROLES` of each token that was written."""
    tail = tuple(prompt[-_TAIL:])
    ids, first = (*tail, *new_ids), len(tail)
    roles = np.full(len(ids), ROLES.index(ANSWER), dtype=np.int8)
    inside: TokenMarker | None = None
    began = place = 0
    may_be_open = True  # an end of reasoning may come first: the prompt has its begin
    while place < len(ids):
        if inside is None:
            marker = next((m for m in markers if _is_at(ids, place, m.begin)), None)
            if marker is not None:
                inside, began, may_be_open = marker, place, False
                place += len(marker.begin)
                continue
            ended = (m for m in markers if m.role == REASONING and _is_at(ids, place, m.end))
            if may_be_open and (marker := next(ended, None)) is not None:
                inside, began, may_be_open = marker, first, False
        if inside is not None and _is_at(ids, place, inside.end):
            place += len(inside.end)
            roles[began:place] = ROLES.index(inside.role)
            inside = None
            continue
        place += 1
    if inside is not None:
        roles[began:] = ROLES.index(inside.role)
    return roles[first:]


def _is_at(ids: Sequence[int], place: int, wanted: Sequence[int]) -> bool:
    return len(wanted) > 0 and tuple(ids[place : place + len(wanted)]) == tuple(wanted)


FORMAT = 1
HEADER, LINES = "rollouts.json", "rollouts.jsonl"
_AGAIN = "write the folder again with `qaudit rollouts`"
SHORTEST_SHARED = 8
"""Tokens of a prompt that tell it from others: all begin with the header of a conversation."""

_MOST_TOKENS = 1 << 24  # of one sample; the longest context of a model is 10 million


@dataclass(frozen=True)
class Sampler:
    """How the next token is drawn; what is None or neutral changes no probability."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def has_penalties(self) -> bool:
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sample behind one prompt; a greedy one is the likeliest token at every step."""

    prompt: int  # its index in the file of prompts
    prompt_sha256: str
    ids: tuple[int, ...]  # of the prompt
    new_ids: tuple[int, ...]  # of what was written
    sample: int = 0
    greedy: bool = False
    finished: bool = False  # ended by itself, and not by the limit of tokens
    correct: bool | None = None
    score: float | None = None
    reads: int | None = None  # tokens of `new_ids` that the mark reads; None: all

    @property
    def mark(self) -> float | None:
        """What it is worth: its score, or 1 where it is correct."""
        if self.score is None and self.correct is not None:
            return float(self.correct)
        return self.score


@dataclass(frozen=True, kw_only=True)
class RolloutHeader:
    """What wrote the rollouts of a folder."""

    format: int
    target: str
    revision: str | None
    weights_sha256: str  # `Subject.content` of what wrote them
    tokenizer_sha256: str  # as `text.tokenizer` hashes its files
    sampler: Sampler
    seed: int
    count: int
    rollouts_sha256: str  # of the bytes of `rollouts.jsonl`
    end_ids: tuple[int, ...] = ()  # tokens that end a sample
    engine: str = ""  # what generated, in which dtype, on what


@dataclass(frozen=True)
class Rollouts:
    """A folder of rollouts, checked."""

    header: RolloutHeader
    samples: tuple[Rollout, ...]


def rollout_text(
    rollouts: Rollouts, ends: Mapping[str, Sequence[int]], markers: Sequence[TokenMarker] = ()
) -> RolloutText:
    """Return rollouts as windows; `ends` are tokens that end something, by its name."""
    windows, samples, header = [], rollouts.samples, rollouts.header
    for k, sample in enumerate(samples):
        tokens = np.array((*sample.ids, *sample.new_ids), dtype=np.int32)
        roles = None
        if markers:
            roles = np.full(len(tokens), UNSCORED, dtype=np.int8)
            roles[len(sample.ids) :] = roles_of(sample.ids, sample.new_ids, markers)
        windows.append(Window(k, tokens, len(sample.ids), roles))
    # Marks are of samples that were drawn: greedy ones have no weights.
    marks = [np.nan if s.greedy or s.mark is None else s.mark for s in samples]
    marked: dict[str, Any] = {}
    if not np.isnan(marks).all():
        sampler = header.sampler
        how = (sampler.temperature, sampler.top_k, sampler.top_p)
        marked = {
            "mark": np.array(marks, dtype=np.float64),
            "read": np.array([s.reads or len(s.new_ids) for s in samples], dtype=np.int64),
            "sampler": None if how == (1.0, None, 1.0) else how,
            "unweighed": "the sampler has penalties" if sampler.has_penalties else "",
        }
    return RolloutText(
        tuple(windows),
        prompt=np.array([sample.prompt for sample in samples], dtype=np.int64),
        greedy=np.array([sample.greedy for sample in samples], dtype=np.bool_),
        ends=tuple((name, tuple(ids)) for name, ids in ends.items() if ids),
        sha256=header.rollouts_sha256,
        target=header.target,
        weights_sha256=header.weights_sha256,
        **marked,
    )


def must_read_alike(rollouts: Rollouts, source: str, tokenizer_sha256: str) -> None:
    """Refuse rollouts whose tokens are another tokenizer's."""
    if rollouts.header.tokenizer_sha256 != tokenizer_sha256:
        raise CorpusError(
            f"the rollouts in `{source}` are tokens of another tokenizer than the checkpoints have",
            hint=f"they are of `{rollouts.header.target}`: scan it, or write others",
        )


def must_be_new(rollouts: Rollouts, source: str, calibration: Sequence[Window]) -> None:
    """Refuse rollouts behind prompts that the calibration text begins with."""
    starts: dict[int, set[bytes]] = {}
    for sample in {sample.prompt: sample for sample in rollouts.samples}.values():
        starts.setdefault(len(sample.ids), set()).add(np.array(sample.ids, np.int32).tobytes())
    shared = {
        window.tokens[:length].tobytes()
        for window in calibration
        for length, prompts in starts.items()
        if length > SHORTEST_SHARED and window.tokens[:length].tobytes() in prompts
    }
    if shared:
        raise CorpusError(
            f"calibration begins with {len(shared)} of the prompts of `{source}`",
            hint="calibrate on other text, or write rollouts of other prompts",
        )


def line_of(rollout: Rollout) -> str:
    """Return the line of a sample; what is None is left out."""
    document = {name: value for name, value in encode(rollout).items() if value is not None}
    return json.dumps(document, allow_nan=False) + "\n"


def text_of(header: RolloutHeader) -> str:
    return json.dumps(encode(header), indent=1, allow_nan=False) + "\n"


def read_rollouts(folder: Path) -> Rollouts:
    """Return the rollouts of a folder; CorpusError for any damage."""
    if not folder.is_dir():
        raise CorpusError(f"there is no folder `{folder}`", hint="write it with `qaudit rollouts`")
    header = _decoded(RolloutHeader, _bytes_of(folder / HEADER), f"`{folder / HEADER}`")
    if header.format != FORMAT:
        raise CorpusError(
            f"`{folder / HEADER}` has format {header.format}, and {FORMAT} is read here",
            hint=f"install the version that wrote it, or {_AGAIN}",
        )
    content = _bytes_of(folder / LINES)
    if hashlib.sha256(content).hexdigest() != header.rollouts_sha256:
        raise CorpusError(f"`{folder / LINES}` is not what `{HEADER}` has the hash of", hint=_AGAIN)
    samples: dict[tuple[int, int, bool], Rollout] = {}
    for number, line in enumerate(content.splitlines(), 1):
        where = f"line {number} of `{folder / LINES}`"
        sample = _decoded(Rollout, line, where)
        wrong, key = _wrong(sample), (sample.prompt, sample.sample, sample.greedy)
        if key in samples:
            wrong = f"has sample {sample.sample} of prompt {sample.prompt} again"
        if wrong:
            raise CorpusError(f"{where} {wrong}", hint=_AGAIN)
        samples[key] = sample
    if len(samples) != header.count or not samples:
        raise CorpusError(
            f"`{folder / LINES}` has {len(samples)} samples, and `{HEADER}` {header.count}",
            hint=_AGAIN,
        )
    return Rollouts(header, tuple(samples.values()))


def _bytes_of(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise CorpusError(
            f"`{path}` cannot be read: {error.strerror or error}".lower(), hint=_AGAIN
        ) from error


def _wrong(sample: Rollout) -> str:
    """Return what is wrong with a sample, or ''."""
    if not sample.ids:
        return "has no token in `ids`, and a rollout needs a prompt"
    if not sample.new_ids:
        return "has no token in `new_ids`"
    if len(sample.ids) + len(sample.new_ids) > _MOST_TOKENS:
        return f"has more than {_MOST_TOKENS:,} tokens"
    if min(*sample.ids, *sample.new_ids) < 0 or max(*sample.ids, *sample.new_ids) >= 2**31:
        return "has a number that is no token id"
    if sample.reads is not None and not 1 <= sample.reads <= len(sample.new_ids):
        return f"has a mark that reads {sample.reads} of its {len(sample.new_ids)} tokens"
    return "" if sample.prompt >= 0 and sample.sample >= 0 else "counts below zero"


def _decoded(kind: type[Any], content: bytes, where: str) -> Any:
    try:
        return decode(kind, parse(content.decode()), kind.__name__)
    except ValueError as error:
        raise CorpusError(f"{where} cannot be read: {error}", hint=_AGAIN) from error
    except AuditError as error:
        wrong = error.message.replace(f"`{kind.__name__}.", "`").replace(f"`{kind.__name__}`", "it")
        raise CorpusError(f"{where} cannot be read: {wrong}", hint=_AGAIN) from error
