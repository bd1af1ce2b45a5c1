"""Logs of inspect: `.json`, and `.eval`, a ZIP archive of the same parts.

Answers are what a model generated; a sample's prompt is every message before its first generated
one. Members of an archive are compressed with Zstandard since 2026, which Python reads from 3.14,
and before with the package `zstandard`.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from qaudit.items.marks import AnsweredItem, AnswerFile, AnswerMark, bad_file, numbered
from qaudit.support.extras import install
from qaudit.support.foreign import json_of
from qaudit.types import digest

_MOST_NBYTES, _MOST_NBYTES_OF_PART = 2**31, 2**24
"""Of an archive, unpacked, and of one part, which takes 25 times as much when it is parsed."""
_ZSTANDARD = 93
_VALUES = {"C": 1, "I": 0, "N": 0, True: 1, False: 0}
"""What inspect writes for correct, incorrect and no answer."""
_SAMPLER = ("temperature", "top_p", "top_k", "max_tokens")


def read(path: Path, content: bytes) -> AnswerFile:
    try:
        log = json_of(content.decode())
        return _file(path, content, log, log["samples"])
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise bad_file(path, f"it is no log of inspect with samples: {error}") from error


def read_archive(path: Path, content: bytes) -> AnswerFile:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(part.file_size for part in archive.infolist()) > _MOST_NBYTES:
                raise ValueError("it unpacks to more than 2 GiB")
            parts = {part.filename: part for part in archive.infolist()}
            header = json_of(_member(archive, content, parts["header.json"]).decode())
            samples = (
                json_of(_member(archive, content, part).decode())
                for name, part in parts.items()
                if name.startswith("samples/")
            )
            return _file(path, content, header, samples)
    except (
        ValueError, TypeError, LookupError, AttributeError, zipfile.BadZipFile, EOFError,
        NotImplementedError, struct.error,
    ) as error:  # fmt: skip
        raise bad_file(path, f"it is no log of inspect with samples: {error}") from error


def _member(archive: zipfile.ZipFile, content: bytes, part: zipfile.ZipInfo) -> bytes:
    if part.file_size > _MOST_NBYTES_OF_PART:
        raise ValueError(f"its part {part.filename!r:.60} unpacks to more than 16 MiB")
    if part.compress_type != _ZSTANDARD or hasattr(zipfile, "ZIP_ZSTANDARD"):
        return archive.read(part)
    try:
        import zstandard
    except ImportError as error:
        raise ValueError(
            f"it is compressed with Zstandard: {install('zstandard')}, or write it as JSON with "
            "`inspect log convert --to json`"
        ) from error
    names = struct.unpack_from("<HH", content, part.header_offset + 26)
    start = part.header_offset + 30 + sum(names)
    packed = content[start : start + part.compress_size]
    with zstandard.ZstdDecompressor().stream_reader(packed) as reader:
        return bytes(reader.read(part.file_size))


def _file(
    path: Path, content: bytes, header: Mapping[str, Any], samples: Iterable[Mapping[str, Any]]
) -> AnswerFile:
    about = header["eval"]
    if header["status"] != "success":
        raise ValueError(f"its status is {header['status']}")
    epochs = about["config"].get("epochs") or 1
    if epochs != 1:
        raise ValueError(f"it has {epochs} epochs, and items are paired one to one")
    sampler = {**about.get("model_generate_config", {}), **header["plan"]["config"]}
    sampler = {k: sampler[k] for k in _SAMPLER if sampler.get(k) is not None}
    return AnswerFile(
        path,
        hashlib.sha256(content).hexdigest(),
        f"inspect {about['packages']['inspect_ai']}",
        str(about["task"]),
        sampler.get("temperature") == 0,
        json.dumps(sampler, sort_keys=True),
        numbered(map(_answer, samples)),
    )


def _answer(sample: Mapping[str, Any]) -> AnsweredItem:
    if sample.get("error"):
        raise ValueError(f"the sample {sample['id']!r:.60} ended in an error")
    item = digest([sample["input"], sample.get("choices"), sample["target"], _prompt(sample)])
    return AnsweredItem(item, dict(_marks(sample["scores"])))


def _prompt(sample: Mapping[str, Any]) -> list[list[Any]]:
    prompt = []
    for message in sample["messages"]:
        if message["role"] == "assistant" and message.get("source") == "generate":
            break
        prompt.append([message["role"], _text(message["content"], sample["attachments"])])
    return prompt


def _text(content: Any, attachments: Mapping[str, str]) -> Any:
    if isinstance(content, str) and content.startswith("attachment://"):
        return attachments[content.removeprefix("attachment://")]
    return content


def _marks(scores: Mapping[str, Any]) -> Iterator[tuple[str, AnswerMark]]:
    """Yield the mark of each scorer; of one that gives several values, each by its name."""
    for scorer, score in scores.items():
        value, answer = score["value"], score.get("answer")
        values = value if isinstance(value, dict) else {"": value}
        for name, mark in values.items():
            number = _VALUES.get(mark, mark) if isinstance(mark, str | bool) else mark
            key = f"{scorer},{name}" if name else scorer
            yield key, AnswerMark(number, None if answer is None else str(answer))
