"""Local text -> a tokenizer and a stream of tokens, prepared once per folder.

Every sixth document, by the hash of its name, is held out and recorded by the hash of its text; a
document with the same text is not trained on under any name. The text is read three times and
never held: to hash it, to train the tokenizer, to write the tokens, which training maps from disk.
What the folder has is used again while documents, vocabulary and tokenizer are the same, and
refused by the name of what changed otherwise, because the runs beside it were trained on it.

A stream is each document's end token and its text, document after document. Without a source, the
text is Python's own: some thirty megabytes of programs and reference.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from qaudit.errors import CorpusError, SourceError, UsageError, not_written
from qaudit.text.documents import part_of, python_documents, read_documents
from qaudit.types import Document, digest
from qaudit.whole import locked, write_whole

END = "<|endoftext|>"
FEWEST = 12  # documents to hold some out; a sixth of fewer would be one or none

Tokens = np.ndarray[Any, np.dtype[Any]]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class TokenStream:
    """The tokens of a text, mapped from disk, and their tokenizer."""

    tokens: Tokens
    tokenizer: PreTrainedTokenizerBase
    key: str  # of the documents and the tokenizer
    tokenizer_key: str
    documents: int = 0
    heldout: int = 0


def prepare(
    folder: Path,
    *,
    sources: Sequence[str] = (),
    vocabulary: int,
    tokenizer: Path | None = None,
    progress: Progress = lambda what, done, total: None,
) -> TokenStream:
    """Return the token stream of `sources`; write it to `folder` unless it is there.

    `tokenizer` is the folder of one to use; without it a byte-level BPE of `vocabulary` entries
    is trained on the documents.
    """
    with locked(folder / ".lock"):
        survey = _survey(sources, progress)
        wanted = {
            "text": list(sources) or f"Python {platform.python_version()}",
            "documents": survey.content,
            "vocabulary": None if tokenizer else vocabulary,
            "tokenizer": _tokenizer_key(tokenizer) if tokenizer else "trained",
        }
        path = folder / "text.json"
        if path.exists():
            record = _record_in(path)
            was = record["wanted"]
            wrong = [
                f"`{name}` was {str(was.get(name))[:40]} and is {str(now)[:40]}"
                for name, now in wanted.items()
                if was.get(name) != now and name != "text"
            ]
            if wrong:
                raise UsageError(
                    f"`{folder}` holds other text: {'; '.join(wrong)}",
                    hint="train into another folder, or use the text that this one was made from",
                )
        else:
            try:
                if tokenizer is None:
                    texts = (document.text for document in survey.training())
                    used: PreTrainedTokenizerBase = train_tokenizer(texts, vocabulary)
                else:
                    used = PreTrainedTokenizerFast.from_pretrained(tokenizer)
                used.save_pretrained(folder / "tokenizer")
                record = _encode(folder, survey, used, progress)
                _record_heldout(folder, survey)
                record["wanted"] = wanted
                write_whole(path, json.dumps(record, indent=1) + "\n")
            except OSError as error:
                raise not_written(folder, error) from error
    tokenizer_key = _tokenizer_key(folder / "tokenizer")
    return TokenStream(
        tokens=np.memmap(folder / "tokens.bin", dtype=record["dtype"], mode="r"),
        tokenizer=PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer"),
        key=digest([record["wanted"]["documents"], tokenizer_key]),
        tokenizer_key=tokenizer_key,
        documents=record["documents"],
        heldout=record["heldout"],
    )


def _record_in(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record["wanted"], dict) or record.keys() < {
            "wanted",
            "dtype",
            "documents",
            "heldout",
        }:
            raise ValueError("a key is missing")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise SourceError(
            f"`{path}` is not the record of a text",
            hint=f"remove `{path.parent}`, and the text is prepared again",
        ) from error
    return cast(dict[str, Any], record)


@dataclass(frozen=True)
class _Survey:
    sources: Sequence[str]
    content: str  # sha256 of all names and texts
    heldout: frozenset[str]  # sha256 of the texts
    count: int

    def training(self) -> Iterator[Document]:
        return (d for d in _documents(self.sources) if d.sha256 not in self.heldout)


def _documents(sources: Sequence[str]) -> Iterator[Document]:
    if not sources:
        yield from python_documents(tests=True)
    for source in sources:
        yield from read_documents(source)


def _survey(sources: Sequence[str], progress: Progress) -> _Survey:
    """Read the text once, to hash it and to choose what is held out."""
    whole = hashlib.sha256()
    heldout: set[str] = set()
    count = 0
    for count, document in enumerate(_documents(sources), 1):
        whole.update(f"{document.sha256}  {document.name}\n".encode())
        if part_of(document.name) == "evaluation":
            heldout.add(document.sha256)
        if count % 500 == 0:
            progress("reading text", count, count)
    if count == 0:
        raise CorpusError("there is no text to train on", hint="give a file or folder of text")
    if count < FEWEST:
        heldout.clear()
    return _Survey(sources, whole.hexdigest(), frozenset(heldout), count)


def _record_heldout(folder: Path, survey: _Survey) -> None:
    """Write the hashes of held-out documents, and their text where it is not Python's own."""
    path = folder / "heldout.jsonl" if survey.sources else Path(os.devnull)
    with (
        path.open("w", encoding="utf-8") as texts,
        (folder / "heldout.txt").open("w", encoding="utf-8") as names,
    ):
        names.write(f"# sha256 of the documents held out of {survey.count}\n")
        for document in _documents(survey.sources):
            if document.sha256 in survey.heldout:
                names.write(f"{document.sha256}  {document.name}\n")
                texts.write(json.dumps({"text": document.text}) + "\n")


def train_tokenizer(texts: Iterator[str], vocabulary: int) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END, eos_token=END, clean_up_tokenization_spaces=False
    )


def _tokenizer_key(folder: Path) -> str:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UsageError(
            f"there is no `tokenizer.json` in `{folder}`",
            hint="give the folder of a fast tokenizer, such as a checkpoint's",
        )
    return hashlib.sha256(path.read_bytes()).hexdigest()


def entries_of(folder: Path) -> int:
    """Return the vocabulary of a model for a tokenizer: its entries, rounded up to 64."""
    _tokenizer_key(folder)
    return -(-len(PreTrainedTokenizerFast.from_pretrained(folder)) // 64) * 64


def _encode(
    folder: Path, survey: _Survey, tokenizer: PreTrainedTokenizerBase, progress: Progress
) -> dict[str, Any]:
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise UsageError("the tokenizer has no end token", hint="give one with an eos token")
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    count, ntokens = 0, 0
    documents = survey.training()
    with (folder / "tokens.bin").open("wb") as file:
        while batch := list(islice(documents, 64)):
            texts = [document.text for document in batch]
            for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
                np.array([end, *ids], dtype=dtype).tofile(file)
                ntokens += 1 + len(ids)
            count += len(batch)
            progress("encoding text", count, survey.count)
    return {
        "documents": count,
        "heldout": survey.count - count,
        "tokens": ntokens,
        "dtype": np.dtype(dtype).name,
    }
