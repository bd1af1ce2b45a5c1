"""A revision's or folder's name -> the place it has in a training run.

Every lab names its checkpoints in its own way, and a few change it in the middle of a run. The
rules below read the names that are in public use; the first that matches the whole name wins,
and the order matters: `global_step1000` must not be read as a stage called "global", nor the
`2T` of `stage2-step47684-mix-round5-from-2T-ckpt` as tokens. A name that no rule reads is a
named checkpoint: it has its own name, is placed last and never dropped.

Numbers sort as numbers (`step1000` comes after `step200`). Token counts in names are rounded
by their authors, so that they are a check and not a measurement; `ckpt_007` counts in units
that its family defines, so that it is an index and not a step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any


@dataclass(frozen=True)
class Place:
    """The place of a checkpoint in a training run, as far as its name gives it."""

    name: str
    stage: str | None = None
    ingredient: int | None = None
    step: int | None = None
    tokens: int | None = None
    index: int | None = None
    variant: str | None = None

    @property
    def named(self) -> bool:
        """Whether the name has no number to order it by."""
        return self.step is None and self.tokens is None and self.index is None


_N = "[0-9]{1,18}"  # longer runs of digits are hashes, and Python refuses to read the longest
_TOKENS = rf"(?P<tokens>{_N}(?:\.{_N})?)(?P<unit>[KMBT])"

RULES: tuple[re.Pattern[str], ...] = tuple(
    re.compile(rule)
    for rule in (
        rf"(?P<stage>stage{_N})-ingredient(?P<ingredient>{_N})-step-?(?P<step>{_N})"
        rf"(?:-tokens{_TOKENS})?",
        rf"(?P<stage>stage{_N})-step-?(?P<step>{_N})(?:-tokens{_TOKENS})?(?:-(?P<variant>mix-.+))?",
        rf"global_?step_?(?P<step>{_N})",
        rf"step-(?P<step>{_N})_tokens-{_TOKENS}-(?P<stage>phase{_N})",
        rf"step[-_]?(?P<step>{_N})(?:-tokens?{_TOKENS})?",
        rf"step-(?P<step>{_N})-{_TOKENS}T?",  # 2BT is 2 B tokens
        # one repository per checkpoint
        rf".+[-_]step-(?P<thousands>{_N})k-(?:token-)?(?P<tokens>{_N})(?P<unit>[bT])",
        rf"(?P<stage>[A-Za-z][A-Za-z0-9]*(?:[-_.][A-Za-z0-9]+)*?)[-_]step[-_]?(?P<step>{_N})"
        rf"(?:-tokens{_TOKENS})?",
        rf"iter[-_]?(?P<step>{_N})",
        rf"checkpoint-(?P<step>{_N})",
        rf"(?:ckpt|checkpoint|chkpt)[-_](?P<index>{_N})",
        rf"[A-Za-z]+_(?P<stage>phase{_N})_checkpoint_(?P<step>{_N})",
        _TOKENS,
        rf"(?P<step>{_N})",
    )
)

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_name(name: str) -> Place:
    """Read a revision's or folder's name; a name without a place is a named checkpoint."""
    last = re.sub(r"/mp_rank_[0-9]+$", "", name.rstrip("/")).rpartition("/")[2]
    for rule in RULES:
        if match := rule.fullmatch(last):
            return place_of(name, match.groupdict())
    return Place(name)


def place_of(name: str, groups: dict[str, str | None]) -> Place:
    texts = {key: text for key, text in groups.items() if text is not None}
    fields: dict[str, Any] = {key: texts[key] for key in ("stage", "variant") if key in texts}
    fields |= {key: int(texts[key]) for key in ("ingredient", "step", "index") if key in texts}
    if "thousands" in texts:
        fields["step"] = 1000 * int(texts["thousands"])
    if "tokens" in texts:
        unit = _UNITS[texts.get("unit", "B").upper()]
        fields["tokens"] = int(Decimal(texts["tokens"]) * unit)
    return Place(name, **fields)


Key = tuple[Any, ...]


def order(place: Place, stages: Sequence[str] = ()) -> Key:
    """Return the sort key of a place: stage, ingredient, step.

    `stages` is the order its family gives. Without one, what has no stage comes first, then
    numbered stages by number, then other stages by name; named checkpoints come last.
    """
    if place.named:
        return (9, 0, (), 0, 0, 0, natural(place.name))
    counters = (place.step, place.index, place.tokens)
    kind = next(k for k, counter in enumerate(counters) if counter is not None)
    stage: Key = (3, 0, natural(place.stage or ""))
    if place.stage in stages:
        stage = (0, stages.index(place.stage), ())
    elif place.stage is None:
        stage = (1, 0, ())
    elif match := re.fullmatch(rf"(?:stage|phase)({_N})", place.stage):
        stage = (2, int(match[1]), ())
    return (*stage, place.ingredient or 0, kind, counters[kind], natural(place.name))


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that reads the numbers in a text as numbers."""
    parts = re.findall(rf"{_N}|[^0-9]+", text)
    return tuple(
        (0, int(part), part) if part[0] in "0123456789" else (1, 0, part) for part in parts
    )
