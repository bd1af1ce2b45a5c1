"""Answers to items that lm-eval and inspect wrote, marked item by item.

Logs of inspect: `.json`, and `.eval`, a ZIP archive of the same parts.

Answers are what a model generated; a sample's prompt is every message before its first generated
one. Members of an archive are compressed with Zstandard since 2026, which Python reads from 3.14,
and before with the package `zstandard`.

`samples_TASK_DATE.jsonl` of lm-eval (`--log_samples`), and `results_DATE.json` beside it: a line is
an item under one filter. Its prompt is in `arguments`, for each option where options are scored;
the last part of `arguments` of text that is generated has the settings of the sampler. lm-eval
writes NaN and infinities as Python does: they are read, and refused where they decide.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import struct
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qaudit.errors import UsageError
from qaudit.support.extras import install
from qaudit.support.foreign import json_of
from qaudit.types import digest
from qaudit.whole import read_regular


@dataclass(frozen=True)
class AnswerMark:
    """What a metric gave an answer."""

    value: Any  # 0 or 1, unless the metric is no mark
    answer: str | int | None  # what it reads; None: the tool does not say


@dataclass(frozen=True)
class AnsweredItem:
    """An item as it was answered."""

    item: str  # a hash of the item and its prompt
    marks: Mapping[str, AnswerMark]  # by metric, as the tool names it


@dataclass(frozen=True)
class AnswerFile:
    """The answers to the items of one task."""

    path: Path
    sha256: str
    tool: str  # with its version
    task: str
    greedy: bool
    sampler: str  # its settings, to be equal on both sides
    answers: tuple[AnsweredItem, ...]

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(self.answers[0].marks) if self.answers else ()


def numbered(answers: Iterable[AnsweredItem]) -> tuple[AnsweredItem, ...]:
    """Return answers whose items differ: the second time that an item comes it is another one."""
    times: Counter[str] = Counter()
    numbered = []
    for answer in answers:
        times[answer.item] += 1
        numbered.append(replace(answer, item=f"{answer.item}-{times[answer.item]}"))
    return tuple(numbered)


def bad_file(path: Path, reason: str) -> UsageError:
    return UsageError(
        f"`{path}` cannot be imported: {reason}",
        hint="name a `samples_*.jsonl` of lm-eval (`--log_samples`) or a log of inspect",
    )


_MOST_NBYTES, _MOST_NBYTES_OF_PART = 2**31, 2**24
"""Of an archive, unpacked, and of one part, which takes 25 times as much when it is parsed."""
_ZSTANDARD = 93
_VALUES = {"C": 1, "I": 0, "N": 0, True: 1, False: 0}
"""What inspect writes for correct, incorrect and no answer."""
_SAMPLER = ("temperature", "top_p", "top_k", "max_tokens")


def read_inspect(path: Path, content: bytes) -> AnswerFile:
    try:
        log = json_of(content.decode())
        return _inspect_file(path, content, log, log["samples"])
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise bad_file(path, f"it is no log of inspect with samples: {error}") from error


def read_inspect_archive(path: Path, content: bytes) -> AnswerFile:
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
            return _inspect_file(path, content, header, samples)
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


def _inspect_file(
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
        numbered(map(_inspect_answer, samples)),
    )


def _inspect_answer(sample: Mapping[str, Any]) -> AnsweredItem:
    if sample.get("error"):
        raise ValueError(f"the sample {sample['id']!r:.60} ended in an error")
    item = digest([sample["input"], sample.get("choices"), sample["target"], _prompt(sample)])
    return AnsweredItem(item, dict(_marks(sample["scores"])))


def _prompt(sample: Mapping[str, Any]) -> list[list[Any]]:
    prompt = []
    for message in sample["messages"]:
        if message["role"] == "assistant" and message.get("source") == "generate":
            break
        prompt.append([message["role"], _inspect_text(message["content"], sample["attachments"])])
    return prompt


def _inspect_text(content: Any, attachments: Mapping[str, str]) -> Any:
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


_NAME = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl")
_MOST_RESULTS_NBYTES = 2**26


def read_lm_eval(path: Path, content: bytes) -> AnswerFile:
    lines: dict[str, list[AnsweredItem]] = {}
    samplers: set[str] = set()
    greedy: set[bool] = set()
    try:
        for number, line in enumerate(_objects(content), 1):
            arguments = _arguments(line)
            settings = [last for *_, last in arguments if isinstance(last, dict)]
            for field in _not_finite(line, settings):
                raise bad_file(path, f"`{field}` of item {number} has no finite number")
            samplers.add(json.dumps(settings[:1], sort_keys=True))
            greedy.update(map(is_greedy, settings))
            lines.setdefault(str(line["filter"]), []).append(_lm_eval_answer(line, arguments))
    except LookupError as error:
        raise bad_file(path, f"it is no file of samples: a line has no {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise bad_file(path, f"it is no file of samples: {error}") from error
    if not lines or len(samplers) > 1 or len(greedy) > 1:
        raise bad_file(path, "it has no items" if not lines else "its items differ in the sampler")
    name = _NAME.fullmatch(path.name)
    return AnswerFile(
        path,
        hashlib.sha256(content).hexdigest(),
        f"lm-eval {_version(path, name['date'] if name else '')}",
        name["task"] if name else path.stem.removeprefix("samples_"),
        greedy != {False},
        samplers.pop(),
        _joined(path, lines),
    )


def _objects(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.decode().split("\n"):
        if line.strip():
            yield json_of(line, of_python=True)


def _not_finite(line: dict[str, Any], settings: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the fields that are read of an item and have NaN, or an infinite setting."""
    values = [value for setting in settings for value in setting.values()]
    if not all(math.isfinite(value) for value in values if isinstance(value, float)):
        yield "arguments"
    # An option may have a probability of 0, but NaN does not say which is likeliest.
    if "acc" in line["metrics"] and any(str(loss).lower() == "nan" for loss in _losses(line)):
        yield "filtered_resps"


def _losses(line: dict[str, Any]) -> list[Any]:
    return [r[0] for r in line["filtered_resps"] if isinstance(r, list) and len(r) == 2]


def _arguments(line: dict[str, Any]) -> list[list[Any]]:
    """Return the arguments of each request: a context, and an option or a sampler's settings."""
    return [list(request.values()) for request in line["arguments"].values()]


def is_greedy(settings: dict[str, Any]) -> bool:
    """Return whether generation takes the likeliest token, as lm-eval's model classes do."""
    temperature = settings.get("temperature")
    if temperature is None:
        return not settings.get("do_sample")
    return temperature == 0 or settings.get("do_sample") is False


def _lm_eval_answer(line: dict[str, Any], arguments: list[list[Any]]) -> AnsweredItem:
    asked = [[part for part in parts if not isinstance(part, dict)] for parts in arguments]
    marks = {
        f"{metric},{line['filter']}": AnswerMark(line[metric], _picked(line, metric))
        for metric in line["metrics"]
    }
    return AnsweredItem(digest([line["doc"], asked]), marks)


def _picked(line: dict[str, Any], metric: str) -> str | int | None:
    """Return the option that a metric takes for the answer, or the text behind the filter."""
    responses, losses = line["filtered_resps"], _losses(line)
    if not losses or len(losses) != len(responses):
        return json.dumps(responses)
    if metric != "acc":
        return None  # it divides by lengths, which are not in the file
    if len(losses) == 1:  # one continuation: whether it is the likeliest
        return str(responses[0][1])
    values = [float(value) for value in losses]
    return values.index(max(values))


def _joined(path: Path, lines: dict[str, list[AnsweredItem]]) -> tuple[AnsweredItem, ...]:
    first, *further = (numbered(answers) for answers in lines.values())
    for answers in further:
        marks = {answer.item: answer.marks for answer in answers}
        if set(marks) != {answer.item for answer in first}:
            raise bad_file(path, "its filters have other items than each other")
        first = tuple(AnsweredItem(a.item, {**a.marks, **marks[a.item]}) for a in first)
    return first


def _results(path: Path) -> Any:
    return json_of(read_regular(path, _MOST_RESULTS_NBYTES).decode(), of_python=True)


def _version(path: Path, date: str) -> str:
    """Return the version that is in the results beside the samples, which do not have it."""
    beside = path.with_name(f"results_{date}.json")
    if not date or not beside.is_file():
        return "of an unknown version"
    try:
        return str(_results(beside)["lm_eval_version"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise bad_file(beside, f"it has no version of lm-eval: {error}") from error
