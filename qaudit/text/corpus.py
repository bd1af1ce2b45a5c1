"""Text -> Corpus: which documents are calibrated on, which are measured on, and their hashes.

A document is the unit of analysis. Evaluation takes the first usable documents; calibration
seed 0 does too, as published protocols do. The other seeds share the usable ones that follow, up to
`usable.POOL` times as many, so that a draw never reads a whole web crawl: they are shuffled once
and dealt out, so that two draws have no document in common and are independent of each other;
draws that overlap would scatter less than fresh text does. What a seed draws does not depend on
which others are drawn: a scan of seed 3 has the text of draw 3 of `repeats`.
What is cut counts: documents with the same tokens are one, in both texts they are refused, and
near-copies among those that are measured on are one unit (`text.copies`). What was left out,
missing or cut short is a note in the corpus.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qaudit.errors import CorpusError
from qaudit.text.cutting import Cutter, Encoded, Tokenizer
from qaudit.text.strata import strata_notes
from qaudit.text.usable import Usable, drawn, further_draws, take, take_units
from qaudit.types import Choice, Corpus, Document, EvaluationDocument, Protocol, Recipe


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


def build_corpus(
    calibration: Iterable[Document],
    evaluation: Iterable[Document],
    choices: Iterable[Choice],
    tokenizer: Tokenizer,
    protocol: Protocol,
    repeats: int = 1,
    strata: str | None = None,
) -> Corpus:
    """Cut text into a corpus; documents are taken lazily, no more than the protocol takes.

    There are `repeats` draws of calibration text, from the protocol's seed upwards.
    `strata` is the field that the evaluation documents are grouped by.
    """
    _check(protocol, strata)
    cutter = Cutter(tokenizer, protocol)
    text = Usable(evaluation, cutter)
    scored = take_units(text, protocol.evaluation_documents)
    count, seed = protocol.calibration_documents, protocol.calibration_seed
    pool = Usable(calibration, cutter)
    fed = take(pool, count, "calibration", drawn(pool, count, seed))
    _refuse_shared(fed, scored)
    cutter.notes += _chat_notes(scored, protocol)
    windows, documents = cutter.evaluation(scored)
    _refuse_too_few(documents, protocol)
    if strata is not None:
        cutter.notes += strata_notes(documents, strata)
    items, item_windows = cutter.choices(tuple(choices))
    draws = [fed, *further_draws(pool, fed, protocol, repeats)]
    _refuse_too_little(repeats, count, sum(map(len, draws)))
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
            hint="leave out `stride`, or `packed`",
        )
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
            hint="set a lower `--set repeats=N` or `--set calibration_documents=N`, or "
            "give a longer text",
        )


def _refuse_shared(fed: Sequence[Encoded], scored: Sequence[Encoded]) -> None:
    evaluated = {encoded.cut for encoded in scored}
    shared = [encoded.name for encoded in fed if encoded.cut in evaluated]
    if shared:
        raise CorpusError(
            f"calibration and evaluation share {len(shared)} documents, the first is `{shared[0]}`",
            hint="give two texts that have no document in common",
        )
