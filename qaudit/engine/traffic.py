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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qaudit.engine.brought import Brought
from qaudit.engine.itinerary import Step, Trip, fetched_nbytes, peak_nbytes
from qaudit.engine.supply import Load, trip_of
from qaudit.errors import MachineError
from qaudit.report.format import size
from qaudit.sources.places import hub_cache, text_path
from qaudit.types import Subject, TextFile, Traffic

if TYPE_CHECKING:
    from qaudit.sources.hub import Hub

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
    trip: Trip  # without a budget
    lying_nbytes: int
    brought_nbytes: int  # of these, what an earlier run of this scan brought and may evict
    begun_nbytes: int  # of these, what belongs to weights that are not whole yet
    texts_nbytes: int
    texts_missing_nbytes: int

    @classmethod
    def of(
        cls,
        subjects: Sequence[Subject],
        texts: Sequence[TextFile],
        hub: Hub,
        record: Path | None = None,
    ) -> Freight:
        """Look into the cache as the engine will; nothing is asked of the Hub."""
        brought = Brought(record)
        load = Load(hub, subjects, brought)
        names = {key: names[0] for key, names in load.sources.items()}
        lying = {k: c.nbytes - hub.fetcher.nbytes_missing(c) for k, c in names.items()}
        return cls(
            subjects=tuple(subjects),
            trip=trip_of(subjects, load, None),
            lying_nbytes=sum(lying.values()),
            brought_nbytes=sum(nbytes for key, nbytes in lying.items() if key in brought),
            begun_nbytes=sum(lying[k] for k in lying if k in brought and k not in load.present),
            texts_nbytes=sum(text.nbytes for text in texts),
            texts_missing_nbytes=missing_nbytes(texts),
        )

    def members(self, subject: Subject) -> tuple[int, ...]:
        """Return what each content weighs that has to be on the disk for a subject."""
        keys = self.trip.needs[self.subjects.index(subject)]
        return tuple(self.trip.weighs(key) for key in keys)

    def peak_nbytes(self, steps: Sequence[Step]) -> int:
        """Return the most bytes beside those of others, texts included."""
        weights = peak_nbytes(steps, self.trip.nbytes, self.trip.present)
        return weights + self.texts_missing_nbytes

    def at_once_nbytes(self, subject: Subject) -> int:
        """Return the bytes that a subject takes of a budget while it is measured."""
        return sum(self.members(subject))


def price_traffic(freight: Freight, budget_nbytes: int | None, free_nbytes: int) -> Traffic:
    """Return what is fetched and what is on the disk at most, or refuse what cannot fit.

    A scan without a budget of its own keeps what it fetches, for whoever comes next, if all of
    it fits; where it does not, what is free is its budget.
    """
    room = free_nbytes + freight.brought_nbytes  # which may go, if it has to
    budget = min(default_budget(room) if budget_nbytes is None else budget_nbytes, room)
    refuse_what_cannot_fit(freight, budget, room)
    texts, bound = freight.texts_missing_nbytes, None
    steps = freight.trip.steps(freight.trip.order())
    if budget_nbytes is not None or freight.peak_nbytes(steps) > budget:
        bound, trip = budget, replace(freight.trip, budget=budget - texts)
        steps = trip.steps(trip.order())
    fetched = fetched_nbytes(steps, freight.trip.nbytes) - freight.begun_nbytes
    return Traffic(
        nbytes_to_fetch=fetched + texts,
        nbytes_cached=freight.lying_nbytes + freight.texts_nbytes - texts,
        nbytes_disk_peak=freight.peak_nbytes(steps),
        nbytes_disk_free=free_nbytes,
        nbytes_disk_budget=bound,
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
    needed, members = freight.at_once_nbytes(worst), len(freight.members(worst))
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
        sizes = sorted(freight.members(soups[0]))
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
