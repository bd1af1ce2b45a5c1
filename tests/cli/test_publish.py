"""`qaudit publish`: what a person sees, what is asked of the Hub, and where the token goes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.house.test_without_torch import COMMAND, run
from tests.support.cli import Run, refused
from tests.support.hub import Hub, Serve
from tests.support.saved_audits import save

TOKEN = "hf_bobs_own_secret"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "out"
    save(folder)
    return folder


@pytest.fixture
def hub(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    place = tmp_path / "root" / "alice" / "m" / "main"
    place.mkdir(parents=True)
    (place / "README.md").write_text("---\nlicense: mit\n---\n# M\x1b[31m\n")
    hub = serve(tmp_path / "root", tokens={TOKEN: "bob"})
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return hub


def test_a_dry_run_sums_up_files_and_writes_nothing(hub: Hub, saved: Path, qaudit: Run) -> None:
    done = qaudit("publish", saved, "alice/m", "--dry-run")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0] == f"would open a pull request at {hub.url}/alice/m/discussions"
    (line,) = (line for line in lines if line.startswith("qaudit/audit.json "))
    assert line.split()[1:] == [f"{(saved / 'audit.json').stat().st_size:,}", "new"]
    evidence = list((saved / "evidence").glob("*.npz"))
    (line,) = (line for line in lines if line.startswith("qaudit/evidence/"))
    assert len(evidence) > 4
    assert line.startswith(f"qaudit/evidence/ ({len(evidence)} files) ")
    assert line.split()[-2:] == [f"{sum(p.stat().st_size for p in evidence):,}", "new"]
    assert "+++ README.md" in lines
    assert "+tags:" in lines
    assert "+<!-- qaudit:begin -->" in lines
    assert " license: mit" in lines  # around the change
    assert any(line.startswith("note: nothing is written to `.eval_results/`") for line in lines)
    assert "\x1b" not in done.out
    assert {entry["method"] for entry in hub.log} == {"GET"}
    assert hub.repos["alice/m"].discussions == []


def test_a_dry_run_needs_no_account_and_says_what_that_leaves_out(
    hub: Hub, saved: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    done = qaudit("publish", saved, "alice/m", "--dry-run", "--json")
    told = json.loads(done.out)
    assert told["url"] is None
    assert {f["state"] for f in told["files"]} == {"new", "changed"}
    paths = {f["path"] for f in told["files"]}
    assert {f"qaudit/evidence/{p.name}" for p in (saved / "evidence").glob("*.npz")} <= paths
    assert "+<!-- qaudit:begin -->" in told["readme_diff"].splitlines()
    assert "not logged in" in qaudit("publish", saved, "alice/m", "--dry-run").out


def test_the_address_goes_to_stdout_and_a_second_run_finds_it(
    hub: Hub, saved: Path, qaudit: Run
) -> None:
    url = f"{hub.url}/alice/m/discussions/1"
    done = qaudit("publish", saved, "alice/m")
    assert (done.code, done.out) == (0, f"opened: {url}\n")
    assert "registered benchmarks" in done.err
    again = qaudit("publish", saved / "audit.json", "hf://alice/m", "-q")
    assert (again.code, again.out, again.err) == (0, f"already open: {url}\n", "")
    shown = qaudit("publish", saved, "alice/m", "--dry-run")
    assert shown.out.startswith(f"already open: {url}\n")
    told = json.loads(qaudit("publish", saved, "alice/m", "--json", "-q").out)
    assert (told["state"], told["url"]) == ("already open", url)


def test_a_published_audit_is_published_again_from_its_repository(
    hub: Hub, saved: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = {path.stem: path.read_text(encoding="utf-8") for path in saved.glob("plots/*[!k].svg")}
    monkeypatch.setattr("qaudit.hub.publish.figures", lambda audit, folder: drawn)
    qaudit("publish", saved, "alice/m")
    hub.repos["alice/m"].branches["main"] = hub.repos["alice/m"].branches["refs/pr/1"]
    done = qaudit("publish", "alice/m@main", "alice/m", "--dry-run", "--json")
    assert {f["state"] for f in json.loads(done.out)["files"]} == {"unchanged"}


def test_the_token_is_nowhere_but_in_requests_to_the_hub(
    hub: Hub, saved: Path, qaudit: Run, tmp_path: Path
) -> None:
    hub.faults = [{"match": "PUT /cdn", "status": 503, "times": 1, "headers": {"Retry-After": "0"}}]
    for arguments in ((), ("--json",), ("--dry-run",)):
        done = qaudit("publish", saved, "alice/m", *arguments)
        assert TOKEN not in done.out + done.err
    assert hub.leaks == []
    assert {entry["auth"] for entry in hub.log if entry["cdn"]} == {False}
    for folder in (tmp_path, saved, Path(os.environ["QAUDIT_CACHE"])):
        for path in folder.rglob("*"):
            assert not path.is_file() or TOKEN.encode() not in path.read_bytes()
    repo = hub.repos["alice/m"]
    assert TOKEN not in json.dumps(repo.discussions)
    for blob in repo.commits[repo.branches["refs/pr/1"]].files.values():
        assert TOKEN.encode() not in b"".join(blob.contents.read(0, blob.nbytes))


@pytest.mark.parametrize(
    ("repo", "sentence"),
    [
        ("m", "`m` is no name of a repository"),
        ("alice/m@v1", "`alice/m@v1` names a revision"),
        ("../m", "is no name of a repository"),
        ("alice/m/deeper", "is no name of a repository"),
    ],
)
def test_what_is_no_repository_is_refused_before_anything_is_read(
    hub: Hub, qaudit: Run, repo: str, sentence: str
) -> None:
    refused(qaudit("publish", "nothing-here", repo), 2, sentence, "write `org/name`")
    assert hub.log == []


def test_evidence_that_was_changed_costs_no_request(
    hub: Hub, saved: Path, qaudit: Run, tmp_path: Path
) -> None:
    save(tmp_path / "bad", documents=12)
    path = next((tmp_path / "bad" / "evidence").glob("*.npz"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    done = qaudit("publish", "bad", "alice/m")
    refused(done, 4, "is not the evidence that the audit was made from", "again")
    assert hub.log == []


def test_an_audit_that_is_not_there_is_refused(hub: Hub, qaudit: Run) -> None:
    refused(qaudit("publish", "qaudit-out", "alice/m"), 2, "there is no audit at", "qaudit scan")


def test_publishing_needs_no_torch(hub: Hub, saved: Path) -> None:
    done = run(COMMAND, "publish", str(saved), "alice/m", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "would open" in done.stdout
