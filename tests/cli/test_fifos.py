"""FIFOs in place of files: each is refused or left alone, and none is waited for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.cli import QUICK, Run
from tests.support.models import save_model, save_tokenizer, write_documents
from tests.support.quantized import quantized_copy


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fifos")
    save_model(root / "model", 1)
    save_tokenizer(root / "model")
    quantized_copy(root / "model", root / "shipped", "gptq", bits=4)
    write_documents(root / "calibration.jsonl", range(100, 104))
    write_documents(root / "evaluation.jsonl", range(200, 212))
    return root


@pytest.fixture
def place(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(shelf, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize("key", ["policy", "evaluation", "choices"])
def test_a_file_that_a_setting_names(place: Path, qaudit: Run, key: str) -> None:
    fifo(place / "named.yaml")
    done = qaudit("scan", "model", *QUICK, "--set", f"{key}=named.yaml", "--dry-run")
    assert done.code == 2, done.err
    assert "did you mean `named.yaml`" not in done.err


def test_a_recipe(place: Path, qaudit: Run) -> None:
    fifo(place / "recipe.yaml")
    assert qaudit("scan", "recipe.yaml", "--dry-run").code == 2


FILES = ("config.json", "model.safetensors", "model.safetensors.index.json", "trainer_state.json")


@pytest.mark.parametrize("name", [*FILES, "qaudit-family.yaml"])
def test_a_file_of_a_checkpoint(place: Path, qaudit: Run, name: str) -> None:
    fifo(place / "model" / name)
    done = qaudit("scan", "model", *QUICK, "--dry-run")
    assert "bug of qaudit" not in done.err
    assert done.code == (4 if name in FILES[:2] else 0), done.err


@pytest.mark.parametrize("name", [*FILES[:2], "tokenizer.json", "quantize_config.json"])
def test_a_file_of_a_shipped_checkpoint(place: Path, qaudit: Run, name: str) -> None:
    fifo(place / "shipped" / name)
    done = qaudit("scan", "model", *QUICK, "--shipped", "shipped", "--dry-run")
    assert "bug of qaudit" not in done.err
    assert done.code in (0, 2, 4)


def test_a_tokenizer(place: Path, qaudit: Run) -> None:
    fifo(place / "model" / "tokenizer.json")
    done = qaudit("scan", "model", *QUICK)
    assert "bug of qaudit" not in done.err
    assert done.code in (2, 4), done.err


def test_links_to_regular_files_are_read(place: Path, qaudit: Run) -> None:
    for name in ("config.json", "model.safetensors"):
        (place / "model" / name).rename(place / name)
        (place / "model" / name).symlink_to(place / name)
    done = qaudit("scan", "model", *QUICK, "--dry-run")
    assert done.code == 0, done.err
