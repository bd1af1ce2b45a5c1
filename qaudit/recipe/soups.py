"""Which soups are made of a series: a text (`A+B+C`, a glob, `label=merge(A+B+C)`) -> a subject."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from qaudit.core.registry import parse_merge
from qaudit.errors import UsageError
from qaudit.recipe.selection import matching, select
from qaudit.types import Checkpoint, Recipe, Subject


def needed(recipe: Recipe, checkpoints: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Return the checkpoints that are measured or are part of a soup: no other has to be read."""
    wanted = {c.label for c in select(recipe, checkpoints)}
    wanted |= {c.label for soup in recipe.soups for c in _members(parse_soup(soup), checkpoints)}
    return tuple(c for c in checkpoints if c.label in wanted)


def resolve_soups(recipe: Recipe, checkpoints: Sequence[Checkpoint]) -> tuple[Subject, ...]:
    """Return the soups a recipe asks for, each of at least two different weights."""
    taken = {c.label for c in checkpoints}
    soups = []
    for text in recipe.soups:
        soup = parse_soup(text)
        members = _members(soup, checkpoints)
        _check_members(soup, members)
        if soup.label in taken:
            raise UsageError(
                f"two subjects are called `{soup.label}`",
                hint="call the soup something else: `label=mean(A+B)`",
            )
        taken.add(soup.label)
        share = 1 / len(members)
        merge = parse_merge(soup.merge).spec
        soups.append(Subject(soup.label, tuple((c, share) for c in members), merge))
    return tuple(soups)


@dataclass(frozen=True)
class SoupRequest:
    """A soup as it was asked for: names and globs, not yet checkpoints."""

    label: str
    merge: str
    of: tuple[str, ...]


def parse_soup(text: str) -> SoupRequest:
    """Read `A+B+C`, `stage2-*-step1000`, `mean(A+B)` or `label=mean(A+B)`."""
    match = re.fullmatch(
        r"(?:(?P<label>[^=()]+)=)?(?P<merge>[a-z][a-z0-9_:=.-]*)\((?P<of>.+)\)", text
    )
    of, merge = (match["of"], match["merge"]) if match else (text, "mean")
    parts = tuple(part.strip() for part in of.split("+"))
    if not all(parts):
        raise UsageError(f"`{text}` is not a soup", hint="write `A+B+C` or a glob of checkpoints")
    label = match["label"].strip() if match and match["label"] else f"{merge}({of})"
    return SoupRequest(label, merge, parts)


def _members(soup: SoupRequest, checkpoints: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    return tuple(c for part in soup.of for c in matching(part, checkpoints))


def _check_members(soup: SoupRequest, members: Sequence[Checkpoint]) -> None:
    if len(members) < 2:
        raise UsageError(
            f"soup `{soup.label}` has one member, `{members[0].label}`",
            hint="a soup needs two or more; a checkpoint by itself is measured anyway",
        )
    seen: dict[str, str] = {}
    for member in members:
        weights = member.content if member.files else member.label
        if weights in seen:
            raise UsageError(
                f"soup `{soup.label}` has the same weights twice: "
                f"`{seen[weights]}` and `{member.label}`",
                hint="leave one of them out; a soup would count it double",
            )
        seen[weights] = member.label
