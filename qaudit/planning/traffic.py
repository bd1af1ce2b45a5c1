"""What a plan takes from the Hub, and how much disk that needs at its worst moment.

The order of fetching and evicting is the itinerary's; here it is priced: the bytes to fetch,
those that come twice because the budget does not hold them, what is in the cache already, and
the peak. Without a budget of one's own the scan may use what is free, less a reserve of a tenth
and of 10 GB at most, so that a machine is never filled up by default. Texts are fetched first
and stay, so that they come off the budget for weights. Running sums count with the weights: they
lie beside the results, and where that is another disk it has to have room for them.

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

from qaudit.checkpoints.places import hub_cache, text_path
from qaudit.downloads.brought import Brought
from qaudit.downloads.itinerary import Step, Trip, fetched_nbytes, peak_nbytes
from qaudit.downloads.load import Load, trip_of
from qaudit.downloads.running_sum import nbytes_in
from qaudit.downloads.sums import SUMS_FOLDER, Sums
from qaudit.errors import MachineError
from qaudit.report.format import size
from qaudit.types import Subject, TextFile, Traffic

if TYPE_CHECKING:
    from qaudit.hub import Hub

LARGEST_RESERVE_NBYTES = 10 * 10**9


def default_budget(free_nbytes: int) -> int:
    """Return what a scan may add to the disk if nobody says: the free space less a reserve."""
    return free_nbytes - min(LARGEST_RESERVE_NBYTES, free_nbytes // 10)


def free_disk_nbytes() -> int:
    """Return what is free where the cache is, or where it will be made."""
    return shutil.disk_usage(_standing(hub_cache())).free


def free_elsewhere_nbytes(folder: Path) -> int | None:
    """Return what is free where a folder is, or will be made; None: it shares the cache's disk."""
    place = _standing(folder)
    if place.stat().st_dev == _standing(hub_cache()).stat().st_dev:
        return None
    return shutil.disk_usage(place).free


def _standing(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that is there."""
    whole = folder.absolute()
    return next(place for place in (whole, *whole.parents) if place.exists())


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
    sums_nbytes: int = 0  # of running sums that an earlier run began
    sums_free_nbytes: int | None = None  # where they lie, if that is a disk of its own

    @classmethod
    def of(
        cls,
        subjects: Sequence[Subject],
        texts: Sequence[TextFile],
        hub: Hub,
        record: Path | None = None,
    ) -> Freight:
        """Look into the cache as the engine will; nothing is asked of the Hub."""
        brought, sums = Brought(record), Sums(record.parent / SUMS_FOLDER) if record else None
        load = Load(hub, subjects, brought)
        names = {key: names[0] for key, names in load.sources.items()}
        lying = {k: c.nbytes - hub.fetcher.nbytes_missing(c) for k, c in names.items()}
        return cls(
            subjects=tuple(subjects),
            trip=trip_of(subjects, load, None, sums),
            lying_nbytes=sum(lying.values()),
            brought_nbytes=sum(nbytes for key, nbytes in lying.items() if key in brought),
            begun_nbytes=sum(lying[k] for k in lying if k in brought and k not in load.present),
            texts_nbytes=sum(text.nbytes for text in texts),
            texts_missing_nbytes=missing_nbytes(texts),
            sums_nbytes=nbytes_in(sums.folder) if sums else 0,
            sums_free_nbytes=free_elsewhere_nbytes(sums.folder) if sums else None,
        )

    @property
    def room_nbytes(self) -> int:
        """What an earlier run of this scan took of the disk, and this one may use again."""
        return self.brought_nbytes + (self.sums_nbytes if self.sums_free_nbytes is None else 0)

    def members(self, subject: Subject) -> tuple[int, ...]:
        """Return what each content weighs that has to be on the disk for a subject."""
        keys = self.trip.needs[self.subjects.index(subject)]
        return tuple(self.trip.weighs(key) for key in keys)

    def peak_nbytes(self, steps: Sequence[Step], trip: Trip) -> int:
        """Return the most bytes beside those of others, texts included."""
        weights = peak_nbytes(steps, trip.nbytes, trip.present, trip.summed)
        return weights + self.texts_missing_nbytes

    def at_once_nbytes(self, subject: Subject) -> int:
        """Return the least that a subject takes of a budget at its worst moment."""
        return self.trip.at_once_nbytes(self.subjects.index(subject))

    def summed_up(self, budget_nbytes: int | None) -> tuple[Subject, ...]:
        """Return the soups whose members do not lie on the disk together under such a budget."""
        if budget_nbytes is None:
            return ()
        trip = replace(self.trip, budget=budget_nbytes - self.texts_missing_nbytes)
        return tuple(self.subjects[position] for position in trip.summed)


def price_traffic(freight: Freight, budget_nbytes: int | None, free_nbytes: int) -> Traffic:
    """Return what is fetched and what is on the disk at most, or refuse what cannot fit.

    A scan without a budget of its own keeps what it fetches, for whoever comes next, if all of
    it fits; where it does not, what is free is its budget.
    """
    room = free_nbytes + freight.room_nbytes  # which may go, if it has to
    budget = _bound(room, budget_nbytes)
    refuse_what_cannot_fit(freight, budget, room)
    texts, bound = freight.texts_missing_nbytes, None
    trip = freight.trip.settled()
    steps = trip.steps(trip.order())
    if budget_nbytes is not None or freight.peak_nbytes(steps, trip) > budget:
        bound, trip = budget, replace(freight.trip, budget=budget - texts).settled()
        steps = trip.steps(trip.order())
    _must_have_room_for_sums(freight, steps, trip)
    fetched = fetched_nbytes(steps, freight.trip.nbytes) - freight.begun_nbytes
    return Traffic(
        nbytes_to_fetch=fetched + texts,
        nbytes_cached=freight.lying_nbytes + freight.texts_nbytes - texts,
        nbytes_disk_peak=freight.peak_nbytes(steps, trip),
        nbytes_disk_free=free_nbytes,
        nbytes_disk_budget=bound,
    )


def _bound(room: int, budget_nbytes: int | None) -> int:
    return min(default_budget(room) if budget_nbytes is None else budget_nbytes, room)


def missing_budget(
    freight: Freight, subject: Subject, budget_nbytes: int | None, free_nbytes: int
) -> int | None:
    """Return the budget that would hold what a subject needs at once, or None if it is held."""
    needed = freight.at_once_nbytes(subject) + freight.texts_missing_nbytes
    return needed if needed > _bound(free_nbytes + freight.room_nbytes, budget_nbytes) else None


def summed_notes(freight: Freight, budget_nbytes: int | None) -> tuple[str, ...]:
    """Say which soups are not merged as they are read, and what that takes instead."""
    notes = []
    for soup in freight.summed_up(budget_nbytes):
        taken = freight.trip.sums[freight.subjects.index(soup)].growing_nbytes
        notes.append(
            f"`{soup.label}` is summed up while its {len(soup.members)} members pass by, which do "
            f"not fit on the disk together: the sum takes {size(taken)} and is written anew "
            "for each"
        )
    return tuple(notes)


def _must_have_room_for_sums(freight: Freight, steps: Sequence[Step], trip: Trip) -> None:
    """Refuse sums for which there is no room where results are written."""
    if freight.sums_free_nbytes is None:
        return
    needed = peak_nbytes([s for s in steps if s.kind in ("add", "drop")], {}, (), trip.summed)
    if needed > freight.sums_free_nbytes + freight.sums_nbytes:
        raise MachineError(
            f"what is summed up of soups takes {size(needed)} beside the results, "
            f"and {size(freight.sums_free_nbytes)} are free there",
            hint=f"give `--out` a folder on a disk with room for {size(needed)}",
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
    needed, members = freight.at_once_nbytes(worst), freight.members(worst)
    holding = f" for its {len(members)} members at once" if len(members) > 1 else ""
    if needed < sum(members):
        holding = f" for one of its {len(members)} members and their running sum"
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
    return f"{nbytes}B"


def missing_nbytes(texts: Sequence[TextFile]) -> int:
    """Return the bytes of the texts that are not in the cache."""
    return sum(text.nbytes for text in texts if not _is_here(text))


def _is_here(text: TextFile) -> bool:
    path: Path = text_path(text)
    try:
        return path.stat().st_size == text.nbytes
    except OSError:
        return False
