"""Which of a scan's checkpoints are released soups that can be rebuilt. No torch, no weights.

A family knows which soups its makers published, from which ingredients, and which revision
should hold each. Where that revision and all ingredients are read anyway, comparing them costs
one more reading of their weights and shows whether the release is what its makers say: so it is
done without an option. An unreleased soup can only be measured, which costs as much as any
subject: it is proposed in a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from qaudit.checkpoints.folder import family_of
from qaudit.core.registry import parse_merge
from qaudit.core.sizes import size, typed_size
from qaudit.errors import UsageError
from qaudit.families import Family
from qaudit.families.tables import FamilySoup
from qaudit.report.format import listing
from qaudit.types import RELEASED, Checkpoint, Recipe, Ref, Subject


@dataclass(frozen=True)
class Releases:
    """What is compared, and what there is to say of soups before anything is read."""

    subjects: tuple[Subject, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.remarks, *map(_costs, self.subjects))

    def without(self, too_large: Mapping[Subject, int]) -> Releases:
        """Leave out what the disk does not hold, and say which budget would."""
        fitting = tuple(subject for subject in self.subjects if subject not in too_large)
        remarks = [
            f"`{subject.first.label}` is not compared with the soup that it is said to be: that "
            f"needs {size(nbytes)} on the disk at once (`--disk-budget {typed_size(nbytes)}`)"
            for subject, nbytes in too_large.items()
        ]
        return Releases(fitting, (*self.remarks, *remarks))


def find_releases(recipe: Recipe, checkpoints: Sequence[Checkpoint]) -> Releases:
    subjects: list[Subject] = []
    notes: list[str] = []
    for location, family in _families(checkpoints):
        of_family = [c for c in checkpoints if c.family == family.family]
        here = [c for c in of_family if _series(c) == location]
        for soup in family.soups:
            members = [_called(name, here) for name in soup.of]
            if None in members or not all(c.files for c in members if c):
                continue
            present = [c for c in members if c is not None]
            target = _target(soup, here, of_family) if soup.target else None
            if target is not None and target.files and target not in present:
                subjects.append(_subject(soup, target, present))
                notes += soup.doubt(f"which checkpoints make `{target.label}` is inferred")
            elif soup.target is None and not recipe.soups:
                notes.append(_proposal(soup, present))
    return Releases(tuple(subjects), tuple(dict.fromkeys(notes)))


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


def _target(
    soup: FamilySoup, here: Sequence[Checkpoint], of_family: Sequence[Checkpoint]
) -> Checkpoint | None:
    """Return the release of a soup: beside its ingredients, or in another repository."""
    ref = Ref.parse(soup.target or "")
    if "/" not in ref.location:
        return _called(soup.target or "", here)
    return next(
        (
            c
            for c in of_family
            if c.ref.location == ref.location
            and (c.ref.revision or "main") == (ref.revision or "main")
        ),
        None,
    )


def _subject(soup: FamilySoup, target: Checkpoint, members: Sequence[Checkpoint]) -> Subject:
    merge = soup.merge if soup.weights is None else "weighted"
    shares = soup.weights or (1 / len(members),) * len(members)
    return Subject(
        label=f"{soup.label} rebuilt",
        members=((target, 1.0), *zip(members, shares, strict=True)),
        merge=f"{RELEASED}:{parse_merge(merge).spec}",
    )


def _costs(release: Subject) -> str:
    (target, _), *members = release.members
    nbytes = sum(c.nbytes for c, _ in release.members)
    return (
        f"`{target.label}` is compared with the soup of {listing(_quoted(c for c, _ in members))} "
        f"that it is said to be: one more reading of {size(nbytes)}"
    )


def _proposal(soup: FamilySoup, members: Sequence[Checkpoint]) -> str:
    weights = soup.weights or (None,) * len(members)
    parts = "+".join(
        c.label if weight is None else f"{weight:g}*{c.label}"
        for c, weight in zip(members, weights, strict=True)
    )
    merge = soup.merge if soup.weights is None else "weighted"
    return (
        f"the makers' soup of {listing(_quoted(members))} can be measured too: "
        f"`--soup '{soup.label}={merge}({parts})'`"
    )


def _quoted(checkpoints: Iterable[Checkpoint]) -> list[str]:
    return [f"`{checkpoint.label}`" for checkpoint in checkpoints]
