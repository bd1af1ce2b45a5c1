"""How a tokenizer and a protocol turn text into windows of tokens.

Windows never overlap, and never cross from one document into the next unless the protocol packs
them. The first token of each has nothing before it and is not scored.

Bytes are counted where tokens are scored: a token owns the bytes of text from the end of the
token before it to its own end, so that spaces a tokenizer drops and characters it splits are
counted once, and the bytes of scored tokens are exactly those of the scored text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from typing import Protocol as Interface

import numpy as np
import numpy.typing as npt

from qaudit.checkpoints.configuration import unreadable
from qaudit.errors import CorpusError
from qaudit.types import (
    ROLES,
    UNSCORED,
    Document,
    EvaluationDocument,
    Protocol,
    RoleSpan,
    Window,
)

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
        tokens, nbytes, offsets = self._text(document.text)
        roles, last_alone = None, False
        if document.spans is not None and offsets is not None:
            spans, last_alone = document.spans()
            roles = roles_of(spans, offsets)
        limit = self.protocol.document_tokens
        tokens, nbytes = tokens[:limit], nbytes[:limit]
        before = np.array(() if document.is_chat else self.prefix, dtype=np.int32)
        return Encoded(
            document.name,
            document.sha256,
            np.concatenate([before, tokens]),
            np.concatenate([np.zeros(len(before), dtype=np.int64), nbytes]),
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
        context = self.protocol.context
        windows, scored = [], dict[int, EvaluationDocument]()
        for k, part in enumerate(self._units(documents)):
            nbytes, unit = 0, k if part.unit is None else part.unit
            first = 1 if self.protocol.packed or part.roles is not None else self.unscored
            for start, stop, scored_from in cuts(len(part.tokens), context, first):
                roles = None if part.roles is None else part.roles[start:stop]
                windows.append(Window(unit, part.tokens[start:stop], scored_from, roles))
                counted = part.nbytes[start + scored_from : stop]
                if roles is not None:
                    counted = counted[roles[scored_from:] != UNSCORED]
                nbytes += int(counted.sum())
            document = EvaluationDocument(part.name, part.sha256, nbytes, stratum=part.stratum)
            scored[unit] = _joined(scored[unit], document) if unit in scored else document
        windows.sort(key=lambda window: window.document)
        return tuple(windows), tuple(scored.values())

    def _units(self, documents: Sequence[Encoded]) -> Iterable[Encoded]:
        return _packed(documents, self.protocol.context) if self.protocol.packed else documents

    def _text(self, text: str) -> tuple[Tokens, Counts, Counts | None]:
        """Return the tokens of a text, the bytes they own, and where in the text they are."""
        fast = self.tokenizer.is_fast
        with unreadable(_FAILS, _HINT):
            encoded = self.tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False
            )
            tokens = np.array(encoded["input_ids"], dtype=np.int32)
        if not fast:
            return tokens, np.zeros(len(tokens), dtype=np.int64), None
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return tokens, owned_nbytes(text, offsets[:, 1]), offsets


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


def roles_of(spans: Sequence[RoleSpan], offsets: Counts) -> Roles:
    """Return the role of each token: that of the last span which it overlaps."""
    roles = np.full(len(offsets), UNSCORED, dtype=np.int8)
    first, last = offsets[:, 0], offsets[:, 1]
    for span in spans:
        roles[(first < span.stop) & (last > span.start)] = ROLES.index(span.role)
    return roles


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


def _joined(document: EvaluationDocument, copy: EvaluationDocument) -> EvaluationDocument:
    """Return a document with a near-copy of it, as one unit."""
    sha256 = hashlib.sha256(f"{document.sha256} {copy.sha256}".encode()).hexdigest()
    return replace(document, sha256=sha256, nbytes=document.nbytes + copy.nbytes)


def _packed(documents: Sequence[Encoded], context: int) -> Iterator[Encoded]:
    """Run documents together and yield full windows; the incomplete last one is left out."""
    if not documents:
        return
    tokens = np.concatenate([d.tokens for d in documents])
    nbytes = np.concatenate([d.nbytes for d in documents])
    for number, start in enumerate(range(0, len(tokens) - context + 1, context)):
        part = tokens[start : start + context]
        sha256 = hashlib.sha256(part.astype("<i4").tobytes()).hexdigest()
        yield Encoded(f"window {number}", sha256, part, nbytes[start : start + context])
