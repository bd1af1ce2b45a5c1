"""Text -> Corpus: which documents are calibrated on, which are measured on, and their hashes.

A document is the unit of analysis. Evaluation takes the first usable documents; calibration
seed 0 does too, as published protocols do. The other seeds share the usable ones that follow, up to
`usable.POOL` times as many, so that a draw never reads a whole web crawl: they are shuffled once
and dealt out, so that two draws have no document in common and are independent of each other;
draws that overlap would scatter less than fresh text does. What a seed draws does not depend on
which others are drawn: a scan of seed 3 has the text of draw 3 of `repeats`.
What is cut counts: documents with the same tokens are one, in both texts they are refused, and
near-copies among those that are measured on are one unit (`text.usable`). A search for a soup
chooses on the documents that follow, where there are enough. What was left out, missing or cut
short is a note in the corpus.

Multiple-choice items from JSON lines.

    {"question": "...", "choices": ["...", "..."], "answer": 0}

Published sets differ in their names only: a `context` (or `ctx`) is taken as it is, a
`question` is put between "Question:" and "Answer:"; the options are `choices`, `options` or
`endings`, as a list or as a table of `text` and `label`; the answer is a position from zero, a
letter, or one of the labels. A space is put before an option unless there is one.

Groups of evaluation documents: their names, and fields that group nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qaudit.errors import CorpusError
from qaudit.items.tokens import PromptedItem
from qaudit.text.cutting import Cutter, Encoded, Tokenizer
from qaudit.text.documents import TextPath, must_exist, read_objects
from qaudit.text.usable import Usable, drawn, further_draws, take, take_further, take_units
from qaudit.types import CHOICES, Corpus, Document, EvaluationDocument, Protocol, Recipe

_CONTEXTS = ("context", "ctx", "question")
_OPTIONS = ("choices", "options", "endings")
_ANSWERS = ("answer", "label", "answerKey", "gold")
_HINT = 'write {"question": "...", "choices": ["...", "..."], "answer": 0} on each line'


def read_choices(source: str, path: Path | None = None) -> tuple[PromptedItem, ...]:
    file = TextPath(path or Path(source), source if path else str(Path(source)))
    must_exist(file)
    items = tuple(_item(file, number, value) for number, value in read_objects(file))
    if not items:
        raise CorpusError(f"`{file}` is empty", hint=_HINT)
    return items


def _item(file: TextPath, number: int, value: dict[str, Any]) -> PromptedItem:
    where = f"line {number} of `{file}`"
    field, context = _one_of(value, _CONTEXTS, where)
    if not isinstance(context, str):
        raise CorpusError(f"`{field}` in {where} is not a text", hint=_HINT)
    if field == "question":
        context = f"Question: {context}\nAnswer:"
    options, labels = _options(*_one_of(value, _OPTIONS, where), where)
    answer = _answer(_one_of(value, _ANSWERS, where)[1], labels, len(options), where)
    glue = "" if not context or context[-1].isspace() else " "
    pairs = tuple((context, o if o[:1].isspace() else glue + o) for o in options)
    return PromptedItem(CHOICES, f"{file.path.name}:{number}", pairs, (answer,))


def _one_of(value: dict[str, Any], names: tuple[str, ...], where: str) -> tuple[str, Any]:
    for name in names:
        if name in value:
            return name, value[name]
    wanted = " or ".join(f"`{name}`" for name in names)
    fields = ", ".join(value) or "none"
    raise CorpusError(f"{where} has no {wanted}", hint=f"its fields are {fields}; {_HINT}")


def _options(field: str, value: Any, where: str) -> tuple[list[str], list[str]]:
    labels = None
    if isinstance(value, dict):
        labels, value = value.get("label"), value.get("text")
    if not isinstance(value, list) or not all(isinstance(o, str) and o for o in value):
        raise CorpusError(f"`{field}` in {where} is not a list of texts", hint=_HINT)
    if len(value) < 2:
        raise CorpusError(f"{where} has {len(value)} options, and 2 are needed", hint=_HINT)
    if isinstance(labels, list) and len(labels) == len(value):
        return value, [str(label) for label in labels]
    return value, [chr(ord("A") + k) for k in range(len(value))]


def _answer(value: Any, labels: list[str], count: int, where: str) -> int:
    if isinstance(value, str) and value in labels:
        return labels.index(value)
    text = str(value)
    if (
        isinstance(value, int | str)
        and not isinstance(value, bool)
        and text in map(str, range(count))
    ):
        return int(text)
    raise CorpusError(
        f"the answer in {where} is `{value}`, which is none of {count} options",
        hint=f"write a position from 0 to {count - 1}, or one of {', '.join(labels)}",
    )


SHARE_FOR_SEARCH = 2
"""Of the documents that are judged, the part that is enough for a search: one in so many."""

MOST_STRATA = 32
"""All intervals hold at once, so that more strata would tell less about each."""


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
    return Protocol(
        context=context,
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
    fed = take(pool, count, "calibration", drawn(pool, count, seed))
    _refuse_shared(fed, scored)
    cutter.notes += _chat_notes(scored, protocol)
    windows, documents = cutter.evaluation(scored)
    _refuse_too_few(documents, protocol)
    if strata is not None:
        cutter.notes += strata_notes(documents, strata)
    draws = [fed, *further_draws(pool, fed, protocol, repeats)]
    _refuse_too_little(repeats, count, sum(map(len, draws)))
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
