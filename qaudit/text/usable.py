"""Documents as tokens, taken lazily: without duplicates, and in the order of a draw.

Two documents that share text scatter less than two of a kind, and their interval is too narrow:
with each text four times, 69 % hold where 95 were promised. Documents are compared by the runs of
eight tokens that they have (shingles), of which each keeps the 128 with the lowest hashes
(bottom-k, Broder 1997). Those with a third of them in common, which is half of the text of two as
long, are one unit of analysis: their sums are added up. Short documents are not compared: a third
of them is a phrase.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from qaudit.core.statistics import MOST_TO_DECIDE
from qaudit.errors import CorpusError
from qaudit.text.cutting import Cutter, Encoded
from qaudit.types import UNSCORED, Document, Protocol

SHINGLE = 8  # tokens
SKETCH = 128  # shingles of a document that are kept
SHORTEST = 32  # tokens of a document that is compared
ALIKE = 1 / 3  # of the shingles of two documents together
COMMON = 256  # documents that a shingle is in, from which on it may be a header's

Sketch = npt.NDArray[np.uint64]


@dataclass
class NearCopies:
    """Documents by their shingles, in clusters."""

    clusters: list[int] = field(default_factory=list)  # of each document, counted from zero
    count: int = 0  # of clusters
    _sketches: list[Sketch] = field(default_factory=list)
    _holders: dict[int, array[int]] = field(default_factory=dict)

    def add(self, tokens: npt.NDArray[np.int32]) -> int:
        """Return the cluster of one more document: that of the first near-copy, or a new one."""
        sketch, number = sketch_of(tokens), len(self.clusters)
        hashes = sketch.tolist()
        alike = (
            k
            for k, shared in self._sharing(hashes)
            if _may_be_alike(shared, len(sketch), len(self._sketches[k]))
            and _overlap(sketch, self._sketches[k]) >= ALIKE
        )
        first = next(alike, None)
        cluster = self.count if first is None else self.clusters[first]
        self.count += first is None
        self.clusters.append(cluster)
        self._sketches.append(sketch)
        for value in hashes:
            self._holders.setdefault(value, array("I")).append(number)
        return cluster

    def _sharing(self, hashes: Sequence[int]) -> Iterable[tuple[int, int]]:
        """Return earlier documents that may be alike, and how many of the hashes each has.

        A near-copy has a third of them, so that it has another one than those that most documents
        have, a header's or a prompt's, as long as these are less than a third.
        """
        held = sorted((self._holders[v] for v in hashes if v in self._holders), key=len)
        spared = held[max(0, len(held) - (len(hashes) - 1) // 3) :]
        common = [np.array(holders) for holders in spared if len(holders) > COMMON]
        rest = [np.array(holders) for holders in held[: len(held) - len(common)]]
        if not rest:
            return ()
        numbers, counts = np.unique(np.concatenate(rest), return_counts=True)
        for holders in common:
            places = np.searchsorted(holders, numbers).clip(max=len(holders) - 1)
            counts += holders[places] == numbers
        likely = counts * 3 >= len(hashes)
        return zip(numbers[likely].tolist(), counts[likely].tolist(), strict=True)


def sketch_of(tokens: npt.NDArray[np.int32]) -> Sketch:
    """Return the lowest hashes of a document's shingles; none of a short document."""
    if len(tokens) < SHORTEST:
        return np.empty(0, dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), SHINGLE)
    powers = np.array([pow(0x9E3779B97F4A7C15, k, 1 << 64) for k in range(SHINGLE)], np.uint64)
    with np.errstate(over="ignore"):
        hashes = (windows + np.uint64(1)) @ powers
        hashes ^= hashes >> np.uint64(29)
        hashes *= np.uint64(0xBF58476D1CE4E5B9)
        hashes ^= hashes >> np.uint64(32)
    return np.unique(hashes)[:SKETCH]


def _may_be_alike(shared: int, a: int, b: int) -> bool:
    """Return whether sketches with so many shingles in common can be alike: most cannot.

    Documents that share a header or a prompt have some in common with all others.
    """
    return shared >= ALIKE * min(SKETCH, a + b - shared)


def _overlap(a: Sketch, b: Sketch) -> float:
    """Return the share of shingles that two documents have in common, of those of both."""
    both = np.union1d(a, b)[:SKETCH]
    return float((np.isin(both, a) & np.isin(both, b)).mean()) if len(both) else 0.0


POOL = 16
"""Calibration seeds draw from this many times the documents asked for: so many share nothing.

Of evaluation text whose documents are near-copies no more are read, however few units they are.
"""

LONGEST_COUNTED = 1 << 26  # characters that are read to count documents


class Usable:
    """Documents as tokens, read and cut once each; without duplicates and those that are short."""

    def __init__(self, documents: Iterable[Document], cutter: Cutter) -> None:
        self.cutter, self.short, self.twice = cutter, 0, 0
        self._documents = iter(documents)
        self._order: list[str] = []
        self._uncut: dict[str, Document] = {}
        self._cut: dict[str, Encoded | None] = {}  # None: nothing to score, or another's tokens
        self._tokens: set[bytes] = set()

    def hashes(self) -> Iterator[str]:
        """Yield the hash of each different document, in order."""
        for position in itertools.count():
            while position == len(self._order):
                document = next(self._documents, None)
                if document is None:
                    return
                if document.sha256 in self._uncut or document.sha256 in self._cut:
                    self.twice += 1
                    continue
                self._order.append(document.sha256)
                self._uncut[document.sha256] = document
            yield self._order[position]

    def cut(self, hashes: Iterable[str]) -> Iterator[Encoded]:
        """Yield the usable ones of documents that were read."""
        for sha256 in hashes:
            if sha256 not in self._cut:
                encoded = self.cutter.encode(self._uncut.pop(sha256))
                is_short, is_copy = self._is_short(encoded), encoded.cut in self._tokens
                self._cut[sha256] = None if is_short or is_copy else encoded
                self._tokens.add(encoded.cut)
                self.short, self.twice = self.short + is_short, self.twice + (is_copy > is_short)
            document = self._cut[sha256]
            if document is not None:
                yield document

    def _is_short(self, encoded: Encoded) -> bool:
        if encoded.roles is not None:
            return not (encoded.roles[1:] != UNSCORED).any()
        return len(encoded.tokens) <= self.cutter.unscored

    def available(self, taken: int) -> int | None:
        """Count the documents of the text, `taken` and those behind, up to what may be decided.

        None where they are too long to be read for that.
        """
        behind, characters = {*self._uncut}, 0
        with suppress(CorpusError):  # what is not measured on may be damaged
            for document in itertools.islice(self._documents, MOST_TO_DECIDE):
                behind |= {document.sha256} - {*self._cut}
                characters += len(document.text)
                if characters > LONGEST_COUNTED:
                    return None
        return None if self.cutter.protocol.packed else taken + len(behind)


def drawn(pool: Usable, count: int, seed: int) -> Iterator[Encoded]:
    """Yield documents in the order in which a seed takes them, those dealt before it left out."""
    if seed == 0:
        return pool.cut(pool.hashes())
    whole = list(itertools.islice(pool.hashes(), POOL * count))
    first = tuple(itertools.islice(pool.cut(whole), count))  # of seed 0
    rest = whole[whole.index(first[-1].sha256) + 1 :] if first else []
    if len(rest) < count:  # too little for a draw of its own
        rest = whole
    shuffle, hand = divmod(seed - 1, max(1, len(rest) // count))
    order = np.random.default_rng(shuffle + 1).permutation(len(rest))
    dealt = [rest[k] for k in order]
    return itertools.islice(pool.cut([*dealt, *dealt]), hand * count, None)


def further_draws(
    pool: Usable, first: Sequence[Encoded], protocol: Protocol, draws: int
) -> Iterator[tuple[Encoded, ...]]:
    """Yield the draws of the seeds that follow, with no document of `first` or of two draws.

    Draws that shared documents would agree because of that.
    """
    count, taken = protocol.calibration_documents, {encoded.sha256 for encoded in first}
    for k in range(1, draws):
        documents = drawn(pool, count, protocol.calibration_seed + k)
        draw = _different(documents, count, taken)
        taken |= {encoded.sha256 for encoded in draw}
        yield draw


def _different(
    documents: Iterable[Encoded], count: int, without: Collection[str] = ()
) -> tuple[Encoded, ...]:
    """Return the first documents that differ from each other and from others."""
    taken: dict[str, Encoded] = {}
    for document in documents:
        if document.sha256 not in without:
            taken[document.sha256] = document
        if len(taken) == count:
            break  # before the next is read
    return tuple(taken.values())


def take(
    usable: Usable, count: int, role: str, order: Iterable[Encoded] | None = None
) -> tuple[Encoded, ...]:
    documents = usable.cut(usable.hashes()) if order is None else order
    taken = _different(documents, count)
    _note(usable, len(taken), count, role)
    if not taken and role == "calibration":
        raise CorpusError("the calibration text has no usable document", hint="give another text")
    return taken


def _note(usable: Usable, taken: int, count: int, role: str) -> None:
    notes = usable.cutter.notes
    if usable.short:
        notes.append(f"{usable.short} {role} documents with nothing to score were left out")
    if usable.twice:
        notes.append(f"{usable.twice} duplicate {role} documents were left out")
    if taken < count:
        notes.append(f"{count} {role} documents were requested and {taken} are usable")


def take_units(usable: Usable, count: int) -> tuple[Encoded, ...]:
    """Take evaluation documents until they are so many, near-copies being one together."""
    if usable.cutter.protocol.packed:
        return take(usable, count, "evaluation")
    copies, taken, notes = NearCopies(), list[Encoded](), usable.cutter.notes
    for encoded in usable.cut(usable.hashes()):
        taken.append(replace(encoded, unit=copies.add(encoded.compared)))
        if copies.count == count or len(taken) == POOL * count:
            break  # before the next is read
    if len(taken) > copies.count:
        notes.append(
            f"{len(taken) - copies.count} evaluation documents are near-copies of others, and are "
            f"counted with them: {copies.count} units remain"
        )
    _note(usable, copies.count, count, "evaluation")
    return tuple(taken)


def take_further(
    usable: Usable, scored: Sequence[Encoded], count: int, without: Collection[bytes]
) -> tuple[Encoded, ...]:
    """Take up to so many units behind those that are scored; no copy of them, near or exact.

    `without` has what else must not be among them, by `Encoded.cut`.
    """
    copies, taken = NearCopies(), list[Encoded]()
    for encoded in scored:
        copies.add(encoded.compared)
    first, judged = copies.count, {encoded.sha256 for encoded in scored}
    documents = itertools.islice(usable.cut(usable.hashes()), len(judged) + POOL * count)
    is_chat = any(encoded.roles is not None for encoded in scored)
    with suppress(CorpusError):  # what is not measured on may be damaged
        for encoded in documents:
            if encoded.sha256 in judged or encoded.cut in without:
                continue
            unit = copies.add(encoded.compared)
            if unit >= first and (encoded.roles is not None) == is_chat:
                taken.append(replace(encoded, unit=unit - first))
            if copies.count - first == count:
                break  # before the next is read
    return tuple(taken)
