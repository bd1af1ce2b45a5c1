"""An audit in a repository, fetched through the real source and read like a folder."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from qaudit.errors import AuditError, HubError, QauditError, SourceError, UsageError
from qaudit.hub.publish import audit_folder, is_published, published_folder
from qaudit.saved.evidence import read_saved
from tests.support.items import answered
from tests.support.saved_audits import save

TASKS = ("arc_easy", "piqa")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save(folder, tasks=TASKS)
    return folder


@pytest.fixture
def publish(serve, saved, tmp_path, monkeypatch):
    """Return a function that serves the audit as `o/m@v1`, after a change."""

    def start(change=lambda folder: None, **settings):
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
    publish, saved, monkeypatch
):
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


def swap(folder):
    one, other = sorted(folder.glob("*.npz"))[:2]
    shutil.copy(one, other)


def lead_to(name, folder):
    (folder.parent / "secret.npz").write_text("secret")
    audit = json.loads((folder / "audit.json").read_text())
    audit["measurements"][0]["evidence"] = name
    (folder / "audit.json").write_text(json.dumps(audit))


OUT = ("../../../secret.npz", "/etc/hosts", "evidence/../../secret.npz")
OTHER = "not the evidence that the audit was made from"
WRONG = [
    (lambda folder: swap(folder / "evidence"), SourceError, OTHER),
    (lambda folder: swap(folder / "evidence" / "tasks" / "piqa"), SourceError, OTHER),
    *((partial(lead_to, name), SourceError, "is outside the audit") for name in OUT),
    (lambda folder: (folder / "audit.json").unlink(), HubError, "there is no audit in `o/m@v1`"),
    (lambda folder: (folder / "audit.json").write_text('{"schema": "1", '), AuditError,
     "the audit is not whole JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "said"), WRONG)
def test_an_audit_that_is_none_or_leads_out_is_refused_and_fetches_and_reads_nothing(
    publish, change, error, said
):
    hub = publish(change)
    with pytest.raises(error, match=said) as raised:
        read_saved(published_folder("o/m@v1"))
    assert hub.asked("secret|hosts") == []
    assert ("qaudit publish" in raised.value.hint) == ("no audit" in said)


def test_what_is_not_there_is_named(publish, monkeypatch):
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


def test_what_is_on_this_machine_wins(tmp_path, monkeypatch):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert audit_folder("runs/a") == Path("runs/a")
    assert audit_folder("runs/missing") == Path("runs/missing")
    assert not is_published("audit.json")
    assert not is_published("a/b/c")
    assert is_published("runs/a@v1")
    assert is_published("hf://runs/a")
    assert is_published("org/name")
