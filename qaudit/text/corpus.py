"""Text -> Corpus: which documents are calibrated on, which are measured on, and their hashes.

A document is the unit of analysis. Evaluation takes the first usable documents; calibration
seed 0 does too, as published protocols do. The other seeds share the usable ones that follow, up to
`POOL` times as many, so that a draw never reads a whole web crawl: they are shuffled once
and dealt out, so that two draws have no document in common and are independent of each other;
draws that overlap would scatter less than fresh text does. What a seed draws does not depend on
which others are drawn: a scan of seed 3 has the text of draw 3 of `repeats`.
What is cut counts: documents with the same tokens are one, in both texts they are refused, and
near-copies among those that are measured on are one unit. A search for a soup
chooses on the documents that follow, where there are enough. What was left out, missing or cut
short is a note in the corpus.

Two documents that share text scatter less than two of a kind, and their interval is too narrow:
with each text four times, 69 % hold where 95 were promised. Documents are compared by the runs of
eight tokens that they have (shingles), of which each keeps the 128 with the lowest hashes
(bottom-k, Broder 1997). Those with a third of them in common, which is half of the text of two as
long, are one unit of analysis: their sums are added up. Short documents are not compared: a third
of them is a phrase.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace

import numpy as np
import numpy.typing as npt

from qaudit.core.statistics import MOST_TO_DECIDE
from qaudit.errors import CorpusError
from qaudit.text.tokenizer import Cutter, Encoded, Tokenizer
from qaudit.types import UNSCORED, Corpus, Document, EvaluationDocument, Protocol, Recipe

SHARE_FOR_SEARCH = 2
"""Of the documents that are judged, the part that is enough for a search: one in so many."""

MOST_STRATA = 32
"""All intervals hold at once, so that more strata would tell less about each."""


SHINGLE = 8  # tokens
SKETCH = 128  # shingles of a document that are kept
SHORTEST = 32  # tokens of a document that is compared
ALIKE = 1 / 3  # of the shingles of two documents together
COMMON = 256  # documents that a shingle is in, from which on it may be a header's

Sketch = npt.NDArray[np.uint64]


@dataclass
class NearCopies:
    """Documents by their shingles, in clusters.

    A near-copy has a third of a document's shingles. So it has another one than those of a header
    or a prompt, which most documents have, as long as these are less than a third: then none of
    the many that have them is looked at.
    """

    clusters: list[int] = field(default_factory=list)  # of each document, counted from zero
    count: int = 0  # of clusters
    _sketches: list[Sketch] = field(default_factory=list)
    _first: dict[int, int] = field(default_factory=dict)  # the document that has a shingle first
    _holders: dict[int, list[int]] = field(default_factory=dict)  # all, where there are several

    def add(self, tokens: npt.NDArray[np.int32]) -> int:
        """Return the cluster of one more document: that of the first near-copy, or a new one."""
        sketch, number = sketch_of(tokens), len(self.clusters)
        firsts = ((value, self._first.setdefault(value, number)) for value in sketch.tolist())
        holders = [
            self._holders.setdefault(value, [first]) for value, first in firsts if first != number
        ]
        rare = [numbers for numbers in holders if len(numbers) <= COMMON]
        if 3 * (len(holders) - len(rare)) >= len(sketch):
            rare = holders
        common = len(holders) - len(rare)
        shared = Counter(itertools.chain.from_iterable(rare))
        least = ALIKE * min(SKETCH, len(sketch)) - common  # whatever the other's sketch
        alike = (
            k
            for k in sorted(shared)
            if shared[k] >= least and _overlap(sketch, self._sketches[k]) >= ALIKE
        )
        first = next(alike, None)
        cluster = self.count if first is None else self.clusters[first]
        self.count += first is None
        self.clusters.append(cluster)
        self._sketches.append(sketch)
        for numbers in holders:
            numbers.append(number)
        return cluster


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
                is_short = len(encoded.tokens) <= self.cutter.unscored
                if encoded.roles is not None:
                    is_short = not (encoded.roles[1:] != UNSCORED).any()
                is_copy = encoded.cut in self._tokens
                self._cut[sha256] = None if is_short or is_copy else encoded
                self._tokens.add(encoded.cut)
                self.short, self.twice = self.short + is_short, self.twice + (is_copy > is_short)
            document = self._cut[sha256]
            if document is not None:
                yield document

    def available(self, taken: int) -> int | None:
        """Count the documents of the text, `taken` and those behind, up to what may be decided.

        None where they are too long to be read for that.
        """
        behind, characters = {*self._uncut}, 0
        with suppress(CorpusError):  # what is not measured on may be damaged
            for document in itertools.islice(self._documents, MOST_TO_DECIDE):
                if document.sha256 not in self._cut:
                    behind.add(document.sha256)
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
        packed = _different(usable.cut(usable.hashes()), count)
        _note(usable, len(packed), count, "evaluation")
        return packed
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


def strata_notes(documents: Sequence[EvaluationDocument], field: str) -> list[str]:
    """Return notes on the strata of documents, or refuse them."""
    counts = Counter(document.stratum for document in documents)
    total = len(documents)
    if max(counts.values()) < 2:
        raise CorpusError(
            f"each of the {total} evaluation documents has its own value of `{field}`, "
            "and an interval is between documents of one value",
            hint="name a field whose values repeat: `--set strata=source`",
        )
    if len(counts) > MOST_STRATA:
        raise CorpusError(
            f"the field `{field}` has {len(counts)} values in {total} evaluation documents, "
            f"and at most {MOST_STRATA} are compared at once",
            hint="name a field with fewer values: `--set strata=source`",
        )
    notes = []
    if len(counts) == 1:
        notes.append(
            f"all evaluation documents have the value `{next(iter(counts))}` of `{field}`: "
            "shuffle the text if it has others further down"
        )
    if alone := sum(count == 1 for count in counts.values()):
        notes.append(f"{alone} of {len(counts)} strata have one document, and no interval")
    return notes


def make_protocol(recipe: Recipe, context: int, item_context: int | None = None) -> Protocol:
    """Return how text becomes windows of at most `context` tokens."""
    names = {f.name for f in fields(Protocol)} - {"context", "item_context"}
    of_recipe = {name: getattr(recipe, name) for name in names}
    return Protocol(context=context, item_context=item_context, **of_recipe)


def build_corpus(
    calibration: Iterable[Document],
    evaluation: Iterable[Document],
    tokenizer: Tokenizer,
    protocol: Protocol,
    repeats: int = 1,
    strata: str | None = None,
    *,
    searches: bool = False,
) -> Corpus:
    """Cut text into a corpus; documents are taken lazily, no more than the protocol takes.

    There are `repeats` draws of calibration text, from the protocol's seed upwards.
    `strata` is the field that the evaluation documents are grouped by. `searches` takes further
    documents for a search.
    """
    _check(protocol, strata)
    cutter = Cutter(tokenizer, protocol)
    text = Usable(evaluation, cutter)
    scored = take_units(text, protocol.evaluation_documents)
    count, seed = protocol.calibration_documents, protocol.calibration_seed
    pool = Usable(calibration, cutter)
    fed = _different(drawn(pool, count, seed), count)
    _note(pool, len(fed), count, "calibration")
    if not fed:
        raise CorpusError("the calibration text has no usable document", hint="give another text")
    _refuse_shared(fed, scored)
    cutter.notes += _chat_notes(scored, protocol)
    windows, documents = cutter.evaluation(scored)
    if len(documents) < 2:
        unit = "packed window" if protocol.packed else "document"
        plural = "" if len(documents) == 1 else "s"
        raise CorpusError(
            f"the evaluation text has {len(documents)} usable {unit}{plural}, and 2 are needed",
            hint="intervals are between documents: give more, one a line (.jsonl) or one a file",
        )
    if strata is not None:
        cutter.notes += strata_notes(documents, strata)
    draws = [fed, *_further_draws(pool, fed, protocol, repeats)]
    for draw in draws[1:]:
        _refuse_shared(draw, scored)
    further = tuple[Encoded, ...]()
    if searches:
        fed_text = {encoded.cut for draw in draws for encoded in draw}
        further = take_further(text, scored, protocol.evaluation_documents, fed_text)
    search, search_documents = cutter.evaluation(further)
    corpus = Corpus(
        protocol=protocol,
        calibration=cutter.calibration(fed),
        evaluation=windows,
        documents=documents,
        available=text.available(len(documents) + len(search_documents)),
        further=tuple(cutter.calibration(draw) for draw in draws[1:]),
    )
    if len(search_documents) >= len(documents) / SHARE_FOR_SEARCH:
        corpus = replace(corpus, search=search, search_documents=search_documents)
    elif searches:
        cutter.notes.append(
            f"the evaluation text has {len(search_documents)} further documents for a search, too "
            f"few beside {len(documents)}: it chooses on these, and its trials count where its "
            "soup is judged"
        )
    return replace(corpus, notes=tuple(cutter.notes))


def _check(protocol: Protocol, strata: str | None) -> None:
    if protocol.context < 2:
        raise CorpusError("a context of one token scores nothing", hint="use 2 or more")
    if protocol.packed and strata is not None:
        raise CorpusError(
            "packed windows run documents together, and have no value of "
            f"`{strata}` to be grouped by",
            hint="leave out `packed`, or `strata`",
        )


def _chat_notes(scored: Sequence[Encoded], protocol: Protocol) -> list[str]:
    """Return notes on conversations, or refuse them beside plain text and packed."""
    plain = [encoded.name for encoded in scored if encoded.roles is None]
    if len(plain) == len(scored):
        return []
    if plain:
        raise CorpusError(
            f"the evaluation text has conversations, and `{plain[0]}` is none",
            hint="give `messages` in every document, or in none",
        )
    if protocol.packed:
        raise CorpusError("packed windows run conversations together", hint="leave out `packed`")
    alone = sum(encoded.last_alone for encoded in scored)
    sentence = (
        f"of {alone} of {len(scored)} conversations the last answer alone is scored: the template "
        "renders the messages before an answer otherwise than all of them"
    )
    return [sentence] if alone else []


def _further_draws(
    pool: Usable, first: Sequence[Encoded], protocol: Protocol, repeats: int
) -> list[tuple[Encoded, ...]]:
    """Return the draws of the seeds that follow, with no document of `first` or of two draws.

    Draws that shared documents would agree because of that.
    """
    count, taken = protocol.calibration_documents, {encoded.sha256 for encoded in first}
    draws = []
    for seed in range(protocol.calibration_seed + 1, protocol.calibration_seed + repeats):
        draws.append(_different(drawn(pool, count, seed), count, taken))
        taken |= {encoded.sha256 for encoded in draws[-1]}
    if repeats > 1 and len(taken) < repeats * count:
        raise CorpusError(
            f"{repeats} calibration draws of {count} documents need {repeats * count} "
            f"different ones, and the calibration text gives {len(taken)}",
            hint="set a lower `--set repeats=N` or `--set calibration_documents=N`, or "
            "give a longer text",
        )
    return draws


def _refuse_shared(fed: Sequence[Encoded], scored: Sequence[Encoded]) -> None:
    evaluated = {encoded.cut for encoded in scored}
    shared = [encoded.name for encoded in fed if encoded.cut in evaluated]
    if shared:
        raise CorpusError(
            f"calibration and evaluation share {len(shared)} documents, the first is `{shared[0]}`",
            hint="give two texts that have no document in common",
        )
