"""What a plan downloads from the Hub, and how much disk that needs at its worst moment.

The schedule of downloads is priced here: the bytes to fetch, those that come twice because the
budget does not hold them, what is cached already, and the peak. Without a budget a scan may use
the free space less a reserve of a tenth, at most 10 GB. Texts are fetched first and stay, so
they come off the budget for weights.

A scan that cannot fit is refused before the first byte of weights, with what would make it fit.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from qaudit.checkpoints.places import hub_cache, text_path
from qaudit.core.keys import first_of
from qaudit.core.sizes import size, typed_size
from qaudit.downloads.schedule import DownloadSchedule, Step
from qaudit.downloads.sources import EvictionRecord, Sources, download_schedule, refuse_shared_cache
from qaudit.errors import MachineError
from qaudit.types import Subject, TextFile, Traffic

if TYPE_CHECKING:
    from qaudit.hub import Hub

LARGEST_RESERVE_NBYTES = 10 * 10**9


def default_budget(free_nbytes: int) -> int:
    """Return how much a scan may add to the disk by default: the free space less a reserve."""
    return free_nbytes - min(LARGEST_RESERVE_NBYTES, free_nbytes // 10)


def free_disk_nbytes(folder: Path | None = None) -> int:
    """Return the free space where a folder is or will be made; without one, that of the cache."""
    return shutil.disk_usage(_existing(folder or hub_cache())).free


def shares_disk(one: Path, other: Path) -> bool:
    """Return whether two folders are on one disk, or will be made on one."""
    return _existing(one).stat().st_dev == _existing(other).stat().st_dev


def _existing(folder: Path) -> Path:
    whole = folder.absolute()
    return next(place for place in (whole, *whole.parents) if place.exists())


@dataclass(frozen=True)
class PlannedDownloads:
    """What the subjects of a plan need from the Hub, and what of it is on the disk."""

    subjects: tuple[Subject, ...]
    schedule: DownloadSchedule  # without a budget
    on_disk_nbytes: int
    evictable_nbytes: int  # of these, what an earlier run of this scan downloaded
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
    ) -> PlannedDownloads:
        """Look into the cache as the engine will; no request is sent."""
        evictable = EvictionRecord(record)
        sources = Sources(hub, subjects, evictable)
        firsts = {key: checkpoints[0] for key, checkpoints in sources.sources.items()}
        on_disk = {k: c.nbytes - hub.fetcher.nbytes_missing(c) for k, c in firsts.items()}
        begun = [k for k in on_disk if k in evictable and k not in sources.present]
        return cls(
            subjects=tuple(subjects),
            schedule=download_schedule(subjects, sources, None),
            on_disk_nbytes=sum(on_disk.values()),
            evictable_nbytes=sum(nbytes for key, nbytes in on_disk.items() if key in evictable),
            begun_nbytes=sum(on_disk[key] for key in begun),
            texts_nbytes=sum(text.nbytes for text in texts),
            texts_missing_nbytes=missing_nbytes(texts),
        )

    def members(self, subject: Subject) -> tuple[int, ...]:
        keys = self.schedule.needs[self.subjects.index(subject)]
        return tuple(self.schedule.weight(key) for key in keys)

    def peak_nbytes(self, steps: Sequence[Step], schedule: DownloadSchedule) -> int:
        """Return the most bytes that are added to the disk, texts included."""
        return schedule.peak_nbytes(steps) + self.texts_missing_nbytes

    def within(self, budget_nbytes: int) -> DownloadSchedule:
        budget = budget_nbytes - self.texts_missing_nbytes
        return replace(self.schedule, budget=budget)

    def at_once_nbytes(self, subject: Subject) -> int:
        return self.schedule.at_once_nbytes(self.subjects.index(subject))


def price_traffic(
    downloads: PlannedDownloads, budget_nbytes: int | None, free_nbytes: int
) -> Traffic:
    """Return the bytes that are fetched and the most on the disk, or refuse what cannot fit.

    Without a budget a scan keeps what it fetches if all of it fits; where it does not, what is
    free is its budget.
    """
    if budget_nbytes is not None:
        refuse_shared_cache()
    room = free_nbytes + downloads.evictable_nbytes  # which may go, if it has to
    budget = _bound(room, budget_nbytes)
    refuse_what_cannot_fit(downloads, budget, room)
    texts, bound = downloads.texts_missing_nbytes, None
    schedule = downloads.schedule
    steps = schedule.steps()
    if budget_nbytes is not None or downloads.peak_nbytes(steps, schedule) > budget:
        bound, schedule = budget, downloads.within(budget)
        steps = schedule.steps()
    fetched = schedule.fetched_nbytes(steps) - downloads.begun_nbytes
    return Traffic(
        nbytes_to_fetch=fetched + texts,
        nbytes_cached=downloads.on_disk_nbytes + downloads.texts_nbytes - texts,
        nbytes_disk_peak=downloads.peak_nbytes(steps, schedule),
        nbytes_disk_free=free_nbytes,
        nbytes_disk_budget=bound,
    )


def _bound(room: int, budget_nbytes: int | None) -> int:
    return min(default_budget(room) if budget_nbytes is None else budget_nbytes, room)


def missing_budget(
    downloads: PlannedDownloads, subject: Subject, budget_nbytes: int | None, free_nbytes: int
) -> int | None:
    """Return the budget that would hold what a subject needs at once, or None if it is held."""
    needed = downloads.at_once_nbytes(subject) + downloads.texts_missing_nbytes
    bound = _bound(free_nbytes + downloads.evictable_nbytes, budget_nbytes)
    return needed if needed > bound else None


def refuse_what_cannot_fit(downloads: PlannedDownloads, budget: int, free_nbytes: int) -> None:
    """Refuse a plan with a subject that no order of fetching and evicting makes room for."""
    texts, room = downloads.texts_missing_nbytes, budget - downloads.texts_missing_nbytes
    if room < 0:
        raise MachineError(
            f"the texts take {size(texts)} of disk and {size(budget)} may be used",
            hint=_more(texts, free_nbytes),
        )
    too_large = [s for s in downloads.subjects if downloads.at_once_nbytes(s) > room]
    if not too_large:
        return
    worst = max(too_large, key=downloads.at_once_nbytes)
    needed, members = downloads.at_once_nbytes(worst), downloads.members(worst)
    holding = f" for its {len(members)} members at once" if len(members) > 1 else ""
    beside = f" beside {size(texts)} of text" if texts else ""
    proposals = [_more(needed + texts, free_nbytes), *_less(downloads, too_large, room)]
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


def _less(downloads: PlannedDownloads, too_large: Sequence[Subject], room: int) -> list[str]:
    """Propose to leave out what does not fit, and smaller soups where there are any."""
    if len(too_large) == len(downloads.subjects):
        return []
    soups = [s for s in too_large if s.kind == "soup"]
    what = "the soup " if soups == list(too_large) and len(soups) == 1 else ""
    proposals = [f"leave out {what}{first_of([s.label for s in too_large])}"]
    if len(too_large) == len(soups) == 1:
        sizes = sorted(downloads.members(soups[0]))
        fitting = sum(total <= room for total in accumulate(sizes))
        if fitting > 1:
            proposals.append(f"mix {fitting} of its {len(sizes)} members")
    return proposals


def missing_nbytes(texts: Sequence[TextFile]) -> int:
    return sum(text.nbytes for text in texts if not _is_here(text))


def _is_here(text: TextFile) -> bool:
    path: Path = text_path(text)
    try:
        return path.stat().st_size == text.nbytes
    except OSError:
        return False
