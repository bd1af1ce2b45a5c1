"""Which soups are made of a series: a text -> subjects.

    A+B+C                           the mean of three, or of what a glob names: stage2-*
    0.9*A+0.1*B                     weighted; the weights have to sum to one
    last:4                          the mean of the latest four of the run
    lawa:k=5:every=500              the latest and those 500 steps apart before it
    ema:decay=0.9                   the average along the run
    slerp:t=0.3(A+B)                any merge by name, its parameters, its members
    subsets:3(A+B+C+D)              the mean of every two and every three of them
    greedy:scheme=gptq-4bit(A+B+C)  the mean of those that make it better at that scheme
    ends=mean(A+B)                  any of these under a label
    ends=A+B                        the mean, or with weights, under a label

A window or an average along the run takes the whole run unless members are named:
`last:4(stage1-*)`. A run that ends in several ingredients has no one end, so there they must
be. A number before a star is a weight: a glob that begins with a digit is written `[1]*`.
A greedy soup names candidates; measuring finds which of them go in. Without a scheme it
is searched for at the one that is picked by default.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from qaudit.core.merge import Merge
from qaudit.core.registry import merges, parse_merge, parse_scheme
from qaudit.errors import UsageError
from qaudit.recipe.selection import matching, select
from qaudit.settings import SEARCHED_AT
from qaudit.support.keys import nearest
from qaudit.types import GREEDY, Checkpoint, Recipe, Subject

MOST_SUBSETS = 64
_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:[eE]-?\d+)?"
_CALL = re.compile(r"(?:(?P<label>[^=():]+)=\s*)?(?P<merge>[a-z][a-z0-9_:=.-]*)\((?P<of>.+)\)")
_ALONE = re.compile(r"(?:(?P<label>[^=():+*]+)=)?(?P<merge>(?P<name>[a-z]+)(?::[a-z0-9_=.-]+)*)")

_COUNTED = {"last": "last:4", "subsets": "subsets:3(A+B+C)"}
"""What is no merge by itself and takes a number."""


@dataclass(frozen=True)
class SoupRequest:
    """A soup as it was written: names and globs, not yet checkpoints; `of` may be the run."""

    label: str
    merge: str
    of: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    subsets: int | None = None  # the most members of a subset
    is_search: bool = False  # `merge` then has the scheme, and the members are candidates


def parse_soup(text: str) -> SoupRequest:
    if match := _ALONE.fullmatch(text.strip()):
        name = match["name"]
        if name == "last" or (name in merges() and merges()[name].follows_a_run):
            label = match["label"] or match["merge"]
            return SoupRequest(label.strip(), _merge(match["merge"]), ())
    match = _CALL.fullmatch(text)
    name, of = (match["label"], match["of"]) if match else (None, text)
    label, sign, rest = text.partition("=")
    first, *further = rest.split("+")
    # Of `lr=1+lr=2` the names themselves have signs, each as many; `ends=A+B` has a label.
    alike = {part.count("=") for part in further} == {first.count("=")}
    if not match and sign and alike and "(" not in text:
        name, of = label, rest
    merge = match["merge"] if match else None
    parts = tuple(part.strip() for part in of.split("+"))
    if not all(parts):
        raise UsageError(f"`{text}` is not a soup", hint="write `A+B+C` or a glob of checkpoints")
    weights, names = _weights(text, parts)
    merge = merge or ("mean" if weights is None else "weighted")
    label = name.strip() if name else f"{merge}({of})"
    if subsets := re.fullmatch(r"subsets:(\d+)", merge):
        return SoupRequest(label, "mean", names, weights, int(subsets[1]))
    if merge.partition(":")[0] == GREEDY:
        return SoupRequest(label, _search(merge), names, weights, is_search=True)
    return SoupRequest(label, _merge(merge), names, weights)


def _search(text: str) -> str:
    if text == GREEDY:
        return GREEDY
    key, _, scheme = text.partition(":")[2].partition("=")
    if key.strip() != "scheme" or not scheme:
        raise UsageError(
            f"`{text}` is not a search",
            hint=f"write `greedy(A+B)` or `greedy:scheme={SEARCHED_AT}(A+B)`",
        )
    return f"{GREEDY}:scheme={parse_scheme(scheme).spec}"


def _merge(text: str) -> str:
    """Return a merge's text; `last:4` is a window."""
    name, _, count = text.partition(":")
    if name in _COUNTED:
        if not re.fullmatch(r"\d+", count):
            raise UsageError(f"`{text}` has no number", hint=f"write `{_COUNTED[name]}`")
        return f"lawa:k={count}"
    if name not in merges():
        names = [*merges(), *_COUNTED, GREEDY]
        raise UsageError(f"there is no merge `{name}`", hint=nearest(name, names))
    return text


def _weights(text: str, parts: tuple[str, ...]) -> tuple[tuple[float, ...] | None, tuple[str, ...]]:
    """Split `0.9*A` into weight and name, for all members or for none."""
    matches = [re.fullmatch(rf"({_NUMBER})\s*\*\s*(.+)", part) for part in parts]
    if not any(matches):
        return None, parts
    pairs = [(float(match[1]), match[2]) for match in matches if match]
    if len(pairs) != len(parts):
        bare = next(part for part, match in zip(parts, matches, strict=True) if not match)
        raise UsageError(
            f"`{bare}` has no weight in `{text}`, where others have one",
            hint="give every member a weight, or none",
        )
    return tuple(weight for weight, _ in pairs), tuple(name for _, name in pairs)


def needed(recipe: Recipe, checkpoints: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Return the checkpoints that are measured or are part of a soup: no other has to be read."""
    wanted = {c.label for c in select(recipe, checkpoints)}
    wanted |= {c.label for c in members_of(recipe.soups, checkpoints)}
    return tuple(c for c in checkpoints if c.label in wanted)


def members_of(soups: Sequence[str], checkpoints: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    wanted: set[str] = set()
    for soup in map(parse_soup, soups):
        members = _candidates(soup, checkpoints)
        if soup.subsets is None and not soup.is_search:
            members = [c for c, _ in _shared(soup, parse_merge(soup.merge), members)]
        wanted |= {c.label for c in members}
    return tuple(c for c in checkpoints if c.label in wanted)


def resolve_soups(recipe: Recipe, checkpoints: Sequence[Checkpoint]) -> tuple[Subject, ...]:
    labels = {c.label for c in checkpoints}
    soups = []
    for text in recipe.soups:
        for soup in _subjects(parse_soup(text), checkpoints):
            if soup.label in labels:
                raise UsageError(
                    f"two subjects are called `{soup.label}`",
                    hint="call the soup something else: `label=mean(A+B)`",
                )
            labels.add(soup.label)
            soups.append(soup)
    return tuple(soups)


def _subjects(soup: SoupRequest, checkpoints: Sequence[Checkpoint]) -> Iterator[Subject]:
    members = _candidates(soup, checkpoints)
    if soup.weights is not None and (soup.is_search or soup.subsets):
        raise UsageError(f"`{soup.label}` takes no weights", hint="its soups are plain means")
    if soup.is_search:  # among candidates, each of other weights
        if len(members) < 2:
            raise UsageError(
                f"soup `{soup.label}` has one candidate, `{members[0].label}`",
                hint="a search needs two or more; a checkpoint by itself is measured anyway",
            )
        _check_members(soup, members)
        yield Subject(soup.label, tuple((c, 1 / len(members)) for c in members), soup.merge)
        return
    merge = parse_merge(soup.merge)
    if soup.subsets is None:
        yield _subject(soup, merge, members)
        return
    sizes = range(2, min(soup.subsets, len(members)) + 1)
    chosen = [c for size in sizes for c in itertools.combinations(members, size)]
    if not chosen:
        raise UsageError(
            f"`{soup.label}` has no subset of two members",
            hint="write `subsets:2(A+B+C)`, with two members or more",
        )
    if len(chosen) > MOST_SUBSETS:
        raise UsageError(
            f"`{soup.label}` makes {len(chosen)} soups of {len(members)} members",
            hint=f"at most {MOST_SUBSETS}: name fewer members, or smaller subsets",
        )
    for subset in chosen:
        label = f"mean({'+'.join(c.label for c in subset)})"
        yield _subject(replace(soup, label=label), merge, subset)


def _subject(soup: SoupRequest, merge: Merge, candidates: Sequence[Checkpoint]) -> Subject:
    shared = _shared(soup, merge, candidates)
    if len(shared) < 2:
        raise UsageError(
            f"soup `{soup.label}` has one member, `{shared[0][0].label}`",
            hint="a soup needs two or more; a checkpoint by itself is measured anyway",
        )
    if len(shared) < merge.fewest:
        raise _wrong_number(soup, merge, len(shared), merge.fewest)
    _check_members(soup, [c for c, _ in shared])
    return Subject(soup.label, tuple(shared), merge.spec)


def _shared(
    soup: SoupRequest, merge: Merge, candidates: Sequence[Checkpoint]
) -> list[tuple[Checkpoint, float]]:
    """Return the members with their weights, without those of weight zero."""
    if merge.most is not None and len(candidates) > merge.most:
        raise _wrong_number(soup, merge, len(candidates), merge.most)
    shares = soup.weights
    if shares is None:
        shares = merge.shares([c.step for c in candidates])
    else:
        merge.accept(shares)
    if len(shares) != len(candidates):
        raise UsageError(
            f"soup `{soup.label}` has {len(candidates)} members and {len(shares)} weights",
            hint="a weight belongs to one checkpoint: name each by itself",
        )
    return [(c, share) for c, share in zip(candidates, shares, strict=True) if share != 0]


def _candidates(soup: SoupRequest, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    if soup.of:
        # A merge alone is read as a name; a checkpoint may be called so.
        labels = {c.label for c in checkpoints}
        first = soup.of[0].partition(":")[0]
        merge_names = {GREEDY, *_COUNTED, *merges()}
        if len(soup.of) == 1 and first in merge_names and soup.of[0] not in labels:
            raise UsageError(
                f"`{soup.of[0]}` names no checkpoints", hint=f"write `{soup.of[0]}(A+B+C)`"
            )
        return [c for part in soup.of for c in matching(part, checkpoints)]
    run = [c for c in checkpoints if c.step is not None and not c.suspect]
    if not run:
        raise UsageError(
            f"`{soup.label}` takes the latest of a run, and no checkpoint here has a step",
            hint=f"name the members: `{soup.label}(A+B+C)`",
        )
    if len(ends := {c.ingredient for c in run if c.stage == run[-1].stage}) > 1:
        raise UsageError(
            f"this run ends in {len(ends)} ingredients, so that `{soup.label}` could mean each",
            hint=f"name its members: `{soup.label}(stage1-*)`",
        )
    return run


def _check_members(soup: SoupRequest, members: Sequence[Checkpoint]) -> None:
    if len(families := sorted({c.family for c in members if c.family})) > 1:
        raise UsageError(
            f"soup `{soup.label}` has members of different families: {', '.join(families)}",
            hint="weights of different runs do not average to anything",
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


def _wrong_number(soup: SoupRequest, merge: Merge, count: int, bound: int) -> UsageError:
    which = "at most" if count > bound else "at least"
    return UsageError(
        f"soup `{soup.label}` has {count} members, and `{merge.name}` takes {which} {bound}",
        hint="name another number of members, or take another merge",
    )
