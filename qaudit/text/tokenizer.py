"""The tokenizer that the subjects of a plan share, and how it turns text into windows of tokens.

It is loaded from a checkpoint or borrowed. Subjects can only be compared document by document if
they read the same tokens, so that a scan over several tokenizers is refused before any weights are
read, not after.

Windows never overlap, and never cross from one document into the next unless the protocol packs
them. The first token of each has nothing before it and is not scored.

Bytes are counted where tokens are scored: a token owns the bytes of text from the end of the
token before it to its own end, so that spaces a tokenizer drops and characters it splits are
counted once, and the bytes of scored tokens are exactly those of the scored text.

Modules that import torch are imported inside functions: plans are made without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from typing import Protocol as Interface

import numpy as np
import numpy.typing as npt

from qaudit import families
from qaudit.checkpoints.configuration import unreadable
from qaudit.checkpoints.stamps import folder_of
from qaudit.errors import ConfigurationError, CorpusError, SourceError
from qaudit.hub import Hub
from qaudit.saved.results import sha256_of
from qaudit.types import (
    ROLES,
    UNSCORED,
    Checkpoint,
    Document,
    EvaluationDocument,
    Protocol,
    Ref,
    Window,
    digest,
)
from qaudit.whole import read_table

Tokens = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]
Roles = npt.NDArray[np.int8]


class Tokenizer(Interface):
    """The part of a tokenizer of `transformers` that is used here."""

    is_fast: bool
    bos_token_id: int | None
    eos_token_id: int | None
    added_tokens_decoder: Mapping[int, Any]

    def __call__(self, text: str, **options: Any) -> Any: ...


_SETTINGS = "tokenizer_config.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", _SETTINGS)
_DECIDES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
"""Files of a tokenizer that decide how text becomes tokens."""


def tokenizer_of(
    folders: Sequence[Path], trust_remote_code: bool
) -> tuple[Tokenizer, tuple[str, ...]]:
    """Load the first tokenizer there is: a checkpoint without one reads what the others read."""
    from qaudit.model.config import is_remote, ran, read_config

    failures = []
    for folder in [f for f in folders if _tokenizer_files(f)] or folders[:1]:
        try:
            # The library wants the config too, and says less of what is wrong there.
            config = read_config(folder, trust_remote_code=trust_remote_code)
            own_config = None if not is_remote(folder) else config  # of others it reads its own
            tokenizer = load_tokenizer(
                folder, trust_remote_code=trust_remote_code, config=own_config
            )
        except SourceError as error:
            failures.append(error)
            continue
        if not has_own_code(folder):
            return tokenizer, ()
        note = "the tokenizer is the library's: the repository's own code for it was not run"
        if not type(tokenizer).__module__.startswith("transformers."):
            note = f"the tokenizer is the repository's own: {ran(folder)}"
        return tokenizer, (note,)
    raise failures[0]


def load_tokenizer(
    folder: Path, *, trust_remote_code: bool = False, config: object = None
) -> Tokenizer:
    """Load the tokenizer in a checkpoint's folder.

    Code of the repository is run only with leave, and only where the library has no tokenizer
    of its own for the files there. A `config` is given where the library cannot read it itself.
    """
    from transformers import AutoTokenizer

    from qaudit.model.config import foreign, remote_class

    hint = "copy `tokenizer.json` and `tokenizer_config.json` of the model into the folder"
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise SourceError(f"there is no tokenizer in `{folder}`", hint=hint)
    try:
        with unreadable(f"the tokenizer in `{folder}` cannot be read", hint):
            loaded = AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=False, local_files_only=True, config=config
            )
            return cast(Tokenizer, loaded)
    except ConfigurationError:
        if not has_own_code(folder):
            raise
    if not trust_remote_code:
        raise SourceError(
            f"the tokenizer in `{folder}` is code of its own, which is not run unless asked for",
            hint="read the code, then pass `--trust-remote-code` to run it on this machine",
        )
    kind = remote_class(folder, "AutoTokenizer", _SETTINGS)
    with foreign(folder, "to make its tokenizer"):
        tokenizer: Tokenizer = kind.from_pretrained(str(folder), local_files_only=True)
    return tokenizer


def has_own_code(folder: Path) -> bool:
    """Return whether the files of a tokenizer name code of their repository."""
    return bool(read_table(folder / _SETTINGS).get("auto_map"))


def _tokenizer_files(folder: Path) -> list[Path]:
    return [folder / name for name in _DECIDES if (folder / name).is_file()]


def borrowed_tokenizer(hub: Hub | None, members: Sequence[Checkpoint]) -> Checkpoint | None:
    """Fetch the tokenizer of another repository, where checkpoints have none and a family says so.

    It is found when text is read and not when it is planned, because only then is it known
    that no checkpoint has one; its commit is in the record.
    """
    if hub is None or any(_tokenizer_files(folder_of(c)) for c in members):
        return None
    owners = {family.family: family.tokenizer for family in families.all_families()}
    repos = [repo for c in members if (repo := owners.get(c.family or ""))]
    if not repos:
        return None
    owner = Checkpoint(Ref(repos[0]), repos[0], commit=hub.listing.commit(repos[0]))
    hub.fetcher.settings(owner)
    return owner


def tokenizer_sha256(folders: Sequence[Path]) -> str:
    """Identify the first tokenizer there is by the bytes of its files."""
    files = next((some for folder in folders if (some := _tokenizer_files(folder))), [])
    settings = [file.parent / _SETTINGS for file in files[:1]]
    return digest([(f.name, sha256_of(f)) for f in (*files, *settings) if f.is_file()])


def other_tokenizers(folders: dict[str, Path]) -> tuple[str, str] | None:
    """Return the first two labels whose tokenizers differ; a folder without one has no part."""
    labels: dict[str, str] = {}
    for label, folder in folders.items():
        if files := _tokenizer_files(folder):
            labels.setdefault(digest([(f.name, sha256_of(f)) for f in files]), label)
    first, *labels_of_others = [*labels.values()] or [""]
    return (first, labels_of_others[0]) if labels_of_others else None


# ------------------------------------------------------------------------ windows of tokens


@dataclass(frozen=True, eq=False)
class Encoded:
    """A unit of analysis as tokens, and the bytes of text each of them owns."""

    name: str
    sha256: str
    tokens: Tokens
    nbytes: Counts
    stratum: str = ""
    unit: int | None = None  # near-copies have one together; None: it is a unit of its own
    roles: Roles | None = None  # of a conversation, as a window has them
    last_alone: bool = False

    @property
    def cut(self) -> bytes:
        """What is fed of it: two texts that differ behind the cut are one document."""
        return hashlib.sha256(self.tokens.tobytes()).digest()

    @property
    def compared(self) -> Tokens:
        """What near-copies are told by: conversations often have their prompts in common."""
        return self.tokens if self.roles is None else self.tokens[self.roles != UNSCORED]


@dataclass(eq=False)
class Cutter:
    """A tokenizer and a protocol: how text becomes windows."""

    tokenizer: Tokenizer
    protocol: Protocol
    notes: list[str] = field(default_factory=list)
    prefix: tuple[int, ...] = field(init=False)  # before every document

    def __post_init__(self) -> None:
        self.prefix = _prefix(self.tokenizer, self.protocol.bos)
        start = f"with tokens {list(self.prefix)}" if self.prefix else "without BOS"
        self.notes.append(f"bos={self.protocol.bos}: every document starts {start}")
        if not self.tokenizer.is_fast:
            self.notes.append("this tokenizer gives no offsets: bits per byte are not measured")

    @property
    def unscored(self) -> int:
        """Return how many tokens at the start of a document have no loss that counts."""
        return max(1, len(self.prefix))

    def encode(self, document: Document) -> Encoded:
        fast, limit = self.tokenizer.is_fast, self.protocol.document_tokens
        with unreadable(_FAILS, _HINT):
            encoded = self.tokenizer(
                document.text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False
            )
            tokens = np.array(encoded["input_ids"], dtype=np.int32)
        nbytes, roles, last_alone = np.zeros(len(tokens), dtype=np.int64), None, False
        if fast:
            offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
            nbytes = owned_nbytes(document.text, offsets[:, 1])
            if document.spans is not None:
                spans, last_alone = document.spans()
                roles = np.full(len(tokens), UNSCORED, dtype=np.int8)
                for span in spans:  # a token has the role of the last one that it overlaps
                    inside = (offsets[:, 0] < span.stop) & (offsets[:, 1] > span.start)
                    roles[inside] = ROLES.index(span.role)
        before = np.array(() if document.is_chat else self.prefix, dtype=np.int32)
        return Encoded(
            document.name,
            document.sha256,
            np.concatenate([before, tokens[:limit]]),
            np.concatenate([np.zeros(len(before), dtype=np.int64), nbytes[:limit]]),
            document.stratum,
            roles=None if roles is None else roles[:limit],
            last_alone=last_alone,
        )

    def calibration(self, documents: Sequence[Encoded]) -> tuple[Window, ...]:
        context = self.protocol.context
        return tuple(
            Window(k, part.tokens[start:stop], scored_from)
            for k, part in enumerate(self._units(documents))
            for start, stop, scored_from in cuts(len(part.tokens), context)
        )

    def evaluation(
        self, documents: Sequence[Encoded]
    ) -> tuple[tuple[Window, ...], tuple[EvaluationDocument, ...]]:
        windows, scored = [], dict[int, EvaluationDocument]()
        for k, part in enumerate(self._units(documents)):
            nbytes, unit = 0, k if part.unit is None else part.unit
            first = 1 if self.protocol.packed or part.roles is not None else self.unscored
            for start, stop, scored_from in cuts(len(part.tokens), self.protocol.context, first):
                roles = None if part.roles is None else part.roles[start:stop]
                windows.append(Window(unit, part.tokens[start:stop], scored_from, roles))
                counted = part.nbytes[start + scored_from : stop]
                if roles is not None:
                    counted = counted[roles[scored_from:] != UNSCORED]
                nbytes += int(counted.sum())
            document = EvaluationDocument(part.name, part.sha256, nbytes, stratum=part.stratum)
            if (copied := scored.get(unit)) is not None:  # a near-copy is of its unit
                both = f"{copied.sha256} {part.sha256}".encode()
                sha256, nbytes = hashlib.sha256(both).hexdigest(), copied.nbytes + nbytes
                document = replace(copied, sha256=sha256, nbytes=nbytes)
            scored[unit] = document
        windows.sort(key=lambda window: window.document)
        return tuple(windows), tuple(scored.values())

    def _units(self, documents: Sequence[Encoded]) -> Iterator[Encoded]:
        """Yield documents, or full windows of them run together; the incomplete last is left."""
        if not self.protocol.packed or not documents:
            yield from documents
            return
        tokens = np.concatenate([d.tokens for d in documents])
        nbytes = np.concatenate([d.nbytes for d in documents])
        context = self.protocol.context
        for number, start in enumerate(range(0, len(tokens) - context + 1, context)):
            part = tokens[start : start + context]
            sha256 = hashlib.sha256(part.astype("<i4").tobytes()).hexdigest()
            yield Encoded(f"window {number}", sha256, part, nbytes[start : start + context])


_FAILS = "the tokenizer of the checkpoints fails on a text"
_HINT = "take `tokenizer.json` and `tokenizer_config.json` of the model they were trained from"


def _prefix(tokenizer: Tokenizer, bos: str) -> tuple[int, ...]:
    """Return the tokens before every document: those the tokenizer adds by itself, or BOS."""
    if bos == "never":
        return ()
    if bos == "always":
        if tokenizer.bos_token_id is None:
            raise CorpusError("this tokenizer has no BOS token", hint="use `--set bos=auto`")
        return (tokenizer.bos_token_id,)
    with unreadable(_FAILS, _HINT):
        dressed = list(tokenizer("a", verbose=False)["input_ids"])
        bare = list(tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"])
    for k in range(len(dressed) - len(bare) + 1):
        if dressed[k : k + len(bare)] == bare:
            return tuple(dressed[:k])
    return ()


def cuts(length: int, context: int, unscored: int = 1) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, scored_from) of the windows over `length` tokens that score any."""
    for start in range(0, length, context):
        stop = min(start + context, length)
        scored_from = unscored if start == 0 else 1
        if stop - start > scored_from:
            yield start, stop, scored_from


def must_be_unicode(text: str, where: str) -> None:
    """Refuse half a character: a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CorpusError(
            f"{where} holds half a character",
            hint="a lone surrogate such as \\ud800 cannot be written as UTF-8: take it out",
        ) from error


def owned_nbytes(text: str, ends: Sequence[int] | Counts) -> Counts:
    """Return the bytes of text from the end of each token's predecessor to its own end."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    sizes = 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF)
    upto = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    reached = np.maximum.accumulate(np.array(ends, dtype=np.int64))
    return np.diff(upto[reached], prepend=0)
