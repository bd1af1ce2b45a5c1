"""An audit in a repository, fetched through the real source and read like a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qaudit.errors import AuditError, HubError, QauditError, SourceError, UsageError
from qaudit.hub.publish import audit_folder, is_published, published_folder
from qaudit.saved.evidence import read_saved
from tests.support.hub import Hub, Serve
from tests.support.items import answered
from tests.support.saved_audits import save

TASKS = ("arc_easy", "piqa")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save(folder, tasks=TASKS)
    return folder


@pytest.fixture
def publish(
    serve: Serve, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Hub]:
    """Return a function that serves the audit as `o/m@v1`, after a change."""

    def start(change: Callable[[Path], object] = lambda folder: None, **settings: object) -> Hub:
        place = tmp_path / "root" / "o" / "m" / "v1"
        shutil.copytree(saved, place / "qaudit")
        change(place / "qaudit")
        hub = serve(tmp_path / "root", **settings)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        return hub

    return start


def test_a_published_audit_reads_like_the_folder_it_came_from_and_serves_offline(
    publish: Callable[..., Hub], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = publish()
    folder = published_folder("hf://o/m@v1")
    assert sorted(path.name for path in folder.iterdir()) == ["audit.json", "evidence"]
    assert sorted(path.name for path in (folder / "evidence" / "tasks").iterdir()) == [*TASKS]
    assert hub.asked("plots|card.md") == []
    found = read_saved(folder)
    assert found.audit == read_saved(saved).audit
    assert len(found.measurements) == len(found.audit.measurements) > 0
    for m in found.checked().measurements:
        for task, other in zip(m.evidence.tasks, answered(m, TASKS).evidence.tasks, strict=True):
            assert task.task == other.task
            assert np.array_equal(task.nll, other.nll)
            assert np.array_equal(task.right, other.right)
    hub.log.clear()
    assert published_folder("o/m@v1") == folder  # nothing is fetched again
    assert [entry["path"] for entry in hub.log] == ["/api/models/o/m/refs"]
    hub.log.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert read_saved(published_folder("o/m@v1")).audit.measurements
    assert hub.log == []


@pytest.mark.parametrize("place", ["evidence", "evidence/tasks/piqa"])
def test_evidence_of_another_audit_is_refused(publish: Callable[..., Hub], place: str) -> None:
    def swap(folder: Path) -> None:
        one, other = sorted((folder / place).glob("*.npz"))[:2]
        shutil.copy(one, other)

    publish(swap)
    with pytest.raises(SourceError, match="not the evidence that the audit was made from"):
        read_saved(published_folder("o/m@v1"))


@pytest.mark.parametrize("name", ["../../../secret.npz", "/etc/hosts", "evidence/../../secret.npz"])
def test_a_name_that_leads_out_of_the_audit_fetches_and_reads_nothing(
    publish: Callable[..., Hub], name: str
) -> None:
    def edit(folder: Path) -> None:
        (folder.parent / "secret.npz").write_text("secret")
        audit = json.loads((folder / "audit.json").read_text())
        audit["measurements"][0]["evidence"] = name
        (folder / "audit.json").write_text(json.dumps(audit))

    hub = publish(edit)
    folder = published_folder("o/m@v1")
    assert hub.asked("secret|hosts") == []
    with pytest.raises(SourceError, match="is outside the audit"):
        read_saved(folder)


def test_what_cannot_be_found_is_refused_in_words(
    publish: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = publish()
    for target, error, sentence in (
        ("o/m@v2", HubError, "has no revision `v2`"),
        ("o/m@main~1", HubError, "no revision"),
        ("o/other@v1", HubError, "does not exist, or is private"),
        ("o/m@v1//qaudit", UsageError, "names no repository with an audit"),
        ("hf://o", UsageError, "names no repository with an audit"),
        ("hf://../m", QauditError, "names no repository with an audit"),
    ):
        with pytest.raises(error) as raised:
            published_folder(target)
        assert sentence in raised.value.message
        assert raised.value.hint
    monkeypatch.setattr("qaudit.hub.publish.LARGEST_NBYTES", 1000)
    with pytest.raises(HubError, match="more than an audit's file can have"):
        published_folder("o/m@v1")
    assert hub.asked("resolve") == []


def test_a_repository_without_an_audit_says_so(publish: Callable[..., Hub]) -> None:
    publish(lambda folder: (folder / "audit.json").unlink())
    with pytest.raises(HubError, match="there is no audit in `o/m@v1`") as raised:
        published_folder("o/m@v1")
    assert "qaudit publish" in raised.value.hint


def test_a_damaged_audit_is_refused_by_its_place(publish: Callable[..., Hub]) -> None:
    publish(lambda folder: (folder / "audit.json").write_text('{"schema": "1", '))
    with pytest.raises(AuditError, match="in `o/m@v1`, the audit is not whole JSON"):
        published_folder("o/m@v1")


def test_what_is_on_this_machine_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert audit_folder("runs/a") == Path("runs/a")
    assert audit_folder("runs/missing") == Path("runs/missing")
    assert not is_published("audit.json")
    assert not is_published("a/b/c")
    assert is_published("runs/a@v1")
    assert is_published("hf://runs/a")
    assert is_published("org/name")
