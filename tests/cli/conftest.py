"""A tiny series on disk, text to measure it on, and the command line run in this process."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qaudit.cli import main
from qaudit.hub.client import Client
from qaudit.hub.fetch import Fetcher
from tests.support.cli import QUICK, STEPS, Outcome, Run
from tests.support.models import save_model, save_tokenizer, write_documents


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a series and its text. Read it; whoever breaks things uses `place`."""
    root = tmp_path_factory.mktemp("shipped")
    for seed, step in enumerate(STEPS):
        save_tokenizer(save_model(root / "series" / f"step{step}", seed))
    write_documents(root / "calibration.jsonl", range(100, 104))
    write_documents(root / "evaluation.jsonl", range(200, 212))
    return root


@pytest.fixture
def place(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with a copy of the series and the text of one's own."""
    folder = tmp_path / "place"
    shutil.copytree(shipped, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def qaudit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Return a function that runs the command line with arguments, in this process."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["qaudit", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        code = left.value.code
        assert "Traceback" not in said.err + said.out
        return Outcome(code if isinstance(code, int) else int(bool(code)), said.out, said.err)

    return run


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing: pictures are two thirds of a tiny scan's time."""
    monkeypatch.setattr("qaudit.report.folder.write", lambda audit, folder: None)


@pytest.fixture
def scan(place: Path, qaudit: Run) -> Run:
    """Return a function that scans in `place`, with one cheap scheme and short text."""

    def run(*arguments: object) -> Outcome:
        return qaudit("scan", *QUICK, *arguments)

    return run


@pytest.fixture
def online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the home of someone who has a network, no token and empty caches."""
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING", "TRANSFORMERS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("QAUDIT_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    for waits in (Client.__init__, Fetcher.__init__):
        monkeypatch.setitem(waits.__kwdefaults__, "pause", lambda seconds: None)
    return tmp_path
