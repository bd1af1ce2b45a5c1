"""An answer with its marks, whatever tool wrote them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qaudit.errors import UsageError


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
