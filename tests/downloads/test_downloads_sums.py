"""A soup that does not fit is added up while its members pass by, and whatever ends is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qaudit.downloads.downloads import Downloads
from qaudit.errors import HubError, MachineError, SourceError
from qaudit.types import Checkpoint, Subject
from tests.support.downloads import SOON, Fake, checkpoint, measure, subject

A, B, C, D, E = map(checkpoint, "abcde")


@dataclass
class Sums:
    """Running sums of names: one takes 16 bytes beside contents of ten."""

    log: Callable[[str], None]
    inside: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, Exception] = field(default_factory=dict)

    def can_sum(self, soup: Subject) -> bool:
        return soup.merge == "mean"

    def of(self, soup: Subject) -> Any:
        there = self.inside.get(soup.label)
        return SimpleNamespace(shapes={"w": (1,)}, exists=there is not None, added=len(there or ()))

    def keep(self, soups: Iterable[Subject]) -> None:
        for label in set(self.inside) - {soup.label for soup in soups}:
            del self.inside[label]
            self.log(f"left {label}")

    def add(
        self, soup: Subject, member: Checkpoint, folder: Path, must_go_on: Callable[[], None]
    ) -> None:
        must_go_on()
        if member.label in self.refused:
            raise self.refused[member.label]
        self.inside.setdefault(soup.label, []).append(member.label)
        self.log(f"add {member.label}")

    def remove(self, soup: Subject) -> None:
        if self.inside.pop(soup.label, None) is not None:
            self.log("drop")

    def weights(self, soup: Subject) -> Any:
        return "+".join(self.inside[soup.label])


@pytest.fixture
def sums(fake: Fake) -> Sums:
    return Sums(fake._note)


Make = Callable[..., Downloads]


@pytest.fixture
def downloads(fake: Fake, sums: Sums) -> Make:
    def make(*subjects: Subject, budget: int | None = 26, **more: Any) -> Downloads:
        hub: Any = SimpleNamespace(fetcher=fake, client=fake)
        some: Any = sums
        return Downloads(hub, subjects, disk_budget_nbytes=budget, sums=some, **more)

    return make


SOUP = subject(A, B, C)


def test_members_are_added_as_they_pass_by_and_the_sum_is_handed_out(
    fake: Fake, downloads: Make
) -> None:
    with downloads(*map(subject, (A, B, C)), SOUP) as supplied:
        for one in supplied.order:
            with supplied.ready(one) as merged:
                assert str(merged) == ("a+b+c" if one is SOUP else "None")
    assert fake.done() == [
        *("fetch a", "add a", "evict a", "fetch b", "add b", "evict b"),
        *("fetch c", "add c", "evict c", "drop"),
    ]


def test_a_member_is_added_while_it_is_measured(fake: Fake, downloads: Make) -> None:
    with downloads(*map(subject, (A, B, C)), SOUP) as supplied:
        for one in supplied.order:
            with supplied.ready(one):
                assert one is SOUP or fake.until(f"add {one.label}")


def test_what_fits_is_merged_as_it_is_read(fake: Fake, downloads: Make) -> None:
    with downloads(SOUP, budget=30) as supplied, supplied.ready(SOUP) as merged:
        assert merged is None
        assert fake.disk == {"a", "b", "c"}


def test_a_soup_is_not_ready_before_its_last_member_is_in(fake: Fake, downloads: Make) -> None:
    fake.gates["c"] = threading.Event()
    began = threading.Event()
    with downloads(SOUP) as supplied:

        def run() -> None:
            with supplied.ready(SOUP):
                began.set()

        waiting = threading.Thread(target=run)
        waiting.start()
        assert fake.until("begin c")
        assert not began.is_set()
        fake.open("c")
        assert began.wait(SOON)
        waiting.join(SOON)


def test_a_member_that_cannot_be_had_ends_the_soup_and_its_sum(
    fake: Fake, sums: Sums, downloads: Make
) -> None:
    fake.refused["b"] = HubError("`b` is gone")
    with downloads(*map(subject, (A, B, C)), SOUP, subject(D)) as supplied:
        found = measure(supplied)
    assert sorted(found) == ["a", "a+b+c: `b` is gone", "b: `b` is gone", "c", "d"]
    assert sums.inside == {}
    assert fake.disk == set()


def test_a_member_that_cannot_be_added_ends_its_soup_alone(
    fake: Fake, sums: Sums, downloads: Make
) -> None:
    sums.refused["b"] = SourceError("`b` has another shape")
    outcome = {}
    with downloads(*map(subject, (A, B, C)), SOUP) as supplied:
        for one in supplied.order:
            try:
                with supplied.ready(one):
                    outcome[one.label] = "measured"
            except SourceError as error:
                outcome[one.label] = error.message
    assert outcome == {
        **dict.fromkeys("abc", "measured"),
        "a+b+c": "`b` has another shape",
    }
    assert sums.inside == {}
    assert fake.disk == set()


def test_a_full_disk_ends_the_scan_and_the_sum_stays(sums: Sums, downloads: Make) -> None:
    sums.refused["c"] = MachineError("no space left on device")
    with (
        pytest.raises(MachineError, match="no space left"),
        downloads(*map(subject, (A, B, C)), SOUP) as supplied,
    ):
        measure(supplied)
    assert sums.inside == {"a+b+c": ["a", "b"]}


def test_a_scan_goes_on_with_the_sum_of_the_one_before(
    fake: Fake, sums: Sums, downloads: Make
) -> None:
    sums.inside = {"a+b+c": ["a", "b"], "another": ["x"]}
    with downloads(SOUP) as supplied, supplied.ready(SOUP) as merged:
        assert str(merged) == "a+b+c"
    assert fake.done() == ["left another", "fetch c", "add c", "evict c", "drop"]


def test_a_whole_sum_needs_nothing_of_the_hub(fake: Fake, sums: Sums, downloads: Make) -> None:
    sums.inside = {"a+b+c": ["a", "b", "c"]}
    with downloads(SOUP) as supplied, supplied.ready(SOUP) as merged:
        assert str(merged) == "a+b+c"
    assert fake.done() == ["drop"]


def test_an_interrupt_keeps_what_is_in(fake: Fake, sums: Sums, downloads: Make) -> None:
    fake.gates["c"] = threading.Event()  # never opened
    with (
        pytest.raises(KeyboardInterrupt),
        downloads(subject(A), SOUP) as supplied,
        supplied.ready(subject(A)),
    ):
        assert fake.until("add a")
        raise KeyboardInterrupt
    assert "a" in sums.inside["a+b+c"]
    assert "drop" not in fake.log


@pytest.mark.parametrize("error", [KeyboardInterrupt, MachineError("the disk is full")])
def test_a_sum_stays_where_its_soup_was_not_measured(
    fake: Fake, sums: Sums, downloads: Make, error: BaseException
) -> None:
    with (
        pytest.raises(BaseException, match=r"|the disk is full"),
        downloads(SOUP) as supplied,
        supplied.ready(SOUP),
    ):
        raise error
    assert sums.inside == {"a+b+c": ["a", "b", "c"]}
    assert "drop" not in fake.log


def test_a_sum_goes_where_its_soup_cannot_be_measured(sums: Sums, downloads: Make) -> None:
    with downloads(SOUP) as supplied, pytest.raises(SourceError), supplied.ready(SOUP):
        raise SourceError("it does not run")
    assert sums.inside == {}


def test_a_soup_nobody_asks_for_holds_nothing_up(fake: Fake, downloads: Make) -> None:
    with (
        downloads(SOUP, subject(D), subject(E)) as supplied,
        supplied.ready(subject(E)),
    ):
        pass
    assert fake.disk == set()


def test_other_merges_need_their_members_together(downloads: Make) -> None:
    together = Subject("arc", SOUP.members, "stock")
    with pytest.raises(MachineError, match="needs 30 bytes of weights"):
        downloads(together)
