"""The finding about a release that was compared with its ingredients.

    QA019  a release equals the soup that its makers describe, or differs by so much

Where a family names several soups that one release may be, one that fits is enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from qaudit.types import RELEASED, Finding, ReleaseComparison, ReleaseMember, Subject

_MOST_NAMES = 6
_NORMS = ("of_largest", "relative")


@dataclass(frozen=True)
class WeightDifference:
    """The difference between a release and the soup rebuilt from its ingredients."""

    dtype: str = ""  # of the tensor that differs most, or else of the first
    ulps: int = 0  # the largest distance of two numbers, in steps of that dtype
    tensor: str = ""  # where it is
    elements: int = 0
    unequal: int = 0  # how many of them differ at all
    beyond: int = 0  # and by more than one ulp
    of_largest: float = 0.0  # the largest distance in ulps of the largest ingredient there
    relative: float = 0.0  # the largest |a - b| / |b| of a tensor, by Euclidean norms
    mismatch: str = ""  # why the two cannot be compared at all


def released_findings(results: Sequence[tuple[Subject, WeightDifference]]) -> tuple[Finding, ...]:
    """Return one finding per release; the first member of a subject is the release."""
    explained = {
        release.first.label for release, difference in results if fits(release, difference)
    }
    return tuple(
        _finding(release, difference, explained=release.first.label in explained)
        for release, difference in results
    )


def fits(release: Subject, difference: WeightDifference) -> bool:
    """Whether rounding explains the whole difference.

    A mean of n numbers that is summed in their own precision is off by less than n ulps of the
    largest of them; where they cancel, that is many ulps of what is left.
    """
    ingredients = len(release.members) - 1
    if difference.mismatch:
        return False
    return difference.ulps <= 1 or difference.of_largest <= ingredients


def _finding(release: Subject, one: WeightDifference, *, explained: bool) -> Finding:
    label, message = release.first.label, _sentence(release, one)
    if explained:
        return Finding("QA019", "info", label, None, message, "", outcome="pass")
    hint = (
        "it may be of other ingredients or weights, or changed after it was mixed: measure "
        "the soup too, with `--soup`"
    )
    return Finding("QA019", "warn", label, None, message, hint)


def _sentence(release: Subject, one: WeightDifference) -> str:
    name, soup = f"`{release.first.label}`", _soup(release)
    if one.mismatch:
        return f"{name} cannot be compared with {soup}: {one.mismatch}"
    if one.ulps == 0:
        return f"{name} equals {soup} exactly"
    if one.ulps == 1:
        return (
            f"{name} equals {soup} to 1 {one.dtype} ulp: "
            f"{_share(one.unequal, one.elements)} of its numbers differ at all"
        )
    if fits(release, one):
        return (
            f"{name} equals {soup} to the rounding of sums in {one.dtype}: nowhere by more than "
            f"{one.of_largest:.2g} ulps of the largest ingredient, which where they cancel "
            f"is up to {one.ulps:,} of the mean"
        )
    return (
        f"{name} differs from {soup} by up to {one.ulps:,} {one.dtype} ulps, in `{one.tensor}`: "
        f"{_share(one.beyond, one.elements)} of its numbers by more than one, "
        f"and a tensor by up to {one.relative:.2g} of its norm"
    )


def _soup(release: Subject) -> str:
    members = release.members[1:]
    equal = len({weight for _, weight in members}) == 1
    names = [f"`{c.label}`" if equal else f"{weight:g} of `{c.label}`" for c, weight in members]
    if len(names) > _MOST_NAMES:
        names = [*names[: _MOST_NAMES - 1], f"{len(names) - _MOST_NAMES + 1} more"]
    merge = (release.merge or "").split(":")[1]
    kind = "mean" if merge in ("mean", "weighted") else merge
    return f"the {kind} of {', '.join(names[:-1])} and {names[-1]}"


def _share(count: int, total: int) -> str:
    percent = 100 * count / total if total else 0.0
    return f"{percent:.2g} %" if percent >= 0.01 or not count else "under 0.01 %"


def compared(release: Subject, difference: WeightDifference) -> ReleaseComparison:
    numbers = asdict(difference)
    finite = {name: numbers[name] if math.isfinite(numbers[name]) else None for name in _NORMS}
    return ReleaseComparison(
        label=release.label,
        released=release.first.label,
        merge=(release.merge or "").removeprefix(f"{RELEASED}:"),
        members=tuple(ReleaseMember(c.label, share) for c, share in release.members[1:]),
        **(numbers | finite),
    )
