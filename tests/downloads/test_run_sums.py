"""A soup of ten needs one checkpoint and one sum on the disk, and its numbers are the same."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from qaudit.downloads.running_sum import SUMS_FOLDER, Sums, nbytes_in
from qaudit.downloads.sources import EvictionRecord, Sources, download_schedule
from qaudit.errors import MachineError
from qaudit.types import Checkpoint, Subject
from tests.support.shelf import STEPS, Looking, Place, alone, numbers, place, plan_of, shelf, soup

__all__ = ["place", "shelf"]


def sums_of(place: Place) -> Path:
    return place.out / SUMS_FOLDER


def one_and_the_sum(place: Place, *soups: Subject) -> int:
    """Return a budget for one checkpoint and the largest sum."""
    hub = place.hub()
    for checkpoint, _ in soups[0].members:
        hub.listing.shapes(
            checkpoint.ref.location,
            str(checkpoint.commit),
            [
                f
                for f in hub.listing.files(checkpoint.ref.location, str(checkpoint.commit))
                if f.path.endswith(".safetensors")
            ],
        )
    place.server.log.clear()
    sources = Sources(hub, soups, EvictionRecord(None))
    sums = download_schedule(soups, sources, None, Sums(sums_of(place))).sums
    return max(size.growing_nbytes for size in sums.values()) + soups[0].first.nbytes


@pytest.fixture
def series(place: Place) -> list[Checkpoint]:
    return place.checkpoints()


def test_one_checkpoint_and_one_sum_are_enough_and_the_numbers_are_the_same(
    place: Place, series: list[Checkpoint]
) -> None:
    mix = soup(*series)
    subjects = [*map(alone, series), mix]
    names, sizes = place.weights(*STEPS), list[int]()
    look: Callable[[], object] = lambda: sizes.append(  # noqa: E731
        place.nbytes_of_weights(names) + nbytes_in(sums_of(place))
    )
    place.server.log, place.watch.look = Looking(look), look
    budget = one_and_the_sum(place, mix)
    assert budget < 5 * series[0].nbytes
    audit = place.run(plan_of(subjects, place), budget)
    assert not audit.skipped
    assert len(place.fetched(names)) == len(names)  # nothing twice
    assert series[0].nbytes < max(sizes) <= budget + 16_000  # records and heads of pieces
    assert place.nbytes_of_weights(names) == 0
    assert not sums_of(place).exists()
    beside = place.out.with_name("beside")
    place.out = beside
    assert numbers(place.run(plan_of(subjects, place))) == numbers(audit)
    bits = {s.subject: s.bits_per_weight for s in audit.measurements if s.spec == "fp"}
    assert bits[mix.label] == bits["step10"]
    taken = {(s.subject, s.spec): s.nbytes for s in audit.measurements}
    for (subject, spec), nbytes in taken.items():
        assert nbytes == taken["step10", spec] != 0, subject


def test_an_interrupted_scan_goes_on_with_the_sum(place: Place, series: list[Checkpoint]) -> None:
    mix = soup(*series)
    plan, names = plan_of([*map(alone, series), mix], place), place.weights(*STEPS)
    budget = one_and_the_sum(place, mix)

    def interrupt(label: str) -> None:
        if label == "step40":
            raise KeyboardInterrupt

    place.watch.at_block = interrupt
    with pytest.raises(KeyboardInterrupt):
        place.run(plan, budget)
    assert nbytes_in(sums_of(place)) > series[0].nbytes
    place.watch.at_block = lambda label: None
    place.server.log.clear()
    audit = place.run(plan, budget)
    assert not audit.skipped
    assert not set(place.fetched(names)) & place.weights(*STEPS[:3])
    assert not sums_of(place).exists()
    place.out = place.out.with_name("beside")
    assert numbers(place.run(plan)) == numbers(audit)


def test_a_disk_that_fills_up_leaves_the_sum_and_the_next_scan_goes_on(
    place: Place, series: list[Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    mix = soup(*series)
    plan, budget = plan_of([mix], place), one_and_the_sum(place, mix)
    left = [60]

    def fill_up(file: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("qaudit.downloads.pieces.flush", fill_up)
        with pytest.raises(MachineError, match=r"no space left on device while writing .*sums"):
            place.run(plan, budget)
    assert nbytes_in(sums_of(place)) > 0
    audit = place.run(plan, budget)
    place.out = place.out.with_name("beside")
    assert numbers(place.run(plan)) == numbers(audit)


def test_a_sum_of_a_soup_that_nobody_asks_for_any_more_is_removed(
    place: Place, series: list[Checkpoint]
) -> None:
    mix = soup(*series)
    budget = one_and_the_sum(place, mix)
    place.watch.at_block = lambda label: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        place.run(plan_of([alone(series[0]), mix], place), budget)
    assert nbytes_in(sums_of(place)) > 0
    place.watch.at_block = lambda label: None
    place.run(plan_of([alone(series[0])], place), budget)
    assert not sums_of(place).exists()
