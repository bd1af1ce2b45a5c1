"""Text -> Corpus: which documents are calibrated on, which are measured on, and their hashes.

A document is the unit of analysis. Evaluation takes the first usable documents; calibration
seed 0 does too, as published protocols do. The other seeds share the usable ones that follow, up to
`POOL` times as many, so that a draw never reads a whole web crawl: they are shuffled once and dealt
out, so that two draws have no document in common and are independent of each other; draws that
overlap would scatter less than fresh text does. What a seed draws does not depend on which others
are drawn: a scan of seed 3 has the text of draw 3 of `--repeats`. Documents are taken lazily.
What is cut counts: documents with the same tokens are one, in both texts they are refused, and
near-copies among those that are measured on are one unit (`text.copies`). What was left out,
missing or cut short is a note in the corpus.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from qaudit.core.power import MOST_TO_DECIDE
from qaudit.errors import CorpusError
from qaudit.text.copies import NearCopies
from qaudit.text.cutting import Cutter, Encoded, Tokenizer
from qaudit.text.strata import strata_notes
from qaudit.types import (
    UNSCORED,
    Choice,
    Corpus,
    Document,
    EvaluationDocument,
    Protocol,
    Recipe,
)

POOL = 16
"""Calibration seeds draw from this many times the documents asked for: so many share nothing."""

LONGEST_COUNTED = 1 << 26  # characters that are read to count documents

ONE_DRAW = "calibration text was drawn once"

DRAWS = (3, 5, 7)
"""Of calibration text for what decides, where the recipe does not say how many: more as needed."""


def make_protocol(recipe: Recipe, context: int, item_context: int | None = None) -> Protocol:
    """Return how text becomes windows of at most `context` tokens."""
    return Protocol(
        context=context,
        stride=recipe.stride or context,
        bos=recipe.bos,
        packed=recipe.packed,
        evaluation_documents=recipe.evaluation_documents,
        calibration_documents=recipe.calibration_documents,
        document_tokens=recipe.document_tokens,
        calibration_seed=recipe.calibration_seed,
        item_context=item_context,
    )


def build_corpus(  # noqa: PLR0913 - two texts, items, and how to cut them
    calibration: Iterable[Document],
    evaluation: Iterable[Document],
    choices: Iterable[Choice],
    tokenizer: Tokenizer,
    protocol: Protocol,
    repeats: int | None = 1,
    strata: str | None = None,
) -> Corpus:
    """Cut text into a corpus; documents are taken lazily, no more than the protocol takes.

    With `repeats` there are as many draws of calibration text, from the protocol's seed upwards.
    Without a number there are three where the text has so many documents, and one otherwise.
    `strata` is the field that the evaluation documents are grouped by.
    """
    _check(protocol, strata)
    cutter = Cutter(tokenizer, protocol)
    text = _Usable(evaluation, cutter)
    scored = _take_units(text, protocol.evaluation_documents)
    count, seed = protocol.calibration_documents, protocol.calibration_seed
    pool = _Usable(calibration, cutter)
    fed = _take(pool, count, "calibration", _drawn(pool, count, seed))
    _refuse_shared(fed, scored)
    cutter.notes += _chat_notes(scored, protocol)
    windows, documents = cutter.evaluation(scored)
    _refuse_too_few(documents, protocol)
    if strata is not None:
        cutter.notes += strata_notes(documents, strata)
    items, item_windows = cutter.choices(tuple(choices))
    # Without a number the recipe asks for no further draw, and none may refuse its text.
    taken = fed if repeats is not None else (*fed, *scored)
    draws = [fed, *_further(pool, taken, protocol, repeats or DRAWS[-1])]
    if repeats is not None:
        _refuse_too_little(len(draws), count, sum(map(len, draws)))
    else:
        draws, notes = _enough(draws, count)
        cutter.notes += notes
    for draw in draws[1:]:
        _refuse_shared(draw, scored)
    return Corpus(
        protocol=protocol,
        calibration=cutter.calibration(fed),
        evaluation=windows,
        documents=documents,
        items=items,
        item_windows=item_windows,
        notes=tuple(cutter.notes),
        available=text.available(len(documents)),
        further=tuple(cutter.calibration(draw) for draw in draws[1:]),
    )


def _check(protocol: Protocol, strata: str | None) -> None:
    if protocol.context < 2:
        raise CorpusError("a context of one token scores nothing", hint="use 2 or more")
    if not 1 <= protocol.stride <= protocol.context:
        raise CorpusError(
            f"a stride of {protocol.stride} does not fit a context of {protocol.context}",
            hint="use 1 to the context's length; a longer stride would skip text",
        )
    if protocol.packed and protocol.stride != protocol.context:
        raise CorpusError(
            "packed windows do not overlap, because each is a unit of its own",
            hint="leave out `--stride`, or `--packed`",
        )
    if protocol.packed and strata is not None:
        raise CorpusError(
            "packed windows run documents together, and have no value of "
            f"`{strata}` to be grouped by",
            hint="leave out `--packed`, or `--strata`",
        )


class _Usable:
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


def _drawn(pool: _Usable, count: int, seed: int) -> Iterator[Encoded]:
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


def _further(
    pool: _Usable, first: Sequence[Encoded], protocol: Protocol, draws: int
) -> Iterator[tuple[Encoded, ...]]:
    """Yield the draws of the seeds that follow, with no document of `first` or of two draws.

    Draws that shared documents would agree because of that.
    """
    count, taken = protocol.calibration_documents, {encoded.sha256 for encoded in first}
    for k in range(1, draws):
        documents = _drawn(pool, count, protocol.calibration_seed + k)
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


def _take(
    usable: _Usable, count: int, role: str, order: Iterable[Encoded] | None = None
) -> tuple[Encoded, ...]:
    """Take the first `count` usable documents of an order, and note what was left out."""
    documents = usable.cut(usable.hashes()) if order is None else order
    taken = _different(documents, count)
    _note(usable, len(taken), count, role)
    if not taken and role == "calibration":
        raise CorpusError("the calibration text has no usable document", hint="give another text")
    return taken


def _note(usable: _Usable, taken: int, count: int, role: str) -> None:
    notes = usable.cutter.notes
    if usable.short:
        notes.append(f"{usable.short} {role} documents with nothing to score were left out")
    if usable.twice:
        notes.append(f"{usable.twice} duplicate {role} documents were left out")
    if taken < count:
        notes.append(f"{count} {role} documents were requested and {taken} are usable")


def _take_units(usable: _Usable, count: int) -> tuple[Encoded, ...]:
    """Take evaluation documents until they are so many, near-copies being one together."""
    if usable.cutter.protocol.packed:
        return _take(usable, count, "evaluation")
    copies, taken, notes = NearCopies(), list[Encoded](), usable.cutter.notes
    for encoded in usable.cut(usable.hashes()):
        taken.append(replace(encoded, unit=copies.add(encoded.compared)))
        if copies.count == count:
            break  # before the next is read
    if len(taken) > copies.count:
        notes.append(
            f"{len(taken) - copies.count} evaluation documents are near-copies of others, and are "
            f"counted with them: {copies.count} units remain"
        )
    _note(usable, copies.count, count, "evaluation")
    return tuple(taken)


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
        raise CorpusError("packed windows run conversations together", hint="leave out `--packed`")
    alone = sum(encoded.last_alone for encoded in scored)
    sentence = (
        f"of {alone} of {len(scored)} conversations the last answer alone is scored: the template "
        "renders the messages before an answer otherwise than all of them"
    )
    return [sentence] if alone else []


def _refuse_too_few(documents: Sequence[EvaluationDocument], protocol: Protocol) -> None:
    if len(documents) < 2:
        unit = "packed window" if protocol.packed else "document"
        plural = "" if len(documents) == 1 else "s"
        raise CorpusError(
            f"the evaluation text has {len(documents)} usable {unit}{plural}, and 2 are needed",
            hint="intervals are between documents: give more, one a line (.jsonl) or one a file",
        )


def _refuse_too_little(draws: int, count: int, different: int) -> None:
    if draws > 1 and different < draws * count:
        raise CorpusError(
            f"{draws} calibration draws of {count} documents need {draws * count} "
            f"different ones, and the calibration text gives {different}",
            hint="lower `--repeats` or `--calibration-documents`, or give a longer text",
        )


def _enough(
    draws: Sequence[tuple[Encoded, ...]], count: int
) -> tuple[list[tuple[Encoded, ...]], list[str]]:
    """Return as many draws as the text fills; one, with a note, where that is fewer than three."""
    whole = sum(len(draw) == count for draw in draws)
    usable = max((number for number in DRAWS if number <= whole), default=1)
    few = [] if usable > 1 else [_one_draw(DRAWS[0], count, sum(map(len, draws[: DRAWS[0]])))]
    return list(draws[:usable]), few


def _one_draw(draws: int, count: int, different: int) -> str:
    return (
        f"{ONE_DRAW}, and intervals leave out the draw: {draws} draws of {count} documents need "
        f"{draws * count} different ones, and the text gives {different}"
    )


def _refuse_shared(fed: Sequence[Encoded], scored: Sequence[Encoded]) -> None:
    evaluated = {encoded.cut for encoded in scored}
    shared = [encoded.name for encoded in fed if encoded.cut in evaluated]
    if shared:
        raise CorpusError(
            f"calibration and evaluation share {len(shared)} documents, the first is `{shared[0]}`",
            hint="give two texts that have no document in common",
        )
