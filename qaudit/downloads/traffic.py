"""What weights and texts take of the Hub and of the disk. No torch.

The bytes to fetch, those that come twice because the budget does not hold them, what is cached
already, and the peak. Without a budget a scan may use the free space less a reserve of a tenth, at
most 10 GB. Texts are fetched first and stay, so they come off the budget for weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from qaudit.checkpoints.stamps import text_path
from qaudit.downloads.downloads import Contents, refuse_shared_cache
from qaudit.downloads.schedule import refuse_what_cannot_fit
from qaudit.types import Subject, TextFile, Traffic

LARGEST_RESERVE_NBYTES = 10 * 10**9


def default_budget(free_nbytes: int) -> int:
    """Return how much a scan may add to the disk by default: the free space less a reserve."""
    return free_nbytes - min(LARGEST_RESERVE_NBYTES, free_nbytes // 10)


def missing_nbytes(texts: Sequence[TextFile]) -> int:
    return sum(text.nbytes for text in texts if not _is_here(text))


def _is_here(text: TextFile) -> bool:
    path: Path = text_path(text)
    try:
        return path.stat().st_size == text.nbytes
    except OSError:
        return False


def price_traffic(
    contents: Contents,
    subjects: Sequence[Subject],
    texts: Sequence[TextFile],
    budget_nbytes: int | None,
    free_nbytes: int,
) -> Traffic:
    """Return the bytes that are fetched and the most on the disk, or refuse what cannot fit.

    Without a budget a scan keeps what it fetches if all of it fits; where it does not, what is
    free is its budget. No request is sent.
    """
    if budget_nbytes is not None:
        refuse_shared_cache()
    here, recorded = contents.nbytes_here, contents.recorded
    free = free_nbytes + sum(here[key] for key in here.keys() & recorded)  # which may go
    budget = min(default_budget(free) if budget_nbytes is None else budget_nbytes, free)
    texts_nbytes = missing_nbytes(texts)
    schedule = contents.schedule(subjects, None)
    refuse_what_cannot_fit(schedule, subjects, budget, texts_nbytes, free)
    bound, steps = None, schedule.steps()
    if budget_nbytes is not None or schedule.peak_nbytes(steps) + texts_nbytes > budget:
        bound, schedule = budget, replace(schedule, budget=budget - texts_nbytes)
        steps = schedule.steps()
    begun = sum(here[key] for key in here.keys() & recorded - contents.present)
    return Traffic(
        nbytes_to_fetch=schedule.fetched_nbytes(steps) - begun + texts_nbytes,
        nbytes_cached=sum(here.values()) + sum(text.nbytes for text in texts) - texts_nbytes,
        nbytes_disk_peak=schedule.peak_nbytes(steps) + texts_nbytes,
        nbytes_disk_free=free_nbytes,
        nbytes_disk_budget=bound,
    )
