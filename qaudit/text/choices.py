"""Multiple-choice items from JSON lines.

    {"question": "...", "choices": ["...", "..."], "answer": 0}

Published sets differ in their names only: a `context` (or `ctx`) is taken as it is, a
`question` is put between "Question:" and "Answer:"; the options are `choices`, `options` or
`endings`, as a list or as a table of `text` and `label`; the answer is a position from zero, a
letter, or one of the labels. A space is put before an option unless there is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qaudit.errors import CorpusError
from qaudit.text.documents import TextPath, must_exist, read_objects
from qaudit.types import Choice

_CONTEXTS = ("context", "ctx", "question")
_OPTIONS = ("choices", "options", "endings")
_ANSWERS = ("answer", "label", "answerKey", "gold")
_HINT = 'write {"question": "...", "choices": ["...", "..."], "answer": 0} on each line'


def read_choices(source: str, path: Path | None = None) -> tuple[Choice, ...]:
    file = TextPath(path or Path(source), source if path else str(Path(source)))
    must_exist(file)
    items = tuple(_item(file, number, value) for number, value in read_objects(file))
    if not items:
        raise CorpusError(f"`{file}` is empty", hint=_HINT)
    return items


def _item(file: TextPath, number: int, value: dict[str, Any]) -> Choice:
    where = f"line {number} of `{file}`"
    field, context = _one_of(value, _CONTEXTS, where)
    if not isinstance(context, str):
        raise CorpusError(f"`{field}` in {where} is not a text", hint=_HINT)
    if field == "question":
        context = f"Question: {context}\nAnswer:"
    options, labels = _options(*_one_of(value, _OPTIONS, where), where)
    answer = _answer(_one_of(value, _ANSWERS, where)[1], labels, len(options), where)
    glue = "" if not context or context[-1].isspace() else " "
    spaced = tuple(o if o[:1].isspace() else glue + o for o in options)
    return Choice(f"{file.path.name}:{number}", context, spaced, answer)


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
