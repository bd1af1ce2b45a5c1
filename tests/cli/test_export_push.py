"""`qaudit export --push`: one pull request over real HTTP, and the same command again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from tests.support.cli import TEXT, Run, refused
from tests.support.filled import filled
from tests.support.hub import Hub, Serve

TOKEN = "hf_bobs_own_secret"
WHAT = ("export", "series/step200", *TEXT)
OURS = (*WHAT, "--scheme", "rtn-4bit:group=32", "--out", "new")


@pytest.fixture
def hub(place: Path, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    main = tmp_path / "root" / "alice" / "m" / "main"
    main.mkdir(parents=True)
    (main / "README.md").write_text("# M\n")
    (main / "qaudit-export.json").write_text("{}")
    (main / "model-00001-of-00002.safetensors").write_bytes(b"of an earlier export")
    # A checkpoint to export, in a repository of its own.
    shutil.copytree(place / "series" / "step200", tmp_path / "root" / "alice" / "base" / "main")
    (tmp_path / "root" / "alice" / "base" / "main" / "README.md").write_text(
        "---\nlicense: apache-2.0  # of the base\ndatasets: [o/text, o/more]\n"
        "widget: [{a: b}]\n---\n"
    )
    hub = serve(tmp_path / "root", tokens={TOKEN: "bob", "hf_reader": "bob:read"})
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    return hub


def files_of(hub: Hub, branch: str) -> dict[str, bytes]:
    repo = hub.repos["alice/m"]
    files = repo.commits[repo.branches[branch]].files
    return {path: b"".join(one.contents.read(0, one.nbytes)) for path, one in files.items()}


def test_the_folder_becomes_one_pull_request(hub: Hub, place: Path, qaudit: Run) -> None:
    url = f"{hub.url}/alice/m/discussions/1"
    done = qaudit(*OURS, "--push", "alice/m")
    assert (done.code, done.out) == (0, f"new\nopened: {url}\n"), done.err
    new = place / "new"
    written = {p.relative_to(new).as_posix(): p.read_bytes() for p in new.rglob("*") if p.is_file()}
    proposed = files_of(hub, "refs/pr/1")
    del proposed[".gitattributes"]  # of the Hub
    assert proposed == written
    assert "# M" in files_of(hub, "main")["README.md"].decode()
    again = qaudit(*OURS, "--push", "hf://alice/m", "-q")
    assert (again.code, again.out) == (0, f"new\nalready open: {url}\n"), again.err
    assert len(hub.repos["alice/m"].discussions) == 1
    assert hub.leaks == []
    assert TOKEN not in done.out + done.err + again.out + again.err
    for data in filled(written.values()):
        assert TOKEN.encode() not in data


@pytest.mark.slow
def test_a_push_that_was_cut_off_goes_on_without_quantizing_again(
    hub: Hub, place: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults = [{"match": "/commit/", "status": 403, "times": 9}]
    done = qaudit(*OURS, "--push", "alice/m")
    assert done.code != 0
    assert TOKEN not in done.out + done.err
    assert (place / "new" / "qaudit-export.json").is_file()

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the folder is whole")

    monkeypatch.setattr("qaudit.export.folder.export_quantized", never)
    hub.faults = []
    done = qaudit(*OURS, "--push", "alice/m")
    assert (done.code, done.out.splitlines()[1].split(":")[0]) == (0, "opened"), done.err


def test_what_cannot_be_pushed_is_refused_before_any_work(
    hub: Hub, place: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(repo: str, code: int, sentence: str, hint: str, *more: str) -> None:
        refused(qaudit(*OURS, "--push", repo, *more), code, sentence, hint)
        assert not (place / "new").exists()
        assert not list(place.glob(".new*"))

    refuses("alice", 2, "no name of a repository", "org/name")
    refuses("alice/m@main", 2, "names a revision", "org/name")
    refuses("alice/none", 4, "alice/none", "")
    monkeypatch.delenv("HF_TOKEN")
    refuses("alice/m", 4, "not logged in", "hf auth login")


@pytest.mark.slow
def test_a_token_that_may_only_read_keeps_the_export(
    hub: Hub, place: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    done = qaudit(*OURS, "--push", "alice/m")
    assert done.code == 4
    assert done.err.count("error: ") == 1
    assert (place / "new" / "qaudit-export.json").is_file()
    assert hub.repos["alice/m"].discussions == []


def test_a_checkpoint_of_the_hub_is_exported(hub: Hub, place: Path, qaudit: Run) -> None:
    what = ("export", "alice/base", *TEXT, "--scheme", "rtn-4bit:group=32", "--out", "of-hub")
    done = qaudit(*what, "-q")
    assert done.code == 0, done.err
    assert qaudit(*OURS, "-q").code == 0
    local, remote = (
        json.loads((place / n / "qaudit-export.json").read_text()) for n in ("new", "of-hub")
    )
    assert local["dense"] == remote["dense"]
    assert local["rest"] == remote["rest"]
    data = ModelCard.load(place / "of-hub" / "README.md").data
    assert (data.base_model, data.base_model_relation) == (["alice/base"], "quantized")
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert (data.license, data.datasets) == ("apache-2.0", ["o/text", "o/more"])
    assert data.get("widget") is None
