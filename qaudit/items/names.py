"""Tasks that are known without lm-eval: the twelve of paper A, their sizes, and presets.

Sizes of splits are exact. Characters are means over documents, so that a price is good to about
15 %; once the prompts are built, a plan counts them instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DEFAULT_SHOTS = 5
DEFAULT_ITEMS = 500
ALL_ITEMS = "all"


@dataclass(frozen=True)
class KnownTask:
    """The size of a task: items, options, and characters of what a prompt is made of."""

    folder: str  # below lm-eval's tasks
    items: int
    options: int
    shown_characters: int  # of an example, with its answer
    question_characters: int
    option_characters: int
    characters_per_token: float
    single_token: bool = False  # every option is one token

    def tokens(self, shots: int = DEFAULT_SHOTS, *, trees: bool = True) -> int:
        """Return how many tokens go through a model for one item, its context once in trees."""
        context = (shots * self.shown_characters + self.question_characters) / (
            self.characters_per_token
        )
        option = 1.0 if self.single_token else self.option_characters / self.characters_per_token
        contexts = 1 if trees or self.single_token else self.options
        return math.ceil(contexts * context + self.options * (option - 1))


KNOWN: dict[str, KnownTask] = {
    "arc_challenge": KnownTask("arc", 1172, 4, 190, 165, 30, 4.4),
    "arc_easy": KnownTask("arc", 2376, 4, 158, 135, 22, 4.4),
    "openbookqa": KnownTask("openbookqa", 500, 4, 73, 52, 20, 4.5),
    "piqa": KnownTask("piqa", 1838, 2, 155, 55, 99, 4.4),
    "hellaswag": KnownTask("hellaswag", 10042, 4, 336, 250, 85, 4.4),
    "winogrande": KnownTask("winogrande", 1267, 2, 102, 55, 45, 4.4),
    "mathqa": KnownTask("mathqa", 2985, 5, 181, 173, 5, 3.3),
    "pubmedqa": KnownTask("pubmedqa", 500, 3, 1475, 1470, 4, 4.4, True),
    "sciq": KnownTask("sciq", 1000, 4, 620, 605, 12, 4.4),
    "social_iqa": KnownTask("siqa", 1954, 3, 156, 131, 24, 4.5),
    "commonsense_qa": KnownTask("commonsense_qa", 1221, 5, 163, 160, 2, 3.9, True),
    "mmlu": KnownTask("mmlu/default", 14042, 4, 485, 480, 2, 3.9, True),
}

PRESETS: dict[str, tuple[str, ...]] = {"paper-a": tuple(KNOWN)}
"""Lists of tasks under one name."""

_UNKNOWN = KnownTask("", DEFAULT_ITEMS, 4, 440, 300, 40, 4.4)
"""A task whose size is not in the table: a few short examples."""


def named(requested: Sequence[str]) -> tuple[str, ...]:
    """Return the requested tasks with presets written out, no task twice."""
    names = (name for request in requested for name in PRESETS.get(request, (request,)))
    return tuple(dict.fromkeys(names))


def descriptions() -> dict[str, str]:
    lines = {}
    for name, tasks in PRESETS.items():
        sizes = dict.fromkeys(tasks)
        items = sum(items_of(sizes, DEFAULT_ITEMS).values())
        some, every = (sum(bound(sizes, n, None).values()) for n in (DEFAULT_ITEMS, None))
        lines[name] = (
            f"{len(tasks)} tasks, {items:,} items, about {some / 1e6:.1f} M tokens; "
            f"of all items {every / 1e6:.0f} M"
        )
    for name, task in KNOWN.items():
        tokens = task.tokens() * min(task.items, DEFAULT_ITEMS)
        lines[name] = (
            f"{task.items:,} items of {task.options} options, about {task.tokens():,} tokens each; "
            f"{tokens / 1e6:.2f} M of {min(task.items, DEFAULT_ITEMS)} items"
        )
    return lines


def items_of(sizes: Mapping[str, int | None], most: int | None) -> dict[str, int]:
    """Return how many items of each task are measured, by sizes that None does not know."""
    every = {
        name: KNOWN.get(name, _UNKNOWN).items if size is None else size
        for name, size in sizes.items()
    }
    return {name: count if most is None else min(count, most) for name, count in every.items()}


def bound(
    sizes: Mapping[str, int | None], most: int | None, shots: int | None, *, trees: bool = True
) -> dict[str, int]:
    """Return about how many tokens the items of each task take."""
    examples = DEFAULT_SHOTS if shots is None else shots
    return {
        name: count * KNOWN.get(name, _UNKNOWN).tokens(examples, trees=trees)
        for name, count in items_of(sizes, most).items()
    }


def most_items(setting: str) -> int | None:
    return None if setting == ALL_ITEMS else int(setting)
