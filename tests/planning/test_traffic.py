"""Bytes from the Hub and the disk they take; what does not fit is refused with what would."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.checkpoints.stamps import hub_cache
from qaudit.downloads.downloads import default_budget, price_traffic
from qaudit.errors import MachineError
from qaudit.host import free_disk_nbytes
from qaudit.recipe.table import parse_nbytes
from qaudit.support.sizes import typed_size
from qaudit.types import Checkpoint, Ref, Subject, TextFile, Traffic, WeightFile, digest

GB = 10**9
SIZE = 29_194_510_544  # a checkpoint of 7B parameters in float32


def checkpoint(name, nbytes=SIZE, content=None):
    files = (WeightFile("model.safetensors", nbytes, digest(content or name)),)
    return Checkpoint(Ref("org/name", name), name, files, digest(name)[:40])


def alone(*checkpoints):
    return [Subject(c.label, ((c, 1.0),)) for c in checkpoints]


def soup(label, *members):
    return Subject(label, tuple((c, 1 / len(members)) for c in members), "mean")


def priced(subjects, budget, free, *, texts=0, record=None, **missing):
    """Price; what is missing of a checkpoint is all of it where nothing is said by label."""
    files = [TextFile("hf://x", "a/b", 40 * "a", f"none-{texts}.txt", texts, 64 * "a")]
    fetcher = SimpleNamespace(nbytes_missing=lambda one: missing.get(one.label, one.nbytes))
    hub = SimpleNamespace(fetcher=fetcher)
    return price_traffic(hub, subjects, files if texts else [], budget, free, record)


SERIES = alone(*(checkpoint(f"step{k}") for k in range(12)))
ENDS = [subject.first for subject in SERIES[-4:]]


def test_a_series_is_fetched_once_but_for_soups_and_what_is_here():
    assert priced(SERIES, 30 * GB, 500 * GB) == Traffic(12 * SIZE, 0, SIZE, 500 * GB, 30 * GB)
    assert priced(SERIES, 900 * GB, 100 * GB).nbytes_disk_budget == 100 * GB  # what is free
    twins = alone(checkpoint("main", content="same"), checkpoint("step9", content="same"))
    assert priced(twins, None, 500 * GB).nbytes_to_fetch == SIZE
    subjects = [*SERIES, soup("ends", *ENDS)]  # a soup needs its members at once
    wide = priced(subjects, 500 * GB, 900 * GB)
    assert wide.nbytes_to_fetch == 12 * SIZE
    tight = priced([*alone(*ENDS), *SERIES[:8], *subjects[-1:]], 120 * GB, 900 * GB)
    assert tight.nbytes_to_fetch == 12 * SIZE  # the soup is measured right behind its members
    assert 4 * SIZE <= tight.nbytes_disk_peak <= 120 * GB
    pairs = [soup(f"{a}+{b}", SERIES[a].first, SERIES[b].first) for a in range(3) for b in range(a)]
    crossed = priced(pairs, 2 * SIZE, 900 * GB)
    assert crossed.nbytes_to_fetch > 3 * SIZE
    traffic = priced(SERIES[:3], 30 * GB, 500 * GB, step0=0, step1=SIZE - 9)
    assert traffic.nbytes_to_fetch == (SIZE - 9) + SIZE
    assert traffic.nbytes_cached == SIZE + 9
    assert traffic.nbytes_disk_peak == SIZE
    traffic = priced(SERIES[:2], 31 * GB, 500 * GB, texts=GB)
    assert (traffic.nbytes_to_fetch, traffic.nbytes_cached) == (2 * SIZE + GB, 0)
    assert traffic.nbytes_disk_peak == SIZE + GB
    with pytest.raises(MachineError, match=r"needs 29\.2 GB of disk beside 1\.0 GB of text"):
        priced(SERIES[:2], 30 * GB, 500 * GB, texts=GB)
    with pytest.raises(MachineError, match=r"the texts take 1\.0 GB of disk"):
        priced(SERIES[:2], GB // 2, 500 * GB, texts=GB)


def test_everything_is_kept_that_fits_and_a_scan_goes_on_with_its_disk(monkeypatch, tmp_path):
    traffic = priced(SERIES, None, 500 * GB)
    assert traffic.nbytes_disk_budget is None
    assert traffic.nbytes_disk_peak == 12 * SIZE
    assert default_budget(50 * GB) == 45 * GB
    assert default_budget(1000 * GB) == 990 * GB
    traffic = priced(SERIES, None, 200 * GB)
    assert traffic.nbytes_disk_budget == 190 * GB
    assert traffic.nbytes_disk_peak <= 190 * GB
    monkeypatch.setenv("HF_HUB_CACHE", f"{tmp_path}/not/made/yet")
    assert free_disk_nbytes(hub_cache()) > 0
    tight = [*SERIES, soup("ends", *ENDS)]
    first = priced(tight, None, 140 * GB)
    assert first.nbytes_disk_budget == 130 * GB
    record = tmp_path / "fetched.json"
    record.write_text(json.dumps([c.content for c in ENDS]), encoding="utf-8")
    lying = {"step8": 0, "step9": 0, "step10": SIZE - 5}  # two are whole, one has begun
    free = 140 * GB - 2 * SIZE - 5
    again = priced(tight, None, free, record=record, **lying)
    assert again.nbytes_disk_budget == 130 * GB
    assert again.nbytes_disk_peak <= 130 * GB
    assert again.nbytes_to_fetch >= 10 * SIZE - 5
    begun = priced([alone(ENDS[0])[0]], None, 100 * GB, record=record, step8=SIZE // 4)
    assert (begun.nbytes_to_fetch, begun.nbytes_disk_peak) == (SIZE // 4, SIZE)
    with pytest.raises(MachineError, match="may be used"):
        priced(tight, None, 60 * GB, **lying)  # what others brought stays


# ----------------------------------------------------------------------------- what would fit


def refusal(subjects, budget, free):
    with pytest.raises(MachineError) as refused:
        priced(subjects, budget, free)
    return refused.value


def test_what_does_not_fit_is_refused_with_all_that_would(monkeypatch):
    error = refusal([*SERIES, soup("ends", *ENDS)], 60 * GB, 500 * GB)
    assert error.message == (
        "`ends` needs 116.8 GB of disk for its 4 members at once, and 60.0 GB may be used"
    )
    assert error.hint == ("give `--set disk_budget=117GB`: 500.0 GB are free, or leave out `ends`")
    pair = soup("pair", *ENDS[:2])
    error = refusal([*SERIES, pair], 40 * GB, 500 * GB)
    assert "`pair` needs 58.4 GB of disk for its 2 members at once" in error.message
    assert error.hint.endswith("are free, or leave out `pair`")
    assert refusal([pair], 40 * GB, 500 * GB).hint.endswith("are free")
    monkeypatch.setenv("HF_HUB_CACHE", "/cache")
    error = refusal(SERIES, None, 20 * GB)
    assert "needs 29.2 GB of disk, and 18.0 GB may be used" in error.message
    assert error.hint == (
        "free 9.2 GB on the disk of `/cache`, or set HF_HUB_CACHE to a folder with room for 29.2 GB"
    )
    large = alone(*(checkpoint(f"large{k}", 80 * GB) for k in range(5)))
    error = refusal([*SERIES, *large], 60 * GB, 70 * GB)
    assert "or leave out `large0`, `large1`, `large2` and 2 more" in error.hint


@given(st.integers(1, 10**14))
def test_a_size_that_is_proposed_reads_back_as_enough(nbytes):
    assert nbytes <= parse_nbytes(typed_size(nbytes)) <= 1.1 * nbytes + 1
    assert 0.9 * nbytes - 1 <= parse_nbytes(typed_size(nbytes, up=False)) <= nbytes


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=5),
    st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=6),
    st.integers(1, 200),
)
def test_what_is_accepted_stays_within_the_budget_and_what_is_refused_cannot(sizes, needs, budget):
    known = [checkpoint(f"c{k}", nbytes) for k, nbytes in enumerate(sizes)]
    members = [[known[k % len(known)] for k in sorted(keys)] for keys in needs]
    subjects = [soup(f"s{i}", *dict.fromkeys(m)) for i, m in enumerate(members)]
    largest = max(sum(c.nbytes for c, _ in s.members) for s in subjects)
    if largest > budget:
        refusal(subjects, budget, 1000)
    else:
        traffic = priced(subjects, budget, 1000)
        assert largest <= traffic.nbytes_disk_peak <= budget
        assert traffic.nbytes_to_fetch >= sum(
            {c.label: c.nbytes for m in members for c in m}.values()
        )
