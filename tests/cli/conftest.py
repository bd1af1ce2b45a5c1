"""A tiny series on disk, text to measure it on, and the command line run in this process."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cli import AUDITED, QUICK, ROUNDED, STEPS, Outcome, Run, run_in, settings
from tests.support.hub import Hub, Serve
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


@pytest.fixture(scope="session")
def after(shipped: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that runs commands in a copy of `shipped`, once; tests only read it."""

    @functools.cache
    def run(*commands: tuple[object, ...]) -> Path:
        folder = shutil.copytree(shipped, tmp_path_factory.mktemp("after") / "place")
        assert [run_in(folder, *command) for command in commands] == [0] * len(commands)
        return folder

    return run


@pytest.fixture(scope="session")
def audited(after: Callable[..., Path]) -> Path:
    """Return a folder with an audit of the series and a soup in `out`, and an export in `new`."""
    export = ("export", "out", "--subject", "step200", "--scheme", ROUNDED, "--out", "new", "-q")
    return after(("scan", *AUDITED, "-q"), export)


@pytest.fixture(scope="session")
def scanned(after: Callable[..., Path]) -> Path:
    """Return a folder like `shipped` with what a scan of its series left in `out`."""
    return after(("scan", *QUICK, "series"))


@pytest.fixture
def exported(audited: Path, place: Path) -> Path:
    """Return a folder that was exported from the audit in `out`; both are the test's own."""
    for name in ("out", "new"):
        shutil.copytree(audited / name, place / name)
    return place / "new"


@pytest.fixture
def finished(scanned: Path, place: Path) -> Path:
    """Return an output folder of a finished scan of the series."""
    return shutil.copytree(scanned / "out", place / "out")


@pytest.fixture
def serve_root(online: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Hub]:
    """Return a function that serves the folders of `online/root`, whose revisions are branches."""

    def start(**values: object) -> Hub:
        (online / "root").mkdir(exist_ok=True)
        for folder in (online / "root").glob("[!d]*/*"):
            if not (folder / "repo.json").exists():
                settings(folder, branch_per_revision=True, **values)
        hub = serve(online / "root")
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        return hub

    return start


@pytest.fixture
def place(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with a copy of the series and the text of one's own."""
    folder = tmp_path / "place"
    shutil.copytree(shipped, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def scan(place: Path, qaudit: Run) -> Run:
    """Return a function that scans in `place`, with one cheap scheme and short text."""

    def run(*arguments: object, **expected: int) -> Outcome:
        return qaudit("scan", *QUICK, *arguments, **expected)

    return run


@pytest.fixture
def pictures() -> None:
    """Draw pictures in this test; most do without."""


@pytest.fixture(autouse=True)
def _few_pictures(request: pytest.FixtureRequest) -> None:
    if "pictures" not in request.fixturenames:
        request.getfixturevalue("without_pictures")
