"""A tiny series on disk, text to measure it on, and the command line run in this process."""

import functools
import shutil

import pytest

from qaudit.saved.audits import to_json
from tests.support import sample
from tests.support.cli import AUDITED, QUICK, ROUNDED, STEPS, run_in, settings
from tests.support.models import save_model, save_tokenizer, write_documents


@pytest.fixture(scope="session")
def shipped(tmp_path_factory):
    """Return a folder with a series and its text. Read it; whoever breaks things uses `place`."""
    root = tmp_path_factory.mktemp("shipped")
    for seed, step in enumerate(STEPS):
        save_tokenizer(save_model(root / "series" / f"step{step}", seed))
    write_documents(root / "calibration.jsonl", range(100, 104))
    write_documents(root / "evaluation.jsonl", range(200, 212))
    return root


@pytest.fixture(scope="session")
def after(shipped, tmp_path_factory):
    """Return a function that runs commands in a copy of `shipped`, once; tests only read it."""

    @functools.cache
    def run(*commands):
        folder = shutil.copytree(shipped, tmp_path_factory.mktemp("after") / "place")
        assert [run_in(folder, *command) for command in commands] == [0] * len(commands)
        return folder

    return run


@pytest.fixture(scope="session")
def audited(after):
    """Return a folder with an audit of the series and a soup in `out`, and an export in `new`."""
    export = ("export", "out", "--subject", "step200", "--scheme", ROUNDED, "--out", "new", "-q")
    return after(("scan", *AUDITED, "-q"), export)


@pytest.fixture(scope="session")
def scanned(after):
    """Return a folder like `shipped` with what a scan of its series left in `out`."""
    return after(("scan", *QUICK, "series"))


@pytest.fixture
def exported(audited, place):
    """Return a folder that was exported from the audit in `out`; both are the test's own."""
    for name in ("out", "new"):
        shutil.copytree(audited / name, place / name)
    return place / "new"


@pytest.fixture
def finished(scanned, place):
    """Return an output folder of a finished scan of the series."""
    return shutil.copytree(scanned / "out", place / "out")


@pytest.fixture
def serve_root(online, serve, monkeypatch):
    """Return a function that serves the folders of `online/root`, whose revisions are branches."""

    def start(**values):
        (online / "root").mkdir(exist_ok=True)
        for folder in (online / "root").glob("[!d]*/*"):
            if not (folder / "repo.json").exists():
                settings(folder, branch_per_revision=True, **values)
        hub = serve(online / "root")
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        return hub

    return start


@pytest.fixture
def place(shipped, tmp_path, monkeypatch):
    """Return a working directory with a copy of the series and the text of one's own."""
    folder = tmp_path / "place"
    shutil.copytree(shipped, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def scan(place, qaudit):
    """Return a function that scans in `place`, with one cheap scheme and short text."""

    def run(*arguments, **expected):
        return qaudit("scan", *QUICK, *arguments, **expected)

    return run


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Return a working directory with a saved audit in `out`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "audit.json").write_text(to_json(sample.audit()), encoding="utf-8")
    return tmp_path


@pytest.fixture
def pictures():
    """Draw pictures in this test; most do without."""


@pytest.fixture(autouse=True)
def _few_pictures(request):
    if "pictures" not in request.fixturenames:
        request.getfixturevalue("without_pictures")
