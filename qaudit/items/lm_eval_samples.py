"""`samples_TASK_DATE.jsonl` of lm-eval (`--log_samples`), and `results_DATE.json` beside it.

A line is an item under one filter. Its prompt is in `arguments`, for each option where options
are scored; the last part of `arguments` of text that is generated has the settings of the sampler.
lm-eval writes NaN and infinities as Python does: they are read, and refused where they decide.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qaudit.items.marks import AnsweredItem, AnswerFile, AnswerMark, bad_file, numbered
from qaudit.support.foreign import json_of
from qaudit.types import digest
from qaudit.whole import read_regular

_NAME = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl")
_MOST_RESULTS_NBYTES = 2**26


def read(path: Path, content: bytes) -> AnswerFile:
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
            lines.setdefault(str(line["filter"]), []).append(_answer(line, arguments))
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


def _answer(line: dict[str, Any], arguments: list[list[Any]]) -> AnsweredItem:
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
