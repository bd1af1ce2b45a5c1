"""Text -> Corpus: which documents are calibrated on, which are measured on, and their hashes.

A document is the unit of analysis. Evaluation takes the first usable documents; calibration
seed 0 does too, as published protocols do, and any other seed draws as many without
replacement from the first `POOL` times as many, so that a draw never reads a whole web crawl.
Documents are taken lazily. One that stands in both texts is refused by the hash of its bytes;
what was left out, missing or cut short is a note in the corpus.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from qaudit.engine.cutting import Cutter, Encoded, Tokenizer
from qaudit.errors import CorpusError, SourceError
from qaudit.types import Choice, Corpus, Document, EvaluationDocument, Protocol, Recipe

POOL = 16
"""Calibration seeds other than 0 draw from this many times the documents asked for."""

_SETTINGS = "tokenizer_config.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", _SETTINGS)


def make_protocol(recipe: Recipe, context: int) -> Protocol:
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
    )


def load_tokenizer(
    folder: Path, *, trust_remote_code: bool = False, config: object = None
) -> Tokenizer:
    """Load the tokenizer that lies in a checkpoint's folder.

    Code of the repository is run only with leave, and only where the library has no tokenizer
    of its own for the files there. A `config` is given where the library cannot read it itself.
    """
    from transformers import AutoTokenizer

    hint = "copy `tokenizer.json` and `tokenizer_config.json` of the model into the folder"
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise SourceError(f"there is no tokenizer in `{folder}`", hint=hint)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True, config=config
        )
        return cast(Tokenizer, tokenizer)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        if has_own_code(folder):
            return _own_tokenizer(folder, trust_remote_code)
        reason = " ".join(str(error).split())[:200]
        raise SourceError(
            f"the tokenizer in `{folder}` cannot be read: {reason}", hint=hint
        ) from error


def has_own_code(folder: Path) -> bool:
    """Say whether the files of a tokenizer name code of their repository."""
    try:
        table = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(table, dict) and bool(table.get("auto_map"))


def _own_tokenizer(folder: Path, trust_remote_code: bool) -> Tokenizer:
    from qaudit.engine.model.remote import foreign, remote_class

    if not trust_remote_code:
        raise SourceError(
            f"the tokenizer in `{folder}` is code of its own, which is not run unless asked for",
            hint="read the code, then pass `--trust-remote-code` to run it on this machine",
        )
    kind = remote_class(folder, "AutoTokenizer", _SETTINGS)
    with foreign(folder, "to make its tokenizer"):
        tokenizer: Tokenizer = kind.from_pretrained(str(folder), local_files_only=True)
    return tokenizer


def build_corpus(
    calibration: Iterable[Document],
    evaluation: Iterable[Document],
    choices: Iterable[Choice],
    tokenizer: Tokenizer,
    protocol: Protocol,
    sources: Iterable[tuple[str, str]] = (),
) -> Corpus:
    """Cut text into a corpus; documents are taken lazily, no more than the protocol asks for."""
    _check(protocol)
    cutter = Cutter(tokenizer, protocol)
    scored = _take(evaluation, protocol.evaluation_documents, "evaluation", cutter)
    fed = _take(_draw(calibration, protocol), protocol.calibration_documents, "calibration", cutter)
    _refuse_shared(fed, scored)
    windows, documents = cutter.evaluation(scored)
    _refuse_too_few(documents, protocol)
    items = tuple(choices)
    return Corpus(
        protocol=protocol,
        calibration=cutter.calibration(fed),
        evaluation=windows,
        documents=documents,
        choices=items,
        choice_windows=tuple(cutter.choices(items)),
        sources=tuple(sources),
        notes=tuple(cutter.notes),
    )


def _check(protocol: Protocol) -> None:
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


def _draw(documents: Iterable[Document], protocol: Protocol) -> Iterator[Document]:
    """Return calibration documents in the order in which the seed takes them."""
    if protocol.calibration_seed == 0:
        return iter(documents)
    pool = list(itertools.islice(documents, POOL * protocol.calibration_documents))
    generator = np.random.default_rng(protocol.calibration_seed)
    return (pool[k] for k in generator.permutation(len(pool)))


def _take(
    documents: Iterable[Document], count: int, role: str, cutter: Cutter
) -> tuple[Encoded, ...]:
    """Encode the first `count` usable documents, no document twice."""
    taken: dict[str, Encoded] = {}
    short = twice = 0
    for document in documents:
        if document.sha256 in taken:
            twice += 1
            continue
        encoded = cutter.encode(document)
        if len(encoded.tokens) <= cutter.unscored:
            short += 1
            continue
        taken[document.sha256] = encoded
        if len(taken) == count:
            break  # before the next is read
    if short:
        cutter.notes.append(f"{short} {role} documents with nothing to score were left out")
    if twice:
        cutter.notes.append(f"{twice} {role} documents that stand there twice were left out")
    if len(taken) < count:
        cutter.notes.append(f"{count} {role} documents were asked for and {len(taken)} are usable")
    if not taken and role == "calibration":
        raise CorpusError("the calibration text has no usable document", hint="give another text")
    return tuple(taken.values())


def _refuse_too_few(documents: Sequence[EvaluationDocument], protocol: Protocol) -> None:
    if len(documents) < 2:
        unit = "packed windows" if protocol.packed else "documents"
        raise CorpusError(
            f"the evaluation text has {len(documents)} usable {unit}, and 2 are needed",
            hint="intervals are between documents: give more, one a line (.jsonl) or one a file",
        )


def _refuse_shared(fed: Sequence[Encoded], scored: Sequence[Encoded]) -> None:
    known = {encoded.sha256 for encoded in scored}
    shared = [encoded.name for encoded in fed if encoded.sha256 in known]
    if shared:
        raise CorpusError(
            f"calibration and evaluation share {len(shared)} documents, the first is `{shared[0]}`",
            hint="give two texts that have no document in common",
        )
