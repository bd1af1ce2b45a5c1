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


FILES = ("config.json", "model.safetensors", "model.safetensors.index.json", "trainer_state.json")


@pytest.mark.parametrize(
    ("name", "command", "codes"),
    [
        *(
            ("named.yaml", f"model --set {key}=named.yaml --dry-run", (2,))
            for key in ("policy", "evaluation", "choices")
        ),
        ("recipe.yaml", "recipe.yaml --dry-run", (2,)),
        *((f"model/{name}", "model --dry-run", (4,)) for name in FILES[:2]),
        *(
            (f"model/{name}", "model --dry-run", (0,))
            for name in (*FILES[2:], "qaudit-family.yaml")
        ),
        *(
            (f"shipped/{name}", "model --shipped shipped --dry-run", (0, 2, 4))
            for name in (*FILES[:2], "tokenizer.json", "quantize_config.json")
        ),
        ("model/tokenizer.json", "model", (2, 4)),
    ],
)
def test_a_fifo_in_place_of_a_file_is_not_waited_for(
    place: Path, qaudit: Run, name: str, command: str, codes: tuple[int, ...]
) -> None:
    (place / name).unlink(missing_ok=True)
    os.mkfifo(place / name)
    done = qaudit("scan", *QUICK, *command.split())
    assert done.code in codes, done.err
    assert "bug of qaudit" not in done.err
    assert "did you mean `named.yaml`" not in done.err


def test_links_to_regular_files_are_read(place: Path, qaudit: Run) -> None:
    for name in ("config.json", "model.safetensors"):
        (place / "model" / name).rename(place / name)
        (place / "model" / name).symlink_to(place / name)
    done = qaudit("scan", "model", *QUICK, "--dry-run")
    assert done.code == 0, done.err
