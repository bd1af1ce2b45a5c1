"""A folder of rollouts while it is written: the same command goes on after a kill at any moment.

`begun.json` says what is being written, `partial.jsonl` has a line for each sample that is there.
When all are, `rollouts.jsonl` and then its header are written whole.

Prompts in JSON lines; which samples of them are due, and how they are drawn.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qaudit.errors import AuditError, CorpusError, UsageError, not_written
from qaudit.saved.codec import decode, parse, read_object
from qaudit.text.chat import MESSAGES, Chat
from qaudit.text.documents import TextPath, must_exist, read_objects
from qaudit.text.rollouts import (
    HEADER,
    LINES,
    Rollout,
    RolloutHeader,
    Sampler,
    line_of,
    read_rollouts,
    text_of,
)
from qaudit.text.tokenizer import Tokenizer, must_be_unicode
from qaudit.whole import read_regular, write_whole

FIELD = "prompt"
_FORM = 'write {"prompt": "..."} or {"messages": [...]} on each line'


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens."""

    number: int  # of its line, from zero
    sha256: str  # of its text
    ids: tuple[int, ...]
    text: str = ""


def read_prompts(path: Path, tokenizer: Tokenizer, chat: Chat) -> tuple[Prompt, ...]:
    """Read a file of prompts; CorpusError names the line that is wrong."""
    file = TextPath(path, str(path))
    must_exist(file)
    prompts = []
    for number, (line, value) in enumerate(read_objects(file)):
        where = f"line {line} of `{path}`"
        is_chat = MESSAGES in value
        text = chat.prompt(where, value) if is_chat else value.get(FIELD)
        if not isinstance(text, str) or not text:
            raise CorpusError(f"{where} has no text", hint=_FORM)
        must_be_unicode(text, where)
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        # A template writes the special tokens itself.
        ids = tokenizer(text, add_special_tokens=not is_chat, verbose=False)["input_ids"]
        prompts.append(Prompt(number, sha256, tuple(ids), text))
        if not ids:
            raise CorpusError(f"{where} has no tokens", hint=_FORM)
    if not prompts:
        raise CorpusError(f"there is no prompt in `{path}`", hint=_FORM)
    return tuple(prompts)


@dataclass(frozen=True)
class DrawSettings:
    """How samples are drawn, and where they end."""

    sampler: Sampler
    seed: int
    max_tokens: int
    end_ids: tuple[int, ...]


@dataclass(frozen=True)
class DueSample:
    """A sample that is to be written; greedy, or drawn with its own random numbers."""

    prompt: Prompt
    sample: int
    greedy: bool

    @property
    def key(self) -> tuple[int, int, bool]:
        return self.prompt.number, self.sample, self.greedy

    def rollout(self, new_ids: Sequence[int], *, finished: bool) -> Rollout:
        return Rollout(
            prompt=self.prompt.number,
            prompt_sha256=self.prompt.sha256,
            ids=self.prompt.ids,
            new_ids=tuple(new_ids),
            sample=self.sample,
            greedy=self.greedy,
            finished=finished,
        )

    def seed(self, seed: int) -> int:
        text = f"{seed} {self.prompt.sha256} {self.prompt.number} {self.sample}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


BEGUN, PARTIAL = "begun.json", "partial.jsonl"

Key = tuple[int, int, bool]
"""A prompt, a sample of it, and whether that is the greedy one."""


def key_of(rollout: Rollout) -> Key:
    return rollout.prompt, rollout.sample, rollout.greedy


class RolloutFolder:
    """The samples that are written so far, of one request."""

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        """Begin a folder, or go on with it; refuse one of another request."""
        self.folder = folder
        begun, request = folder / BEGUN, json.loads(json.dumps(dict(request)))
        if begun.exists():
            before = read_object(begun, f"`{begun}`", "name another folder with `--out`")
            for name in request:
                if before.get(name) != request[name]:
                    raise UsageError(
                        f"`{folder}` was begun with another `{name}`: {before.get(name)!r:.60}, "
                        f"not {request[name]!r:.60}",
                        hint="name another folder with `--out`, or use the settings that it was "
                        "begun with",
                    )
        elif (folder / HEADER).exists():
            raise UsageError(
                f"`{folder}` has rollouts already", hint="name another folder with `--out`"
            )
        write_whole(begun, json.dumps(request, indent=1) + "\n")
        self.samples = {key_of(sample): sample for sample in _whole_lines(folder / PARTIAL)}

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Append samples; they are on the disk when this returns."""
        path = self.folder / PARTIAL
        try:
            with path.open("a", encoding="utf-8") as file:
                for rollout in rollouts:
                    file.write(line_of(rollout))
                    self.samples[key_of(rollout)] = rollout
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise not_written(path, error) from error

    def finish(self, header: RolloutHeader) -> None:
        """Write all samples in order, and the header with their hash last."""
        write_lines(self.folder, [*self.samples.values()], header)
        (self.folder / PARTIAL).unlink(missing_ok=True)


def write_lines(folder: Path, samples: Sequence[Rollout], header: RolloutHeader) -> None:
    """Write a folder's samples by prompt, greedy ones first, and the header last."""
    ordered = sorted(samples, key=lambda r: (r.prompt, not r.greedy, r.sample))
    lines = "".join(map(line_of, ordered))
    sha256 = hashlib.sha256(lines.encode()).hexdigest()
    with suppress(FileNotFoundError):
        (folder / HEADER).unlink()  # it would not be of these lines
    write_whole(folder / LINES, lines)
    header = replace(header, count=len(ordered), rollouts_sha256=sha256)
    write_whole(folder / HEADER, text_of(header))


def _whole_lines(path: Path) -> list[Rollout]:
    """Return the samples that are there; what a kill cut off is written again."""
    samples, end, content = [], 0, read_regular(path) if path.exists() else b""
    for line in content.splitlines(keepends=True):
        try:
            sample = decode(Rollout, parse(line.decode()), "sample")
        except (ValueError, AuditError):
            break
        if not line.endswith(b"\n"):
            break
        samples.append(sample)
        end += len(line)
    if end < len(content):
        write_whole(path, content[:end])
    return samples


TEXTS = "answers.jsonl"
_MARK_FORM = 'write {"prompt": 0, "sample": 0, "greedy": false, "correct": true} on each line'


def write_texts(folder: Path, tokenizer: Any) -> None:
    lines = []
    for sample in read_rollouts(folder).samples:
        text = tokenizer.decode(sample.new_ids, skip_special_tokens=True)
        place = {"prompt": sample.prompt, "sample": sample.sample, "greedy": sample.greedy}
        lines.append(json.dumps({**place, "text": text}) + "\n")
    write_whole(folder / TEXTS, "".join(lines))


def add_marks(folder: Path, path: Path) -> None:
    """Put the marks of a file into a folder of rollouts; CorpusError names what is wrong."""
    rollouts = read_rollouts(folder)
    marks = read_marks(path)
    by_key = {key_of(sample): sample for sample in rollouts.samples}
    if strange := [key for key in marks if key not in by_key]:
        prompt, count, greedy = strange[0]
        kind = "greedy" if greedy else f"{count}th"
        raise CorpusError(
            f"`{path}` marks the {kind} sample of prompt {prompt}, which `{folder}` does not have",
            hint=f"mark those that `{folder / TEXTS}` has",
        )
    for key, mark in marks.items():
        sample, score, reads = by_key[key], mark.get("score"), mark.get("reads")
        by_key[key] = replace(
            sample,
            correct=mark.get("correct"),
            score=None if score is None else float(score),
            reads=None if reads is None else min(reads, len(sample.new_ids)),
        )
    write_lines(folder, [*by_key.values()], rollouts.header)


def read_marks(path: Path) -> dict[Key, Mapping[str, Any]]:
    """Read a file of marks; CorpusError says what is wrong with it."""
    marks: dict[Key, Mapping[str, Any]] = {}
    file = TextPath(path, str(path))
    must_exist(file)
    for number, mark in read_objects(file):
        key: Any = (mark.get("prompt"), mark.get("sample", 0), mark.get("greedy", False))
        is_mark = [type(part) for part in key] == [int, int, bool] and _is_mark(**mark)
        if not is_mark or key in marks:
            wrong = "marks a sample again" if is_mark else "is no mark"
            raise CorpusError(f"line {number} of `{path}` {wrong}", hint=_MARK_FORM)
        marks[key] = mark
    return marks


def _is_mark(correct: object = None, score: object = None, reads: object = 1, **_: object) -> bool:
    """Return whether there is one of a verdict and a finite score."""
    if type(reads) is not int or reads < 1:
        return False
    if correct is not None:
        return isinstance(correct, bool) and score is None
    return isinstance(score, int | float) and math.isfinite(score)
