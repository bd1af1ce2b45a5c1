"""`qaudit publish` and `export --push`: what a person sees, and what is asked of a Hub."""

import json
import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from qaudit.saved.exports import read_export
from tests.house.test_without_torch import COMMAND, run
from tests.support.cli import ROUNDED, TEXT, refused
from tests.support.filled import filled
from tests.support.saved_audits import save

TOKEN = "hf_bobs_own_secret"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "out"
    save(folder)
    return folder


@pytest.fixture
def hub(serve, shipped, tmp_path, monkeypatch):
    main = tmp_path / "root" / "alice" / "m" / "main"
    main.mkdir(parents=True)
    (main / "README.md").write_text("---\nlicense: mit\n---\n# M\x1b[31m\n")
    (main / "qaudit-export.json").write_text("{}")
    (main / "model-00001-of-00002.safetensors").write_bytes(b"of an earlier export")
    base = tmp_path / "root" / "alice" / "base" / "main"
    shutil.copytree(shipped / "series" / "step200", base)
    about = "license: apache-2.0  # of the base\ndatasets: [o/text, o/more]\nwidget: [{a: b}]"
    (base / "README.md").write_text(f"---\n{about}\n---\n")
    hub = serve(tmp_path / "root", tokens={TOKEN: "bob", "hf_reader": "bob:read"})
    for name, value in (("ENDPOINT", hub.url), ("HUB_OFFLINE", "0"), ("TOKEN", TOKEN),
                        ("HUB_CACHE", str(tmp_path / "cache"))):  # fmt: skip
        monkeypatch.setenv(f"HF_{name}", value)
    monkeypatch.chdir(tmp_path)
    return hub


def files_of(hub, branch):
    repo = hub.repos["alice/m"]
    files = repo.commits[repo.branches[branch]].files
    return {path: one.whole() for path, one in files.items()}


def test_a_dry_run_lists_files_writes_nothing_and_needs_no_account(hub, saved, qaudit, monkeypatch):
    done = qaudit("publish", saved, "alice/m", "--dry-run", code=0)
    lines = done.out.splitlines()
    assert lines[0] == f"would open a pull request at {hub.url}/alice/m/discussions"
    (line,) = (line for line in lines if line.startswith("qaudit/audit.json "))
    assert line.split()[1:] == [f"{(saved / 'audit.json').stat().st_size:,}", "new"]
    evidence = list((saved / "evidence").glob("*.npz"))
    rows = [line.split() for line in lines if line.startswith("qaudit/evidence/")]
    sizes = {f"qaudit/evidence/{path.name}": path.stat().st_size for path in evidence}
    assert {row[0]: row[1:] for row in rows} == {n: [f"{s:,}", "new"] for n, s in sizes.items()}
    changes = {"+++ README.md", "+tags:", "+<!-- qaudit:begin -->", " license: mit"}
    assert changes <= set(lines)  # the last one is around the change
    assert any(line.startswith("note: nothing is written to `.eval_results/`") for line in lines)
    assert "\x1b" not in done.out
    monkeypatch.delenv("HF_TOKEN")
    assert "not logged in" in qaudit("publish", saved, "alice/m", "--dry-run").out
    told = json.loads(qaudit("publish", saved, "alice/m", "--dry-run", "--json").out)
    assert (told["url"], {f["state"] for f in told["files"]}) == (None, {"new", "changed"})
    proposed = {f["path"] for f in told["files"]}
    assert {f"qaudit/evidence/{path.name}" for path in evidence} <= proposed
    assert "+<!-- qaudit:begin -->" in told["readme_diff"].splitlines()
    assert {entry["method"] for entry in hub.log} == {"GET"}
    assert hub.repos["alice/m"].discussions == []


def test_a_request_is_found_again_and_no_token_leaks(hub, saved, qaudit, tmp_path, monkeypatch):
    hub.faults = [{"match": "PUT /cdn", "status": 503, "times": 1, "headers": {"Retry-After": "0"}}]
    url = f"{hub.url}/alice/m/discussions/1"
    done = qaudit("publish", saved, "alice/m")
    assert (done.code, done.out) == (0, f"opened: {url}\n")
    assert "registered benchmarks" in done.err
    again = qaudit("publish", saved / "audit.json", "hf://alice/m", "-q")
    assert (again.code, again.out, again.err) == (0, f"already open: {url}\n", "")
    shown = qaudit("publish", saved, "alice/m", "--dry-run")
    assert shown.out.startswith(f"already open: {url}\n")
    told = qaudit("publish", saved, "alice/m", "--json", "-q")
    assert json.loads(told.out).items() >= {"state": "already open", "url": url}.items()
    assert not [one for one in (done, shown, told) if TOKEN in one.out + one.err]
    assert (hub.leaks, {entry["auth"] for entry in hub.log if entry["cdn"]}) == ([], {False})
    for folder in (tmp_path, saved, Path(os.environ["QAUDIT_CACHE"])):
        for path in folder.rglob("*"):
            assert not path.is_file() or TOKEN.encode() not in path.read_bytes()
    assert TOKEN not in json.dumps(hub.repos["alice/m"].discussions)
    assert TOKEN.encode() not in b"".join(files_of(hub, "refs/pr/1").values())
    # A published audit is published again from its repository.
    drawn = {path.stem: path.read_text(encoding="utf-8") for path in saved.glob("plots/*[!k].svg")}
    monkeypatch.setattr("qaudit.hub.publish.figures", lambda audit, folder: drawn)
    hub.repos["alice/m"].branches["main"] = hub.repos["alice/m"].branches["refs/pr/1"]
    done = qaudit("publish", "alice/m@main", "alice/m", "--dry-run", "--json")
    assert {f["state"] for f in json.loads(done.out)["files"]} == {"unchanged"}


def test_publishing_needs_no_torch(hub, saved):
    done = run(COMMAND, "publish", str(saved), "alice/m", "--dry-run")
    assert (done.returncode, "would open" in done.stdout) == (0, True), done.stderr


# ----------------------------------------------------------------------- exports

PUSH = f"export out --subject step200 --scheme {ROUNDED} --out again --push".split()


@pytest.fixture
def written(hub, exported):
    """Return the folder that is written and pushed, of an audit beside it."""
    return exported.parent / "again"


def test_an_export_becomes_one_pull_request(hub, written, qaudit):
    url = f"{hub.url}/alice/m/discussions/1"
    done = qaudit(*PUSH, "alice/m")
    assert (done.code, done.out) == (0, f"again\nopened: {url}\n"), done.err
    paths = [path for path in written.rglob("*") if path.is_file()]
    files = {path.relative_to(written).as_posix(): path.read_bytes() for path in paths}
    proposed = files_of(hub, "refs/pr/1")
    del proposed[".gitattributes"]  # of the Hub
    assert proposed == files
    assert "# M" in files_of(hub, "main")["README.md"].decode()
    again = qaudit(*PUSH, "hf://alice/m", "-q")
    assert (again.code, again.out) == (0, f"again\nalready open: {url}\n"), again.err
    assert (len(hub.repos["alice/m"].discussions), hub.leaks) == (1, [])
    assert TOKEN not in done.out + done.err + again.out + again.err
    for data in filled(files.values()):
        assert TOKEN.encode() not in data


@pytest.mark.slow
def test_a_refused_push_keeps_the_export_and_goes_on(hub, written, qaudit, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setenv("HF_TOKEN", "hf_reader")
        refused(qaudit(*PUSH, "alice/m"), 4, "", "")
    assert hub.repos["alice/m"].discussions == []
    assert (written / "qaudit-export.json").is_file()
    monkeypatch.setattr("qaudit.export.folder.export_quantized", None)  # the folder is whole
    hub.faults = [{"match": "/commit/", "status": 403, "times": 9}]
    done = qaudit(*PUSH, "alice/m")
    assert done.code != 0
    assert TOKEN not in done.out + done.err
    hub.faults = []
    done = qaudit(*PUSH, "alice/m")
    assert (done.code, done.out.splitlines()[1].split(":")[0]) == (0, "opened"), done.err


def test_what_cannot_be_pushed_is_refused_before_any_work(hub, written, qaudit, monkeypatch):
    for repo, code, sentence, hint in (
        ("alice", 2, "no name of a repository", "org/name"),
        ("alice/m@main", 2, "names a revision", "org/name"),
        ("alice/none", 4, "alice/none", ""),
        ("alice/m", 4, "not logged in", "hf auth login"),
    ):
        if repo == "alice/m":
            monkeypatch.delenv("HF_TOKEN")
        refused(qaudit(*PUSH, repo), code, sentence, hint)
        assert not list(written.parent.glob("*again*"))


def test_a_checkpoint_of_the_hub_is_exported(hub, place, qaudit, audited):
    done = qaudit("export", "alice/base", *TEXT, "--scheme", ROUNDED, "--out", "of-hub", "-q")
    assert done.code == 0, done.err
    local, remote = read_export(audited / "new"), read_export(place / "of-hub")
    assert (local.dense, local.rest) == (remote.dense, remote.rest)
    data = ModelCard.load(place / "of-hub" / "README.md").data
    assert (data.base_model, data.base_model_relation) == (["alice/base"], "quantized")
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert (data.license, data.datasets) == ("apache-2.0", ["o/text", "o/more"])
    assert data.get("widget") is None
