"""A sum on the disk is the merge side by side, bit for bit, whatever happens on the way."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qaudit.core.registry import merges, parse_merge
from qaudit.downloads import running_sum
from qaudit.downloads.running_sum import RunningSum, growing_nbytes, nbytes_in, sum_of
from qaudit.errors import MachineError, SourceError
from qaudit.model.merged import MergedWeights
from qaudit.types import Checkpoint, Ref, Subject, WeightFile

SUMS = [name for name in merges() if parse_merge(name).as_sum([0.5, 0.5]) is not None]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Member(dict[str, Tensor]):
    """Weights that are in memory, and remember what was read of them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.asked: list[str] = []

    def names(self) -> Sequence[str]:
        return list(self)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self[name].shape)

    def read(self, name: str) -> Tensor:
        self.asked.append(name)
        return self[name].clone()


def member(seed: int, dtype: torch.dtype = torch.float32, **more: Tensor) -> Member:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"a": (5, 7), "odd": (23,), "one": (), "none": (0, 3)}
    drawn = {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}
    return Member({**drawn, **more})


def soup(count: int, merge: str = "mean", shares: Sequence[float] | None = None) -> Subject:
    shares = shares or parse_merge(merge).shares([None] * count)
    return Subject(
        "soup",
        tuple(
            (Checkpoint(Ref(f"/m{k}"), f"m{k}", (WeightFile("w", 1, str(k)),)), share)
            for k, share in enumerate(shares)
        ),
        parse_merge(merge).spec,
    )


def side_by_side(what: Subject, members: Sequence[Member]) -> MergedWeights:
    labels = [checkpoint.label for checkpoint, _ in what.members]
    shares = [share for _, share in what.members]
    return MergedWeights(labels, members, shares, parse_merge(str(what.merge)))


def added(folder: Path, what: Subject, members: Sequence[Member]) -> RunningSum:
    for one in members:
        RunningSum(folder, what).add(one)  # as another process each time
    return RunningSum(folder, what)


def must_be_the_same(found: RunningSum, expected: MergedWeights) -> None:
    assert found.added == len(found._labels)
    weights = found.weights()
    assert weights.names() == expected.names()
    for name in expected.names():
        a, b = weights.read(name), expected.read(name)
        assert a.dtype == b.dtype
        assert a.shape == b.shape == weights.shape(name)
        assert torch.equal(a, b), name


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qaudit.core.merge.SLICE", 4)
    monkeypatch.setattr(running_sum, "PIECE", 8)


# ---------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("merge", SUMS)
def test_every_merge_that_is_a_sum_gives_the_same_bits(
    tmp_path: Path, merge: str, dtype: torch.dtype
) -> None:
    members = [member(seed, dtype) for seed in range(5)]
    shares = (0.5, 0.2, 0.1, 0.15, 0.05) if merge == "weighted" else None
    what = soup(5, merge, shares)
    must_be_the_same(added(tmp_path / "sum", what, members), side_by_side(what, members))


@pytest.mark.parametrize("text", ["weighted:free=true", "weighted:scaled=true"])
def test_weights_that_need_not_sum_to_one_are_taken_as_they_are(tmp_path: Path, text: str) -> None:
    members, what = [member(seed) for seed in range(2)], soup(2, text, (1.5, -0.7))
    must_be_the_same(added(tmp_path / "sum", what, members), side_by_side(what, members))


@settings(max_examples=25, deadline=None)
@given(
    shares=st.lists(st.floats(-3, 3).filter(bool), min_size=2, max_size=4),
    seed=st.integers(0, 99),
)
def test_any_weights_give_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, shares: list[float], seed: int
) -> None:
    if abs(sum(shares)) < 1e-3:
        return
    members = [member(seed + k, DTYPES[k % 3]) for k in range(len(shares))]
    what = soup(len(shares), "weighted:scaled=true", shares)
    folder = tmp_path_factory.mktemp("sums") / "sum"
    must_be_the_same(added(folder, what, members), side_by_side(what, members))


def test_real_slices_and_threads_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qaudit.core.merge.SLICE", 1 << 16)
    monkeypatch.setattr(running_sum, "PIECE", 1 << 18)
    drawn = [torch.randn(700_001, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    members = [Member({"large": tensor.bfloat16()}) for tensor in drawn]
    what = soup(3)
    must_be_the_same(added(tmp_path / "sum", what, members), side_by_side(what, members))


def test_merges_that_look_at_members_together_are_no_sums() -> None:
    assert sum_of(soup(2, "slerp:t=0.3")) is None
    assert sum_of(soup(3, "stock")) is None
    assert sum_of(Subject("m", soup(2).members[:1])) is None


# ------------------------------------------------------------------------------------------- room


def test_it_takes_what_was_said_while_it_grows_and_what_a_member_takes_in_the_end(
    tmp_path: Path,
) -> None:
    members = [member(seed, torch.bfloat16) for seed in range(3)]
    said = growing_nbytes([tensor.shape for tensor in members[0].values()])
    elements = sum(tensor.numel() for tensor in members[0].values())
    assert said == 8 * (elements + 8)
    what, folder = soup(3), tmp_path / "sum"
    for count in (1, 2):
        found = added(folder, what, members[count - 1 : count])
        numbers = nbytes_in(folder) - heads(folder)
        assert found.added == count
        assert numbers == 8 * elements
    found = added(folder, what, members[2:])
    assert nbytes_in(folder) - heads(folder) == 2 * elements == found.weights().nbytes
    found.remove()
    assert not folder.exists()
    assert not RunningSum(folder, what).exists


def heads(folder: Path) -> int:
    """Return what a folder holds beside numbers."""
    return (folder / running_sum.RECORD).stat().st_size + 52 * len(list(folder.glob("*.sum")))


# -------------------------------------------------------------------------------- breaking off


class BrokenOffError(Exception):
    """An end at a moment nobody chose."""


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_broken_off_anywhere_it_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    members, what = [member(seed) for seed in range(3)], soup(3)
    really, left = os.fsync, [0]

    def fsync(descriptor: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise BrokenOffError
        really(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    moments = 0
    while True:
        folder = tmp_path / f"sum{moments}"
        added(folder, what, members[:turn])
        moments += 1
        left[0] = moments
        try:
            RunningSum(folder, what).add(members[turn])
        except BrokenOffError:
            left[0] = 0
            standing = RunningSum(folder, what).added
            assert standing in (turn, turn + 1)  # the latter where only the folder was to flush
            found = added(folder, what, members[standing:])
            must_be_the_same(found, side_by_side(what, members))
            assert not list(folder.glob("*.partial"))
        else:
            break
    assert moments > 10  # at every piece, at the record and at the folder


KILLED = """
import os, signal, sys
from pathlib import Path
import qaudit.downloads.running_sum as running_sum
from tests.downloads.test_running_sum import RunningSum, member, soup
import qaudit.core.merge as merging
merging.SLICE, running_sum.PIECE = 4, 8
folder, moment = Path(sys.argv[1]), int(sys.argv[2])
seen = []
def fsync(descriptor):
    seen.append(descriptor)
    if len(seen) == moment:
        os.kill(os.getpid(), signal.SIGKILL)
os.fsync = fsync
for seed in range(3):
    RunningSum(folder, soup(3)).add(member(seed))
"""


@pytest.mark.parametrize(("moment", "turn"), [(3, 0), (19, 1), (30, 2)])
def test_a_kill_leaves_every_piece_with_a_member_or_without_it(
    tmp_path: Path, moment: int, turn: int
) -> None:
    folder, what = tmp_path / "sum", soup(3)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), str(moment)],
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == -signal.SIGKILL
    assert list(folder.glob("*.partial"))
    members = [member(seed) for seed in range(3)]
    assert RunningSum(folder, what).added == turn
    found = added(folder, what, members[turn:])
    assert ("a" in members[turn].asked) == (moment == 3)  # else it is in already
    must_be_the_same(found, side_by_side(what, members))


def test_a_full_disk_leaves_the_sum_before_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members, what, folder = [member(seed) for seed in range(3)], soup(3), tmp_path / "sum"
    added(folder, what, members[:1])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr("qaudit.downloads.pieces.flush", full)
    with pytest.raises(MachineError, match="no space left on device") as refused:
        RunningSum(folder, what).add(members[1])
    assert "run the same command again" in refused.value.hint
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    monkeypatch.undo()
    monkeypatch.setattr(running_sum, "PIECE", 8)
    must_be_the_same(added(folder, what, members[1:]), side_by_side(what, members))


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 400])
def test_a_damaged_piece_is_summed_up_anew(tmp_path: Path, damage: bytes) -> None:
    members, what, folder = [member(seed) for seed in range(3)], soup(3), tmp_path / "sum"
    added(folder, what, members[:2])
    (folder / "000000-00001.sum").write_bytes(damage)
    assert RunningSum(folder, what).added == 0
    must_be_the_same(added(folder, what, members), side_by_side(what, members))


@pytest.mark.parametrize("damage", ["", "{}", '{"sum": 1, "tensors": []}', "\0"])
def test_a_damaged_record_is_no_sum(tmp_path: Path, damage: str) -> None:
    members, what, folder = [member(seed) for seed in range(2)], soup(2), tmp_path / "sum"
    added(folder, what, members[:1])
    (folder / running_sum.RECORD).write_text(damage)
    assert not RunningSum(folder, what).exists
    must_be_the_same(added(folder, what, members), side_by_side(what, members))


def test_the_sum_of_another_soup_is_none_of_this_one(tmp_path: Path) -> None:
    members, folder = [member(seed) for seed in range(2)], tmp_path / "sum"
    added(folder, soup(2), members)
    what = soup(2, "weighted", (0.25, 0.75))
    assert RunningSum(folder, what).added == 0
    must_be_the_same(added(folder, what, members), side_by_side(what, members))


def test_whoever_writes_there_beside_a_scan_is_found_out(tmp_path: Path) -> None:
    members, folder, what = [member(seed) for seed in range(3)], tmp_path / "sum", soup(3)
    added(folder, what, members[:1])
    found = RunningSum(folder, what)

    class Meddling(Member):
        def read(self, name: str) -> Tensor:
            for path in folder.glob("*.sum"):
                path.unlink(missing_ok=True)
            return super().read(name)

    with pytest.raises(MachineError, match="was changed while it was added to"):
        found.add(Meddling(members[1]))


# -------------------------------------------------------------------------- members that differ


def test_a_member_of_other_tensors_is_refused_as_side_by_side(tmp_path: Path) -> None:
    what, first = soup(2), member(0)
    for other in (member(1, more=torch.ones(1)), Member({**member(1), "a": torch.ones(7, 5)})):
        found = added(tmp_path / "sum", what, [first])
        with pytest.raises(SourceError) as passing:
            found.add(other)
        with pytest.raises(SourceError) as beside:
            side_by_side(what, [first, other])
        assert passing.value.message == beside.value.message
        found.remove()


def test_whole_numbers_stay_where_they_agree_and_are_refused_where_they_differ(
    tmp_path: Path,
) -> None:
    what, counts = soup(3), torch.arange(20)
    members = [member(k, counts=counts, mask=counts > 3) for k in range(3)]
    must_be_the_same(added(tmp_path / "sum", what, members), side_by_side(what, members))
    other = member(2, counts=counts + (counts == 19), mask=counts > 3)
    found = added(tmp_path / "other", what, members[:2])
    with pytest.raises(SourceError, match="`counts` holds whole numbers that differ between `m0`"):
        found.add(other)
    with pytest.raises(SourceError, match="`counts` holds whole numbers that differ between `m0`"):
        side_by_side(what, [*members[:2], other]).read("counts")
