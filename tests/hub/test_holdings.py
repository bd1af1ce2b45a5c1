"""What the shared cache holds, and taking away what we brought and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir
from typer.testing import CliRunner

from qaudit.checkpoints.places import folder_of
from qaudit.cli.app import app
from qaudit.errors import UsageError
from qaudit.hub.holdings import holdings, leftovers, nbytes_on_disk, remove
from tests.support.fetching import REPO, Desk

run = CliRunner()


def fetched(desk: Desk, revision: str = "step1") -> Path:
    checkpoint = desk.checkpoint(revision)
    desk.fetcher.settings(checkpoint)
    desk.fetcher.weights(checkpoint)
    desk.fetcher._claims.release(
        next(iter(desk.fetcher._claims._handles))
    )  # as if the scan had ended
    return folder_of(checkpoint)


def test_what_is_listed_is_what_the_client_itself_finds(desk: Desk, cache: Path) -> None:
    fetched(desk)
    (held,) = holdings()
    (theirs,) = next(iter(scan_cache_dir(cache).repos)).revisions
    assert (held.repo, held.commit) == (REPO, theirs.commit_hash)
    assert held.nbytes == held.nbytes_downloaded == theirs.size_on_disk == nbytes_on_disk([held])


def test_what_we_brought_goes_and_what_others_brought_stays(desk: Desk, cache: Path) -> None:
    folder = fetched(desk)
    blob = (folder / "config.json").resolve()
    text = blob.read_bytes()
    blob.unlink()
    blob.write_bytes(text)  # another file now: as if another tool had fetched it
    (held,) = holdings()
    assert held.nbytes_downloaded == held.nbytes - len(text)
    assert remove(held) == held.nbytes_downloaded
    assert blob.read_bytes() == text
    assert [path.name for path in blob.parent.iterdir()] == [blob.name]


def test_what_a_scan_uses_stays(desk: Desk, cache: Path) -> None:
    checkpoint = desk.checkpoint("step1")
    folder = desk.fetcher.weights(checkpoint)  # and its claim is held
    (held,) = holdings()
    assert remove(held) is None
    assert (folder / "model.safetensors").is_file()


def test_broken_off_downloads_are_found_and_pruned(desk: Desk, cache: Path) -> None:
    fetched(desk)
    half = holdings()[0].cache.partial("0" * 64)
    half.write_bytes(b"half")
    assert leftovers() == (half,)
    assert "would remove" in run.invoke(app, ["cache", "prune", "--dry-run"]).stdout
    assert half.exists()
    assert "removed" in run.invoke(app, ["cache", "prune"]).stdout
    assert not half.exists()
    assert len(holdings()) == 1


def test_the_command_removes_a_revision_by_name_only_when_told_to(desk: Desk, cache: Path) -> None:
    fetched(desk)
    looked = run.invoke(app, ["cache", "rm", REPO, "--dry-run"])
    assert looked.exit_code == 0
    assert REPO in looked.stdout
    assert len(holdings()) == 1
    asked = run.invoke(app, ["cache", "rm", REPO])
    assert asked.exit_code != 0  # nobody is there to ask
    gone = run.invoke(app, ["cache", "rm", f"{REPO}@{holdings()[0].commit[:7]}", "--yes"])
    assert gone.exit_code == 0
    assert holdings() == ()
    assert run.invoke(app, ["cache", "ls"]).stdout.startswith("nothing")


def test_a_revision_that_names_several_commits_is_refused(
    desk: Desk, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched(desk)
    (held,) = holdings()
    both = tuple(replace(held, commit=prefix + held.commit[1:]) for prefix in ("5a", "5b"))
    monkeypatch.setattr("qaudit.hub.holdings.holdings", lambda: both)
    monkeypatch.setattr("qaudit.hub.holdings.remove", lambda holding: 1 // 0)
    answer = run.invoke(app, ["cache", "rm", f"{REPO}@5", "--yes"])
    assert isinstance(answer.exception, UsageError)
    assert "`5` of" in answer.exception.message
    assert "names several commits" in answer.exception.message
    assert both[0].commit[:12] in answer.exception.hint


@pytest.mark.parametrize("target", ["nobody/nothing", f"{REPO}@0000000", "../../etc"])
def test_what_is_not_there_is_refused(target: str, desk: Desk, cache: Path) -> None:
    fetched(desk)
    answer = run.invoke(app, ["cache", "rm", target, "--yes"])
    assert answer.exit_code != 0
    assert len(holdings()) == 1
