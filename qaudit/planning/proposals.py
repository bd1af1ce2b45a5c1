"""Soups that the makers of a family used and did not release: they can be measured.

That costs as much as any subject, so they are proposed in a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from qaudit.checkpoints.folder import family_of
from qaudit.errors import UsageError
from qaudit.families import Family
from qaudit.families.tables import FamilySoup
from qaudit.report.format import listing
from qaudit.types import Checkpoint, Recipe


def proposed_soups(recipe: Recipe, checkpoints: Sequence[Checkpoint]) -> tuple[str, ...]:
    """Return a note for each unreleased soup of which a scan without soups has all ingredients."""
    if recipe.soups:
        return ()
    notes = []
    for location, family in _families(checkpoints):
        here = [c for c in checkpoints if c.family == family.family and _series(c) == location]
        for soup in family.soups:
            members = [_called(name, here) for name in soup.of]
            present = [c for c in members if c is not None and c.files]
            if soup.target is None and len(present) == len(members):
                notes.append(_proposal(soup, present))
    return tuple(dict.fromkeys(notes))


def _families(checkpoints: Iterable[Checkpoint]) -> Iterator[tuple[str, Family]]:
    """Yield every series with its family; one whose file is not here has nothing to say."""
    seen: set[tuple[str, str]] = set()
    for checkpoint in checkpoints:
        key = (_series(checkpoint), checkpoint.family or "")
        if checkpoint.family is not None and key not in seen:
            seen.add(key)
            try:
                family = family_of(checkpoint, checkpoint.family)
            except UsageError:
                continue
            yield key[0], family


def _series(checkpoint: Checkpoint) -> str:
    return checkpoint.ref.location if checkpoint.commit else ""


def _names(checkpoint: Checkpoint) -> set[str]:
    ref = checkpoint.ref
    place = ref.subfolder or (ref.revision or "main" if checkpoint.commit else None)
    return {checkpoint.label, checkpoint.label.rpartition("/")[2], *([place] if place else [])}


def _called(name: str, checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    """Return the one checkpoint of a name; two of one name are no answer."""
    named = [c for c in checkpoints if name in _names(c)]
    return named[0] if len(named) == 1 else None


def _proposal(soup: FamilySoup, members: Sequence[Checkpoint]) -> str:
    weights = soup.weights or (None,) * len(members)
    parts = "+".join(
        c.label if weight is None else f"{weight:g}*{c.label}"
        for c, weight in zip(members, weights, strict=True)
    )
    merge = soup.merge if soup.weights is None else "weighted"
    quoted = listing([f"`{checkpoint.label}`" for checkpoint in members])
    option = f"`--soup '{soup.label}={merge}({parts})'`"
    return f"the makers' soup of {quoted} can be measured too: {option}"
