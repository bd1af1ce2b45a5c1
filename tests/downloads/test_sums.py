"""Who is added to a sum, and what a scan keeps of the sums it finds."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qaudit.checkpoints.folder import find_all
from qaudit.checkpoints.places import folder_of
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.downloads.running_sum import Sums
from qaudit.engine.measure import open_weights
from qaudit.errors import SourceError
from qaudit.recipe.soups import resolve_soups
from qaudit.types import Recipe, Subject
from tests.support.models import save_model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for seed, step in enumerate((1, 2, 3)):
        save_model(tmp_path / "run" / f"step{step}", seed)
    return tmp_path / "run"


@pytest.fixture
def sums(tmp_path: Path) -> Sums:
    return Sums(tmp_path / "sums")


def soup_of(run: Path, text: str = "step*") -> Subject:
    (soup,) = resolve_soups(Recipe((str(run),), (), soups=(text,)), find_all([str(run)]))
    return soup


def add_all(sums: Sums, soup: Subject) -> None:
    for member, _ in soup.members:
        sums.add(soup, member, folder_of(member))


@pytest.mark.parametrize("text", ["step*", "0.75*step1+0.25*step3", "ema:decay=0.5", "last:2"])
def test_what_is_summed_up_is_what_is_merged_as_it_is_read(
    run: Path, sums: Sums, text: str
) -> None:
    soup = soup_of(run, text)
    add_all(sums, soup)
    merged, beside = sums.weights(soup), open_weights(soup, allow_pickle=False)
    assert merged.names() == list(beside.names())
    assert all(torch.equal(merged.read(name), beside.read(name)) for name in beside.names())
    stored = WeightFolder(folder_of(soup.first))
    assert merged.nbytes == sum(stored.read(name).nbytes for name in stored.names())


def test_a_member_of_another_architecture_is_refused_before_it_is_added(
    run: Path, sums: Sums
) -> None:
    path = run / "step2" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.25}))
    soup = soup_of(run)
    with pytest.raises(SourceError, match=r"`rms_norm_eps` is 1e-06 in one .* and 0.25 in the"):
        add_all(sums, soup)
    assert sums.of(soup).added == 1


def test_a_folder_that_changes_while_it_is_added_leaves_no_sum(
    run: Path, sums: Sums, monkeypatch: pytest.MonkeyPatch
) -> None:
    soup = soup_of(run)
    (first, _), (second, _), *_ = soup.members
    sums.add(soup, first, folder_of(first))
    really = WeightFolder.read

    def changing(self: WeightFolder, name: str) -> torch.Tensor:
        tensor = really(self, name)
        save_model(folder_of(second), 7)
        monkeypatch.setattr(WeightFolder, "read", really)
        return tensor

    monkeypatch.setattr(WeightFolder, "read", changing)
    with pytest.raises(SourceError, match="the weights of `step2` have changed"):
        sums.add(soup, second, folder_of(second))
    assert not sums.of(soup).exists


def test_soups_of_equal_members_under_two_labels_have_a_sum_each(run: Path, sums: Sums) -> None:
    one = soup_of(run)
    other = replace(one, label="other")
    assert one.content == other.content
    add_all(sums, one)
    add_all(sums, other)
    sums.remove(one)
    assert sums.of(other).added == len(other.members)


def test_only_the_sums_of_these_soups_are_kept(run: Path, sums: Sums) -> None:
    one, other = soup_of(run, "step1+step2"), soup_of(run, "step1+step3")
    add_all(sums, one)
    add_all(sums, other)
    sums.keep([one])
    assert (sums.of(one).exists, sums.of(other).exists) == (True, False)
    sums.keep([])
    assert not sums.folder.exists()
    sums.keep([one])  # where there is no folder there is nothing to remove


def test_only_sums_can_be_summed_up_and_no_member_twice(run: Path, sums: Sums) -> None:
    assert sums.can_sum(soup_of(run))
    assert not sums.can_sum(soup_of(run, "slerp:t=0.5(step1+step2)"))
    assert not sums.can_sum(soup_of(run, "stock(step1+step2+step3)"))
    shutil.rmtree(run / "step3")
    shutil.copytree(run / "step1", run / "step3")
    one, twin = (c for c in find_all([str(run)]) if c.label != "step2")
    assert not sums.can_sum(Subject("twice", ((one, 0.5), (twin, 0.5)), "mean"))
