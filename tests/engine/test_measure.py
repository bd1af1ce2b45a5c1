"""One subject on this machine: what is found, what is measured, and what is refused."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import qaudit.engine.measure
from qaudit.checkpoints.stamps import folder_of
from qaudit.core.registry import parse_schemes
from qaudit.engine.measure import measure
from qaudit.engine.tasks import Task, look_up
from qaudit.errors import SourceError
from qaudit.saved.results import ResultStore
from qaudit.types import Checkpoint, Ref, Subject
from tests.support.filled import filled
from tests.support.measured import MACHINE, corpus
from tests.support.models import save_model
from tests.support.series import find_checkpoints


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    (found,) = find_checkpoints(save_model(tmp_path / "step10", 0))
    return found


def task(checkpoint: Checkpoint, **more: Any) -> Task:
    subject = Subject(checkpoint.label, ((checkpoint, 1.0),))
    return replace(Task.unplanned(subject, corpus(), parse_schemes(["rtn-4bit"])), **more)


def file_of(checkpoint: Checkpoint) -> Path:
    return Path(checkpoint.ref.location) / "model.safetensors"


def write_other_weights(path: Path) -> None:
    tensors = load_file(path)
    save_file({k: t.neg() for k, t in tensors.items()}, path, metadata={"format": "pt"})


def test_what_is_on_disk_is_found_without_the_weights(
    checkpoint: Checkpoint, store: ResultStore
) -> None:
    assert not look_up(task(checkpoint), MACHINE, store).is_complete
    measured = measure(task(checkpoint), MACHINE, store)
    file_of(checkpoint).unlink()
    standing = look_up(task(checkpoint), MACHINE, store)
    assert standing.is_complete
    found = measure(task(checkpoint), MACHINE, store)
    assert [f.path for f in found] == [f.path for f in measured]


def test_equal_weights_may_lie_in_another_place(
    checkpoint: Checkpoint, store: ResultStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    here = Path(checkpoint.ref.location)
    twin = Checkpoint(Ref("org/twin", "v1"), "twin", checkpoint.files, commit=40 * "a")
    folder_of(twin).mkdir(parents=True)
    shutil.copy(here / "config.json", folder_of(twin))
    whole = measure(task(checkpoint), MACHINE, ResultStore(tmp_path / "other"))
    found = measure(task(twin, folder=lambda _: here), MACHINE, store)
    for a, b in zip(whole, found, strict=True):
        sums = a.measurement.evidence.nll_sum, b.measurement.evidence.nll_sum
        np.testing.assert_array_equal(*sums)


def test_weights_that_changed_since_the_plan_are_refused(
    checkpoint: Checkpoint, store: ResultStore
) -> None:
    write_other_weights(file_of(checkpoint))
    with pytest.raises(SourceError, match="`step10` have changed since the audit was planned"):
        measure(task(checkpoint), MACHINE, store)


@pytest.mark.parametrize("change", [write_other_weights, Path.unlink], ids=["other", "gone"])
def test_weights_that_change_while_they_are_measured_give_no_number(
    checkpoint: Checkpoint,
    store: ResultStore,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
) -> None:
    really = qaudit.engine.measure.send

    def changed(*args: Any) -> Any:
        measured = really(*args)
        change(file_of(checkpoint))
        return measured

    monkeypatch.setattr("qaudit.engine.measure.send", changed)
    with pytest.raises(SourceError, match="`step10` have changed since the audit was planned"):
        measure(task(checkpoint), MACHINE, store)
    assert not look_up(task(checkpoint), MACHINE, store).files


def test_a_measurement_names_the_hashes_of_the_files_that_were_read(
    checkpoint: Checkpoint, store: ResultStore
) -> None:
    weights = file_of(checkpoint)
    hashes = {
        f"step10/{name}": hashlib.sha256(weights.with_name(name).read_bytes()).hexdigest()
        for name in (weights.name, "config.json")
    }
    for filed in filled(measure(task(checkpoint), MACHINE, store)):
        assert filed.measurement.weights_sha256 == hashes
    for spec, filed in filled(look_up(task(checkpoint), MACHINE, store).files.items()):
        assert filed.measurement.weights_sha256 == hashes, spec


def test_weights_without_a_hash_are_refused_with_what_is_wrong(
    checkpoint: Checkpoint, store: ResultStore
) -> None:
    bare = Checkpoint(checkpoint.ref, "step10")
    with pytest.raises(SourceError, match="could not be read when the audit was planned"):
        look_up(task(bare), MACHINE, store)
    file_of(checkpoint).write_bytes(b"oops")
    with pytest.raises(SourceError, match="cut short"):
        look_up(task(bare), MACHINE, store)
