"""What a plan takes from the Hub, and how much disk that needs at its worst moment.

The order of fetching and evicting is the itinerary's; here it is priced: the bytes to fetch,
those that come twice because the budget does not hold them, what is in the cache already, and
the peak. Without a budget of one's own the scan may use what is free, less a reserve of a tenth
and of 10 GB at most, so that a machine is never filled up by default. Texts are fetched first
and stay, so that they come off the budget for weights.

A scan that cannot fit is refused before the first byte of weights, with what would make it fit
computed from the same numbers.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from qaudit.engine.itinerary import fetched_nbytes, itinerary, peak_nbytes
from qaudit.errors import MachineError
from qaudit.report.format import size
from qaudit.sources.places import hub_cache, text_path
from qaudit.types import Subject, TextFile, Traffic

if TYPE_CHECKING:
    from qaudit.sources.hub.fetch import Fetcher

LARGEST_RESERVE_NBYTES = 10 * 10**9


def default_budget(free_nbytes: int) -> int:
    """Return what a scan may add to the disk if nobody says: the free space less a reserve."""
    return free_nbytes - min(LARGEST_RESERVE_NBYTES, free_nbytes // 10)


def free_disk_nbytes() -> int:
    """Return what is free where the cache is, or where it will be made."""
    cache = hub_cache().absolute()
    place = next(place for place in (cache, *cache.parents) if place.exists())
    return shutil.disk_usage(place).free


@dataclass(frozen=True)
class Freight:
    """What the subjects of a plan need from the Hub, and what of it lies on the disk."""

    subjects: tuple[Subject, ...]
    missing: Mapping[str, int]  # content -> bytes that are not in the cache
    texts_nbytes: int
    texts_missing_nbytes: int

    @classmethod
    def of(
        cls, subjects: Sequence[Subject], texts: Sequence[TextFile], fetcher: Fetcher
    ) -> Freight:
        """Look into the cache; nothing is asked of the Hub."""
        found = {c.content: c for s in subjects for c, _ in s.members if c.commit}
        return cls(
            subjects=tuple(subjects),
            missing={key: fetcher.nbytes_missing(c) for key, c in found.items()},
            texts_nbytes=sum(text.nbytes for text in texts),
            texts_missing_nbytes=missing_nbytes(texts),
        )

    @cached_property
    def nbytes(self) -> Mapping[str, int]:
        """The bytes of every content."""
        return {c.content: c.nbytes for s in self.subjects for c, _ in s.members if c.commit}

    @cached_property
    def cached(self) -> frozenset[str]:
        """The contents of which nothing is missing."""
        return frozenset(key for key, nbytes in self.missing.items() if not nbytes)

    def needs(self, subject: Subject) -> tuple[str, ...]:
        """Return the contents that have to be on the disk together for a subject."""
        return tuple(dict.fromkeys(c.content for c, _ in subject.members if c.commit))

    def at_once_nbytes(self, subject: Subject) -> int:
        """Return the bytes that a subject adds to the disk while it is measured."""
        return sum(self.nbytes[key] for key in self.needs(subject) if key not in self.cached)


def price_traffic(freight: Freight, budget_nbytes: int | None, free_nbytes: int) -> Traffic:
    """Return what is fetched and what is on the disk at most, or refuse what cannot fit."""
    asked = default_budget(free_nbytes) if budget_nbytes is None else budget_nbytes
    budget = min(asked, free_nbytes)
    refuse_what_cannot_fit(freight, budget, free_nbytes)
    steps = itinerary(
        [freight.needs(subject) for subject in freight.subjects],
        freight.nbytes,
        cached=freight.cached,
        budget=budget - freight.texts_missing_nbytes,
        labels=[subject.label for subject in freight.subjects],
    )
    here = sum(freight.nbytes[key] - missing for key, missing in freight.missing.items())
    begun = sum(freight.nbytes[k] - missing for k, missing in freight.missing.items() if missing)
    return Traffic(
        nbytes_to_fetch=fetched_nbytes(steps, freight.nbytes)
        - begun
        + freight.texts_missing_nbytes,
        nbytes_cached=here + freight.texts_nbytes - freight.texts_missing_nbytes,
        nbytes_disk_peak=peak_nbytes(steps, freight.nbytes) + freight.texts_missing_nbytes,
        nbytes_disk_free=free_nbytes,
        nbytes_disk_budget=budget,
    )


def refuse_what_cannot_fit(freight: Freight, budget: int, free_nbytes: int) -> None:
    """Refuse a plan with a subject that no order of fetching and evicting makes room for."""
    texts, room = freight.texts_missing_nbytes, budget - freight.texts_missing_nbytes
    if room < 0:
        raise MachineError(
            f"the texts take {size(texts)} of disk and {size(budget)} may be used",
            hint=_more(texts, free_nbytes),
        )
    too_large = [s for s in freight.subjects if freight.at_once_nbytes(s) > room]
    if not too_large:
        return
    worst = max(too_large, key=freight.at_once_nbytes)
    needed, members = freight.at_once_nbytes(worst), len(freight.needs(worst))
    holding = f" for its {members} members at once" if members > 1 else ""
    beside = f" beside {size(texts)} of text" if texts else ""
    proposals = [_more(needed + texts, free_nbytes), *_less(freight, too_large, room)]
    raise MachineError(
        f"`{worst.label}` needs {size(needed)} of disk{holding}{beside}, "
        f"and {size(budget)} may be used",
        hint=", or ".join(proposals),
    )


def _more(needed: int, free_nbytes: int) -> str:
    """Propose a larger budget where the disk has it, and a larger disk where it has not."""
    if needed <= free_nbytes:
        return f"give `--disk-budget {typed_size(needed)}`: {size(free_nbytes)} are free"
    return (
        f"free {size(needed - free_nbytes)} on the disk of `{hub_cache()}`, or set HF_HUB_CACHE "
        f"to a folder with room for {size(needed)}"
    )


def _less(freight: Freight, too_large: Sequence[Subject], room: int) -> list[str]:
    """Propose to leave out what does not fit, and smaller soups where there are any."""
    if len(too_large) == len(freight.subjects):
        return []
    soups = [s for s in too_large if s.kind == "soup"]
    names = ", ".join(f"`{s.label}`" for s in too_large[:3])
    more = f" and {len(too_large) - 3} more" if len(too_large) > 3 else ""
    what = "the soup " if soups == list(too_large) and len(soups) == 1 else ""
    proposals = [f"leave out {what}{names}{more}"]
    if len(too_large) == len(soups) == 1:
        sizes = sorted(freight.nbytes[key] for key in freight.needs(soups[0]))
        fitting = sum(total <= room for total in _running(sizes))
        if fitting > 1:
            proposals.append(f"mix {fitting} of its {len(sizes)} members")
    return proposals


def _running(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[: k + 1]) for k in range(len(sizes))]


def typed_size(nbytes: int, *, up: bool = True) -> str:
    """Print a size as an option takes it, not smaller than it is; or not larger."""
    rounded = math.ceil if up else math.floor
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if nbytes >= 10 * scale:
            return f"{rounded(nbytes / scale)}{unit}"
    return str(nbytes)


def missing_nbytes(texts: Sequence[TextFile]) -> int:
    """Return the bytes of the texts that are not in the cache."""
    return sum(text.nbytes for text in texts if not _is_here(text))


def _is_here(text: TextFile) -> bool:
    path: Path = text_path(text)
    try:
        return path.stat().st_size == text.nbytes
    except OSError:
        return False
