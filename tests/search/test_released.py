"""Ulps against steps that are really taken; releases that are, or are not, what they are said."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import qaudit.search.released as released
from qaudit.core.merges.mean import Mean
from qaudit.errors import SourceError
from qaudit.judge.released import WeightDifference, fits, released_findings
from qaudit.planning.releases import find_releases
from qaudit.search.released import (
    compare_stored,
    compare_weights,
    difference,
    key_of,
    store_difference,
    ulps_between,
)
from qaudit.types import Checkpoint, Recipe, Subject
from tests.support.series import find_checkpoints

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST = 2**63 - 1


def between(a: float, b: float, dtype: torch.dtype = torch.float32) -> int:
    pair = torch.tensor([a, b], dtype=torch.float64).to(dtype)
    return int(ulps_between(pair[:1], pair[1:]))


# ------------------------------------------------------------------------------------- arithmetic


def walked(a: np.floating, b: np.floating) -> int:
    """Count the steps from one number to another by taking them; both zeros are one."""
    low, high = sorted((a, b))
    steps = 0
    while low < high:
        low = np.nextafter(low, high)
        steps += 1
    return steps


def ranked(bits: int, width: int) -> int:
    """Return a pattern's place on the number line, in plain whole numbers."""
    half = 1 << (width - 1)
    return bits if bits < half else half - bits


@given(st.integers(0, 2**16 - 1), st.integers(-300, 300))
def test_half_precision_counts_the_steps_that_numpy_takes(bits: int, far: int) -> None:
    a = np.uint16(bits).view(np.float16)
    b = np.uint16((bits + far) % 2**16).view(np.float16)
    if np.isnan(a) or np.isnan(b) or abs(ranked(int(bits), 16)) < abs(far) < 1:
        return
    if abs(ranked(bits, 16) - ranked((bits + far) % 2**16, 16)) > 1000:
        return  # a walk of that length takes minutes
    found = ulps_between(*(torch.from_numpy(np.array([x])) for x in (a, b)))
    assert int(found) == walked(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_any_two_patterns_are_as_far_apart_as_their_places(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    width = 8 * dtype.itemsize
    bits = data.draw(st.tuples(*[st.integers(0, 2**width - 1)] * 2))
    kind = {16: np.uint16, 32: np.uint32}[width]
    signed = {16: np.int16, 32: np.int32}[width]
    a, b = (torch.from_numpy(np.array([x], kind).view(signed)).view(dtype) for x in bits)
    nans = int(a.isnan()) + int(b.isnan())
    expected = abs(ranked(bits[0], width) - ranked(bits[1], width))
    assert int(ulps_between(a, b)) == (expected, MOST, 0)[nans]
    assert int(ulps_between(b, a)) == int(ulps_between(a, b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_odd_places_of_the_line(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * 2.0 ** -math.floor(-math.log2(info.eps))
    assert between(0.0, -0.0, dtype) == 0
    assert between(smallest, 0.0, dtype) == 1
    assert between(-smallest, smallest, dtype) == 2
    assert between(1.0, 1.0 + info.eps, dtype) == 1
    assert between(1.0, 1.0 - info.eps / 2, dtype) == 1
    assert between(info.max, math.inf, dtype) == 1
    assert between(math.inf, math.inf, dtype) == 0
    assert between(math.nan, math.nan, dtype) == 0
    assert between(math.nan, 1.0, dtype) == MOST
    denormals = round(info.smallest_normal / smallest)
    assert between(info.smallest_normal, 0.0, dtype) == denormals


def test_double_precision_does_not_run_over() -> None:
    pair = torch.tensor([-math.inf, math.inf], dtype=torch.float64)
    assert int(ulps_between(pair[:1], pair[1:])) == MOST


def test_a_difference_says_where_how_much_and_how_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(released, "_SLICE", 3)
    a = torch.ones(8)
    b = a.clone()
    b[1], b[7] = 1 + 2**-23, 1 + 5 * 2**-23
    found = difference("w", b, a, [a, 4 * a])
    assert (found.dtype, found.tensor, found.ulps) == ("fp32", "w", 5)
    assert (found.elements, found.unequal, found.beyond) == (8, 2, 1)
    expected = float((b.double() - a.double()).norm() / a.double().norm())
    assert found.relative == pytest.approx(expected, rel=1e-12)
    assert found.of_largest == 5 / 4


def test_a_difference_from_nothing_is_infinite_and_of_nothing_is_none() -> None:
    zeros = torch.zeros(4)
    assert difference("w", torch.ones(4), zeros, [zeros]).relative == math.inf
    assert difference("w", zeros, zeros, [zeros]) == WeightDifference("fp32", 0, "w", 4)


@pytest.mark.parametrize("dtype", DTYPES)
@given(bits=st.integers(0, 2**31 - 1))
def test_the_step_at_a_number_is_the_way_to_the_next_one(dtype: torch.dtype, bits: int) -> None:
    shifted = bits >> (32 - 8 * dtype.itemsize)
    kind = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    pair = torch.tensor([shifted, shifted + 1], dtype=torch.int64).to(kind).view(dtype).double()
    if not pair.isfinite().all():
        return
    assert float(released._ulp(pair[:1], dtype)) == float(pair[1] - pair[0])


@given(st.integers(0, 2**32 - 1), st.integers(2, 9))
def test_summing_in_single_precision_is_explained_however_much_cancels(
    seed: int, count: int
) -> None:
    torch.manual_seed(seed)
    parts = [torch.randn(500) for _ in range(count - 1)]
    parts.append(-sum(parts[1:], parts[0]) + 1e-6 * torch.randn(500))
    summed = sum(parts[1:], parts[0]) / count
    exact = Mean().merge(parts, [1 / count] * count)
    found = difference("w", summed, exact, parts)
    member = (None, 1.0)  # who it is does not matter
    release = Subject("x", (member,) * (count + 1), "released:mean")  # type: ignore[arg-type]
    assert fits(release, found)
    assert not fits(release, difference("w", summed, exact + 1e-5, parts))


# -------------------------------------------------------------------------------------- checkpoints

FAMILY = """
family: tiny
description: tiny
stages: [{name: end, pattern: 'end-(?P<ingredient>[0-9])-step(?P<step>[0-9]+)'}]
named: [{name: main, stage: end}]
soups: [{label: main, target: main, of: [end-1-step9, end-2-step9, end-3-step9]}]
"""


def write(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def parts(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    made = {"a": torch.randn(40, 30), "b": torch.randn(50)}
    return {**{name: t.to(dtype) for name, t in made.items()}, "ids": torch.arange(5)}


def mean(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Average in single precision and another order, as others do."""
    each = [parts(seed, dtype) for seed in (1, 2, 3)]
    found = {n: (each[2][n].float() + each[1][n] + each[0][n]) / 3 for n in ("a", "b")}
    return {**{name: t.to(dtype) for name, t in found.items()}, "ids": torch.arange(5)}


@pytest.fixture
def series(tmp_path: Path) -> Path:
    folder = tmp_path / "series"
    for seed in (1, 2, 3):
        write(folder / f"end-{seed}-step9", **parts(seed))
    write(folder / "main", **mean())
    (folder / "qaudit-family.yaml").write_text(FAMILY)
    return folder


def release_in(series: Path) -> Subject:
    (found,) = find_releases(Recipe((), ()), find_checkpoints(series)).subjects
    return found


def said_of(series: Path) -> tuple[str, str, str]:
    release = release_in(series)
    (finding,) = released_findings([(release, compare_weights(release))])
    assert finding.rule == "QA019"
    return finding.level, finding.outcome, finding.message


SOUP = "the mean of `end-1-step9`, `end-2-step9` and `end-3-step9`"


def test_a_release_that_is_its_soup_equals_it_to_a_last_rounding(series: Path) -> None:
    found = compare_weights(release_in(series))
    assert (found.ulps, found.elements, found.beyond) in [(0, 1255, 0), (1, 1255, 0)]
    level, outcome, message = said_of(series)
    assert (level, outcome) == ("info", "pass")
    assert message.startswith(f"`main` equals {SOUP} ")


def test_a_release_of_another_rounding_differs_by_one_step(series: Path) -> None:
    tensors = mean()
    tensors["b"][7] = torch.nextafter(tensors["b"][7], torch.tensor(9.0, dtype=torch.bfloat16))
    exact = compare_weights(release_in(series))
    write(series / "main", **tensors)
    found = compare_weights(release_in(series))
    assert (found.ulps, found.beyond) == (1, 0)
    assert found.unequal == exact.unequal + 1
    assert said_of(series)[2].startswith(f"`main` equals {SOUP} to 1 bf16 ulp: 0.")


def test_a_release_that_is_another_soup_is_a_warning_with_its_size(series: Path) -> None:
    tensors = mean()
    tensors["a"] = parts(1)["a"]
    write(series / "main", **tensors)
    level, outcome, message = said_of(series)
    assert (level, outcome) == ("warn", "fail")
    assert message.startswith(f"`main` differs from {SOUP} by up to ")
    assert "bf16 ulps, in `a`: 9" in message  # nearly all numbers are of `a`
    reference = (parts(1)["a"].double() - mean()["a"].double()).norm() / mean()["a"].double().norm()
    assert f"and a tensor by up to {float(reference):.2g} of its norm" in message


def test_the_soup_is_rounded_to_the_dtype_of_the_release(series: Path) -> None:
    for seed in (1, 2, 3):
        write(series / f"end-{seed}-step9", **parts(seed, torch.float32))
    exact = {k: v.to(torch.bfloat16) for k, v in mean(torch.float32).items() if k != "ids"}
    write(series / "main", **exact, ids=torch.arange(5))
    found = compare_weights(release_in(series))
    assert (found.dtype, found.beyond) == ("bf16", 0)
    assert found.ulps <= 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"c": torch.ones(2)}, "`c` is in `main` and not in `end-1-step9`"),
        ({"b": torch.ones(3)}, "`b` is [3] in `main` and [50] in `end-1-step9`"),
        ({"ids": torch.arange(1, 6)}, "`ids` holds whole numbers that differ"),
    ],
)
def test_what_cannot_be_compared_is_said_by_name(
    series: Path, change: dict[str, torch.Tensor], said: str
) -> None:
    write(series / "main", **{**mean(), **change})
    level, _, message = said_of(series)
    assert (level, message) == ("warn", f"`main` cannot be compared with {SOUP}: {said}")


def test_one_soup_that_fits_is_enough(series: Path) -> None:
    more = "soups:\n- {label: other, target: main, of: [end-1-step9, end-2-step9]}\n- "
    (series / "qaudit-family.yaml").write_text(
        FAMILY.replace("soups: [", more).rstrip().removesuffix("]")
    )
    releases = find_releases(Recipe((), ()), find_checkpoints(series)).subjects
    assert [r.label for r in releases] == ["other rebuilt", "main rebuilt"]
    findings = released_findings([(r, compare_weights(r)) for r in releases])
    assert [f.level for f in findings] == ["info", "info"]
    assert "differs from the mean of `end-1-step9` and `end-2-step9`" in findings[0].message


def test_weights_that_change_meanwhile_are_refused(series: Path) -> None:
    release = release_in(series)
    write(series / "main", **parts(5))
    with pytest.raises(SourceError, match="`main` have changed since"):
        compare_weights(release)


# ------------------------------------------------------------------------------- what is compared


def names(releases: tuple[Subject, ...]) -> Iterator[list[str]]:
    return ([c.label for c, _ in release.members] for release in releases)


def test_a_release_and_all_of_its_ingredients_have_to_be_there(series: Path) -> None:
    every = find_checkpoints(series)
    whole = find_releases(Recipe((), ()), every)
    assert list(names(whole.subjects)) == [["main", "end-1-step9", "end-2-step9", "end-3-step9"]]
    assert [s for _, s in whole.subjects[0].members] == [1.0, 1 / 3, 1 / 3, 1 / 3]
    assert "one more reading of" in whole.notes[0]
    for gone in every:
        rest = [c for c in every if c is not gone]
        assert find_releases(Recipe((), ()), rest).subjects == ()


def test_a_soup_that_nobody_released_is_proposed_unless_soups_were_asked_for(series: Path) -> None:
    (series / "qaudit-family.yaml").write_text(FAMILY.replace("target: main, ", ""))
    every = find_checkpoints(series)
    assert find_releases(Recipe((), ()), every).notes == (
        "the makers' soup of `end-1-step9`, `end-2-step9` and `end-3-step9` can be measured too: "
        "`--soup 'main=mean(end-1-step9+end-2-step9+end-3-step9)'`",
    )
    assert find_releases(Recipe((), (), soups=("last:2",)), every).notes == ()


def test_a_release_in_another_repository_is_found_with_its_weights() -> None:
    def revision(repo: str, name: str) -> Checkpoint:
        (shape,) = find_checkpoints("demo")[:1]
        ref = replace(shape.ref, location=repo, revision=name)
        return replace(shape, ref=ref, label=name, commit="0" * 40, family="smollm3")

    series = [
        revision("HuggingFaceTB/SmolLM3-3B-checkpoints", "it-soup-APO"),
        replace(revision("HuggingFaceTB/SmolLM3-3B-checkpoints", "it-LC-expert"), files=()),
        revision("HuggingFaceTB/SmolLM3-3B", "main"),
    ]
    assert find_releases(Recipe((), ()), series).subjects == ()  # a member without weights
    series[1] = replace(series[1], files=series[0].files)
    found = find_releases(Recipe((), ()), series)
    (release,) = found.subjects
    assert [(c.label, share) for c, share in release.members[1:]] == [
        ("it-soup-APO", 0.9),
        ("it-LC-expert", 0.1),
    ]
    assert release.first.ref.location == "HuggingFaceTB/SmolLM3-3B"
    assert "is inferred: its makers merged 0.9" in found.notes[0]


# ------------------------------------------------------------------------------------ what is kept


def test_a_result_is_found_again_by_content(series: Path, tmp_path: Path) -> None:
    release = release_in(series)
    found = compare_weights(release)
    assert compare_stored(release, tmp_path) is None
    store_difference(release, found, tmp_path)
    assert compare_stored(release, tmp_path) == found
    assert not list(tmp_path.rglob("*.partial"))
    write(series / "end-2-step9", **parts(9))
    other = release_in(series)
    assert key_of(other) != key_of(release)
    assert compare_stored(other, tmp_path) is None


@pytest.mark.parametrize("damage", ["", "{}", "[]", '{"key": "x", "difference": {}}'])
def test_a_damaged_result_is_as_good_as_none(series: Path, tmp_path: Path, damage: str) -> None:
    release = release_in(series)
    store_difference(release, WeightDifference(ulps=1), tmp_path)
    (path,) = tmp_path.rglob("released/*.json")
    path.write_text(damage)
    assert compare_stored(release, tmp_path) is None
