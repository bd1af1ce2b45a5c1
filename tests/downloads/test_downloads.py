"""Weights are there when their turn comes, gone when it is over, and nobody waits for ever."""

import json
import threading
from types import SimpleNamespace

import pytest

from qaudit.checkpoints.stamps import folder_of
from qaudit.downloads.downloads import Downloads
from qaudit.errors import HubError, MachineError, UnreachableError
from qaudit.types import Checkpoint, Ref, Subject, WeightFile
from tests.support.sample import alone
from tests.support.shelf import (
    SOON,
    STEPS,
    Fake,
    checkpoint,
    measure,
    place,
    plan_of,
    shelf,
    subject,
)


@pytest.fixture
def fake():
    """Return what fetches names; no thread of a download outlives its test."""
    yield Fake()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("downloads")]


@pytest.fixture
def downloads(fake):
    def make(*subjects, contents=None, **more):
        hub = SimpleNamespace(fetcher=fake, client=fake)
        budget = None if contents is None else 10 * contents
        return Downloads(hub, subjects, disk_budget_nbytes=budget, **more)

    return make


A, B, C, D = map(checkpoint, "abcd")


def test_what_ends_the_thread_is_raised_to_those_that_wait(fake, downloads):
    fake.refused["a"] = MachineError("the disk is full")
    fake.gates["a"] = threading.Event()
    raised = []

    def wait():
        try:
            with downloads(subject(A)) as supplied, supplied.ready(subject(A)):
                pass
        except MachineError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert fake.until("begin a")
    waiting.join(0.2)  # long enough to wait for the weights
    fake.open("a")
    waiting.join(SOON)
    assert [str(error) for error in raised] == ["the disk is full"]


GONE, BROKEN = HubError("gone"), UnreachableError("broke off")
TWIN = checkpoint("final", content="a", repo="org/final")


HAD = [
    ((A, B), 1, "", {}, "a, b", "fetch a, evict a, fetch b, evict b"),
    ((A, B), None, "", {}, "a, b", "fetch a, fetch b"),
    ((A, B, C), 1, "", {"b": GONE}, "a, b: gone, c",
     "fetch a, evict a, evict b, fetch c, evict c"),
    # Of a soup that lacks a member nothing more is fetched.
    (((A, B, C), D), 3, "", {"a": GONE}, "a+b+c: gone, d", "evict a, fetch d, evict d"),
    # While the Hub answers, a file that does not come costs one subject.
    ((A, B, C), 1, "", {"a": BROKEN, "c": BROKEN}, "a: broke off, b, c: broke off",
     "evict a, fetch b, evict b, evict c"),
    # What is cached is checked and never evicted, damaged or not.
    ((A, B), 1, "a", {}, "a, b", "fetch a, fetch b, evict b"),
    ((A,), 1, "a", {"a": GONE}, "a: gone", ""),
]  # fmt: skip


@pytest.mark.parametrize("row", HAD)
def test_what_can_be_had_is_measured_and_goes(fake, downloads, row):
    subjects, contents, cached, refused, measured, done = row
    fake.disk, fake.refused = {*cached}, refused
    wanted = [subject(*one) if isinstance(one, tuple) else subject(one) for one in subjects]
    with downloads(*wanted, contents=contents) as supplied:
        assert ", ".join(measure(supplied)) == measured
    assert ", ".join(fake.done()) == done


def test_a_subject_is_not_ready_before_all_its_members_are(fake, downloads):
    fake.gates["b"] = threading.Event()
    began = threading.Event()
    soup = subject(A, B)
    with downloads(soup) as supplied:

        def run():
            with supplied.ready(soup):
                began.set()

        waiting = threading.Thread(target=run)
        waiting.start()
        assert fake.until("begin b")
        assert not began.is_set()
        fake.open("b")
        assert began.wait(SOON)
        waiting.join(SOON)
    assert supplied.seconds_waited > 0


@pytest.mark.parametrize("error", [UnreachableError("silence"), MachineError("the disk is full")])
def test_what_ends_a_scan_ends_it_late(fake, downloads, error):
    fake.refused["c"], fake.silent = error, True
    measured = []
    with (
        pytest.raises(MachineError, match=error.message),
        downloads(subject(A), subject(B), subject(C), subject(D), contents=3) as supplied,
    ):
        for one in supplied.order:
            with supplied.ready(one):
                assert one.label == "a" or fake.until("begin c")
                measured.append(one.label)
    assert measured == ["a", "b"]


def test_two_that_do_not_come_in_a_row_end_the_scan(fake, downloads):
    fake.refused |= {label: UnreachableError(f"`{label}` broke off") for label in ("b", "c")}
    every = [subject(one) for one in (A, B, C, D)]
    ends = pytest.raises(UnreachableError, match="`c` broke off")
    with ends, downloads(*every, contents=4) as supplied:
        measure(supplied)
    assert "fetch d" not in fake.log
    fake.refused["a"], fake.stopped = ZeroDivisionError("a bug"), False
    with pytest.raises(ZeroDivisionError), downloads(subject(A)) as supplied:
        measure(supplied)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_evicts_none(fake, downloads, error):
    fake.gates["b"] = threading.Event()  # never opened
    with (
        pytest.raises(error),
        downloads(subject(A), subject(B), contents=2) as supplied,
        supplied.ready(subject(A)),
    ):
        assert fake.until("begin b")
        raise error
    assert fake.done() == ["fetch a", "break off"]


def test_folders_of_this_machine_need_nothing(fake, downloads):
    local = Checkpoint(Ref("/series/e"), "e", (WeightFile("model.safetensors", 10, "e"),))
    with downloads(subject(local), subject(A), subject(local, A), contents=1) as supplied:
        assert measure(supplied) == ["e", "a", "e+a"]
        assert supplied.folder(local) == folder_of(local)
    assert fake.done() == ["fetch a", "evict a"]
    with Downloads(None, [subject(A), subject(B)]) as supplied:  # without a Hub
        assert measure(supplied) == ["a", "b"]


def test_subjects_nobody_asks_for_hold_nothing_up(fake, downloads):
    with (
        downloads(subject(A), subject(B), subject(C), contents=1) as supplied,
        supplied.ready(subject(C)),
    ):
        pass
    assert fake.done()[-2:] == ["fetch c", "evict c"]
    assert fake.disk == set()


def test_two_names_for_one_content_are_fetched_once(fake, downloads):
    with downloads(subject(A), subject(TWIN), contents=1) as supplied:
        for each in supplied.order:
            with supplied.ready(each):
                assert supplied.folder(TWIN) == supplied.folder(A) == folder_of(A)
    assert fake.done() == ["fetch a", "evict a"]
    fake.refused["a"] = HubError("`a` is gone")
    with (
        downloads(subject(A), others=[subject(TWIN)], contents=1) as supplied,
        supplied.ready(subject(A)),
    ):
        assert supplied.folder(A) == folder_of(TWIN)
    assert fake.done()[2:] == ["fetch final", "evict final"]
    fake.disk.add("final")  # of a name that is cached nothing goes
    with downloads(subject(A), others=[subject(TWIN)], contents=1) as supplied:
        assert measure(supplied) == ["a"]
    assert fake.done()[4:] == ["fetch final"]


def test_the_next_one_comes_while_one_is_measured(fake, downloads):
    with downloads(subject(A), subject(B), contents=2) as supplied:
        with supplied.ready(subject(A)):
            assert fake.until("fetch b")
        with supplied.ready(subject(B)):
            assert fake.until("evict a")
    assert fake.done() == ["fetch a", "fetch b", "evict a", "evict b"]
    assert fake.kept == {"a": {"b"}, "b": set()}


def test_what_a_killed_scan_left_is_evicted(fake, downloads, tmp_path):
    record = tmp_path / "fetched.json"
    fake.disk.add("b")  # was there before
    with (
        pytest.raises(KeyboardInterrupt),
        downloads(subject(A), subject(B), contents=1, record=record) as supplied,
        supplied.ready(subject(A)),
    ):
        raise KeyboardInterrupt
    assert json.loads(record.read_text()) == [A.content]
    fake.stopped = False
    with downloads(subject(A), subject(B), subject(C), contents=1, record=record) as supplied:
        assert measure(supplied) == ["a", "b", "c"]
    assert [line for line in fake.done() if line.startswith("evict")] == ["evict a", "evict c"]
    assert fake.disk == {"b"}
    assert not record.exists()


def test_a_damaged_record_evicts_nothing(fake, downloads, tmp_path):
    with pytest.raises(MachineError, match="`a\\+b` needs 20 bytes of disk"):
        downloads(subject(A), subject(A, B), contents=1)
    assert fake.log == []  # before anything is fetched
    record = tmp_path / "fetched.json"
    fake.disk.add("a")
    for damage in ("", "{}", "\0"):
        record.write_text(damage)
        with downloads(subject(A), contents=1, record=record) as supplied:
            assert measure(supplied) == ["a"]
        assert fake.disk == {"a"}


def test_nothing_is_evicted_from_a_cache_that_other_hosts_may_read(
    fake, downloads, tmp_path, monkeypatch
):
    (tmp_path / "mounts").write_text("server:/x / nfs4 rw 0 0\n")
    monkeypatch.setattr("qaudit.host.MOUNTS", tmp_path / "mounts")
    with pytest.raises(MachineError, match=r"network file system \(nfs4\)") as refusal:
        downloads(subject(A), contents=1)
    assert "set HF_HUB_CACHE to a folder on a disk of this host" in refusal.value.hint
    with downloads(subject(A), subject(B)) as supplied:
        assert measure(supplied) == ["a", "b"]
    (tmp_path / "mounts").write_text("/dev/sda1 / ext4 rw 0 0\n")
    with downloads(subject(C), contents=1) as supplied:
        assert measure(supplied) == ["c"]
    assert fake.done() == ["fetch a", "fetch b", "fetch c", "evict c"]


# What needs several checkpoints of the Hub on the disk at once: a search.


__all__ = ["place", "shelf"]  # fixtures


def test_candidates_lie_on_the_disk_together_and_come_once(place):
    series = place.checkpoints(*(f"org/series@{step}" for step in STEPS[:3]))
    names = place.weights(*STEPS[:3])
    search = Subject("best", tuple((c, 1 / 3) for c in series), "greedy:scheme=rtn-4bit")
    budget, most = sum(c.nbytes for c in series), list[int]()
    place.watch.look = lambda: most.append(place.nbytes_of_weights(names))
    plan = plan_of([*map(alone, series), search], place)
    audit = place.run(plan, budget=budget)
    assert audit.diagnostics.greedy[0].documents == 8
    assert len(place.fetched(names)) == len(names)
    assert max(most) <= budget
    assert not place.nbytes_of_weights(names)
    again = place.run(plan, budget=budget)  # is gone through without a weight
    assert again.diagnostics == audit.diagnostics
    assert len(place.fetched(names)) == len(names)
