"""An audit into a repository over real sockets: what is sent, what is not, and never twice."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest
from huggingface_hub import HfApi, ModelCard, hf_hub_download

from qaudit.errors import AuditError, HubError, QauditError, SourceError, UnreachableError
from qaudit.hub import open_hub
from qaudit.hub.publish import (
    MARK,
    description_of,
    propose,
    published_folder,
    read_for_publishing,
    submit,
    title_of,
)
from qaudit.saved.evidence import read_saved
from qaudit.types import Ref, TextFile
from tests.support import sample
from tests.support.hub import Hub
from tests.support.saved_audits import save

REPO = "alice/m"
FRONT = "---\nlicense: mit  # ours\ntags: [text]\n---\n"
BODY = "# The model\n\nWords of alice's.\n"
TOKENS = {"hf_bob": "bob", "hf_alice": "alice", "hf_reader": "bob:read"}
TEXT = TextFile("hf://datasets/o/text/eval.jsonl", "o/text", "c" * 40, "eval.jsonl", 9, "0" * 64)


def write(folder, **settings):
    save(folder / "out", text=TEXT, **settings)
    return folder / "out"


@pytest.fixture(scope="module")
def saved(once):
    return once(write)


@pytest.fixture(scope="module")
def newer(once):
    """Return a later audit, without the subject that was measured last before."""
    return once(write, seed=1, subjects=sample.series()[-4:-1])


read = cache(read_for_publishing)  # of folders that no test changes


@dataclass
class Desk:
    """Whoever publishes, and the Hub they publish to."""

    hub: Hub
    said: list[str] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)

    def opened(self):
        opened = open_hub()
        opened.client.say = self.said.append
        opened.client.pause = self.waited.append
        return opened

    def look(self, folder, subject=None):
        return propose(read(folder), REPO, self.opened(), subject)

    def publish(self, folder, message="Audit", meanwhile=None, **options):
        proposal = propose(read(folder), REPO, opened := self.opened(), **options)
        if meanwhile:
            meanwhile()
        said = description_of(read(folder))
        return submit(proposal, said, opened, title_of(message), lambda done, total: None)

    @property
    def requests(self):
        return self.hub.repos[REPO].discussions

    def writes(self):
        return [e["path"] for e in self.hub.log if e["method"] not in ("GET", "HEAD")]


@pytest.fixture
def desk(serve, tmp_path, monkeypatch):
    place = tmp_path / "root" / REPO / "main"
    place.mkdir(parents=True)
    (place / "README.md").write_text(FRONT + BODY)
    (place / "model.safetensors").write_bytes(b"weights")
    hub = serve(tmp_path / "root", tokens=TOKENS)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_TOKEN", "hf_bob")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    yield Desk(hub)
    assert hub.leaks == []


def api(hub):
    return HfApi(endpoint=hub.url, token="hf_bob")


def tree(hub, revision):
    return {file.path for file in api(hub).list_repo_tree(REPO, revision=revision, recursive=True)}


def test_the_client_reads_what_was_published(desk, saved, tmp_path):
    done = desk.publish(saved, "Look at this")
    assert (done.state, done.url) == ("opened", f"{desk.hub.url}/{REPO}/discussions/1")
    details = api(desk.hub).get_discussion_details(REPO, 1)
    whole = (details.title, details.author, details.status)
    assert whole == (f"Look at this {MARK}", "bob", "open")

    def fetched(path):
        where = {"endpoint": desk.hub.url, "cache_dir": tmp_path / "theirs"}
        found = hf_hub_download(REPO, path, revision="refs/pr/1", **where)
        return Path(found).read_bytes()

    for path in ["audit.json", *(f"evidence/{p.name}" for p in (saved / "evidence").glob("*.npz"))]:
        assert fetched(f"qaudit/{path}") == (saved / path).read_bytes()
    for picture in (saved / "plots").glob("*.svg"):
        assert fetched(f"qaudit/plots/{picture.name}") == picture.read_bytes()
    card = fetched("qaudit/card.md").decode()
    assert 'src="plots/trajectory.svg"' in card
    readme = fetched("README.md").decode()
    assert readme.startswith("---\nlicense: mit  # ours\ntags:\n- text\n- qaudit\n")
    assert f"---\n{BODY}\n<!-- qaudit:begin -->" in readme
    assert "[card](qaudit/card.md)" in readme
    assert len(readme.partition("<!-- qaudit:begin -->")[2].splitlines()) <= 20
    assert fetched("model.safetensors") == b"weights"
    assert "# The model" in hf_text(desk.hub, "main")  # main itself is untouched
    assert "qaudit" not in hf_text(desk.hub, "main")


def hf_text(hub, revision):
    commit = hub.repos[REPO].resolve(revision)
    return commit.files["README.md"].whole().decode()


def test_metadata_is_what_the_library_s_own_classes_read(desk, saved):
    desk.publish(saved, subject="soup")
    card = ModelCard(hf_text(desk.hub, "refs/pr/1"))
    assert card.data.tags == ["text", "qaudit"]
    assert card.data.license == "mit"
    assert card.data.base_model == ["demo"]
    assert card.data.base_model_relation == "merge"
    found = {r.metric_args["scheme"]: r for r in card.data.eval_results}
    scores = {s.scheme: s for s in read_saved(saved).audit.measurements if s.subject == "soup"}
    assert set(found) == set(scores)
    for scheme, entry in found.items():
        assert (entry.dataset_type, entry.dataset_revision) == ("o/text", "c" * 40)
        assert (entry.metric_type, entry.metric_value) == ("perplexity", scores[scheme].perplexity)
        assert entry.metric_args["ce_low"] == scores[scheme].ce.low
        assert "95 % interval" in entry.metric_name
        assert entry.source_name == "qaudit"
        assert entry.source_url == f"{desk.hub.url}/{REPO}/blob/main/qaudit/audit.json"
    assert "quantization adds" in found["gptq-4bit"].metric_name


def test_what_cannot_be_shown_is_told_or_refused(desk, saved, tmp_path):
    save(tmp_path / "other")
    plan = desk.look(tmp_path / "other", "soup")
    assert "model-index" not in plan.readme[1]
    assert any("measured on other text" in note for note in plan.notes)
    with pytest.raises(QauditError, match="nothing was measured of `sou`") as raised:
        desk.look(saved, "sou")
    assert "did you mean `soup`" in raised.value.hint
    soup = sample.series()[-1]
    members = tuple((replace(c, ref=Ref("/home/me/runs/a")), w) for c, w in soup.members)
    save(tmp_path / "out", subjects=(*sample.series()[-4:-1], replace(soup, members=members)))
    notes = desk.look(tmp_path / "out").notes
    assert any("`/home/me/runs/a`" in note for note in notes)


def test_a_newer_audit_keeps_an_edit_of_its_readme(desk, saved, newer):
    first = desk.publish(saved, subject="soup")
    text = hf_text(desk.hub, "refs/pr/1").replace("Words of alice's.", "Other words.")
    place = {"path_in_repo": "README.md", "repo_id": REPO, "revision": "refs/pr/1"}
    api(desk.hub).upload_file(path_or_fileobj=text.encode(), **place)
    last = read_saved(newer).audit.subjects[-1].label
    second = desk.publish(newer, subject=last)
    assert (second.state, second.url) == ("updated", first.url)
    assert len(desk.requests) == 1
    evidence = {f"qaudit/evidence/{p.name}" for p in (newer / "evidence").glob("*.npz")}
    here = tree(desk.hub, "refs/pr/1")
    assert {path for path in here if path.endswith(".npz")} == evidence
    assert {"model.safetensors", "README.md", "qaudit/audit.json"} <= here
    text = hf_text(desk.hub, "refs/pr/1")
    assert text.count("<!-- qaudit:begin -->") == 1
    assert text.count("- task:") == 1
    assert "Other words." in text
    assert read_saved(published_folder(f"{REPO}@refs/pr/1")).audit == read_saved(newer).audit


def test_the_same_audit_again_finds_its_own_pull_request(desk, saved):
    plan = desk.look(saved)
    assert {state for _, state in plan.files} == {"new", "changed"}
    assert (desk.writes(), desk.requests) == ([], [])
    first = desk.publish(saved)
    desk.hub.log.clear()
    again = desk.publish(saved, "Under another title")
    assert (again.state, again.url) == ("already open", first.url)
    assert desk.writes() == []
    HfApi(endpoint=desk.hub.url, token="hf_alice").merge_pull_request(REPO, 1)
    again = desk.publish(saved)
    assert (again.state, again.url) == ("already published", f"{desk.hub.url}/{REPO}")
    assert len(desk.requests) == 1


def test_other_pull_requests_are_left_alone(desk, saved):
    for who, title in (("hf_alice", "Audit [qaudit]"), ("hf_bob", "Something of mine")):
        HfApi(endpoint=desk.hub.url, token=who).create_pull_request(REPO, title)
    done = desk.publish(saved)
    assert done.url.endswith("/discussions/3")
    assert len(desk.requests) == 3


@pytest.mark.parametrize("fault", [{"cut": 0}, {"cut": 10}, {"reset": 1}], ids=str)
def test_a_reply_that_is_lost_opens_no_second_pull_request(desk, saved, newer, fault):
    desk.hub.faults = [{"match": "POST /api/models/alice/m/commit", "times": 1, **fault}]
    with pytest.raises(UnreachableError, match="did not say whether it took"):
        desk.publish(saved)
    assert len(desk.hub.asked("POST .*/commit/")) == 1
    assert desk.publish(saved).state == "already open"
    if fault == {"cut": 0}:
        assert desk.publish(newer).state == "updated"
    assert len(desk.requests) == 1


@pytest.mark.parametrize("fault", [{"status": 500}, {"body": "<html>"}], ids=str)
def test_what_may_be_there_is_sent_once(desk, saved, fault):
    desk.hub.faults = [{"match": "POST .*/commit/", "times": 1, **fault}]
    with pytest.raises(UnreachableError, match="did not say whether it took") as raised:
        desk.publish(saved)
    assert "opens no second" in raised.value.hint
    assert len(desk.hub.asked("POST .*/commit/")) == 1
    assert desk.publish(saved).state == "opened"
    assert len(desk.requests) == 1


def test_what_was_not_taken_is_sent_again_with_a_fresh_link(desk, saved):
    headers = {"RateLimit": '"api";r=0;t=41'}
    desk.hub.faults = [
        {"match": "POST .*/commit/", "status": 429, "headers": headers, "times": 2},
        {"match": "PUT /cdn/upload", "status": 403, "times": 1},
        {"match": "PUT /cdn/upload", "reset": 0, "times": 1},
    ]
    assert desk.publish(saved).state == "opened"
    assert desk.waited[-2:] == [42.0, 42.0]
    assert len(desk.requests) == 1
    assert len(desk.hub.asked("POST .*/lfs/objects/batch")) > 1
    confirmed = desk.hub.asked("POST /cdn/verify")
    assert confirmed
    elsewhere = desk.hub.asked("PUT /cdn/upload") + confirmed
    assert not any(entry["auth"] or not entry["cdn"] for entry in elsewhere)
    assert read_saved(published_folder(f"{REPO}@refs/pr/1")).measurements


def test_a_branch_that_moved_is_not_overwritten(desk, saved, newer):
    desk.publish(saved)

    def meanwhile():
        place = {"path_in_repo": "x", "repo_id": REPO, "revision": "refs/pr/1"}
        api(desk.hub).upload_file(path_or_fileobj=b"x", **place)

    with pytest.raises(HubError, match="`refs/pr/1` of `alice/m` has moved"):
        desk.publish(newer, meanwhile=meanwhile)


LIMIT = {"X-Error-Message": "storage limit reached hf_bob"}
WRONG = {"errors": [{"message": '"license" must be one of ...'}]}
ODD = {"discussions": [{"num": "1"}], "count": 1}
REFUSED = [
    # first, as a tree that is known is not asked for again
    ("hf_bob", {"match": "GET .*/tree/", "status": 403, "headers": {"X-Error-Code": "GatedRepo"}},
     "is gated, and your account has no access", "ask for access"),
    ("hf_reader", {"match": "none"}, "no right to write to `alice/m`", "role `write`"),
    ("hf_wrong", {"match": "none"}, "does not accept the token", "log in again"),
    (None, {"match": "none"}, "you are not logged in", "`hf auth login`"),
    ("hf_bob", {"match": "POST .*/commit/", "status": 403, "headers": LIMIT},
     "(storage limit reached ...)", "takes pull requests"),
    ("hf_bob", {"match": "POST .*/commit/", "status": 404,
                "headers": {"X-Error-Code": "RepoNotFound"}},
     "does not exist, or is private and closed to this token", "check the name"),
    ("hf_bob", {"match": "POST /api/validate-yaml", "status": 400, "body": WRONG},
     "does not take the metadata of `README.md`", "fix the front matter"),
    ("hf_bob", {"match": "POST .*/preupload/", "body": {"files": []}}, "makes no sense",
     "HF_ENDPOINT"),
    ("hf_bob", {"match": "GET .*/discussions", "body": ODD}, "makes no sense", "HF_ENDPOINT"),
]  # fmt: skip


def test_a_refusal_opens_nothing(desk, saved, monkeypatch):
    for token, fault, sentence, hint in REFUSED:
        monkeypatch.delenv("HF_TOKEN", raising=False)
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        desk.hub.faults = [fault]
        with pytest.raises(HubError) as raised:
            desk.publish(saved)
        assert sentence in raised.value.message
        assert hint in raised.value.hint
        assert desk.requests == []
        shown = f"{raised.value.message} {raised.value.hint} {desk.said}"
        assert token is None or token not in shown


def test_a_file_that_git_ignores_or_a_link_to_elsewhere_is_refused(desk, saved):
    paths = [addition.path_in_repo for addition in desk.look(saved).additions]
    files = [{"path": p, "uploadMode": "regular", "shouldIgnore": True} for p in paths]
    desk.hub.faults = [{"match": "POST .*/preupload/", "body": {"files": files}}]
    with pytest.raises(HubError, match=r"`\.gitignore` of `alice/m` leaves out `README\.md`"):
        desk.publish(saved)
    oid = read_saved(saved).audit.measurements[0].evidence_sha256
    link = {"upload": {"href": "file:///etc/passwd", "header": {}}}
    body = {"objects": [{"oid": oid, "size": 1, "actions": link}]}
    desk.hub.faults = [{"match": "lfs/objects/batch", "body": body}]
    with pytest.raises(QauditError):
        desk.publish(saved)
    assert desk.requests == []


def test_offline_nothing_is_sent(desk, saved, monkeypatch):
    desk.look(saved)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    desk.hub.log.clear()
    with pytest.raises(HubError, match="needs the network"):
        desk.publish(saved)
    assert desk.hub.log == []


def damaged(saved, tmp_path, change):
    shutil.rmtree(tmp_path / "bad", ignore_errors=True)
    shutil.copytree(saved, tmp_path / "bad")
    change(tmp_path / "bad")
    return tmp_path / "bad"


def swap(folder):
    one, other = sorted((folder / "evidence").glob("*.npz"))[:2]
    shutil.copy(one, other)


def edit(folder, change):
    shutil.copy(next((folder / "evidence").glob("*.npz")), folder / "card.md")
    audit = json.loads((folder / "audit.json").read_text())
    change(audit["measurements"][0])
    (folder / "audit.json").write_text(json.dumps(audit))


def test_an_audit_without_its_evidence_is_not_published(saved, tmp_path):
    changes = [
        (swap, SourceError, 4),
        (lambda folder: edit(folder, lambda row: row.update(evidence="card.md")), SourceError, 4),
        (lambda folder: next((folder / "evidence").glob("*.npz")).unlink(), SourceError, 4),
        (lambda folder: edit(folder, lambda row: row.update(perplexity=row["perplexity"] / 2)),
         AuditError, 2),
        (lambda folder: (folder / "audit.json").unlink(), AuditError, 2),
    ]  # fmt: skip
    for change, error, code in changes:
        with pytest.raises(error) as raised:
            read_for_publishing(damaged(saved, tmp_path, change))
        assert raised.value.code == code


def test_no_link_is_followed_and_pages_are_rendered_anew(saved, tmp_path):
    (tmp_path / "secret").write_text("secret")

    def plant(folder):
        (folder / "report.html").symlink_to(tmp_path / "secret")
        (folder / "plots" / "trajectory.svg").unlink()
        (folder / "plots" / "trajectory.svg").symlink_to(tmp_path / "secret")
        (folder / "plots" / "other.svg").write_text("not in the card")

    found = read_for_publishing(damaged(saved, tmp_path, plant))
    assert not [path for path, data in found.files.items() if data == b"secret"]
    assert "qaudit/plots/other.svg" not in found.files
    assert b"<svg" in found.files["qaudit/plots/trajectory.svg"]
    assert any("drawn anew" in note for note in found.notes)
    assert "qaudit/report.html" not in read(saved).files
    old = damaged(saved, tmp_path, lambda folder: (folder / "report.html").write_text("old"))
    assert b"<html" in read_for_publishing(old).files["qaudit/report.html"]


def test_one_marker_and_a_title_that_is_none_are_refused(desk, saved):
    text = FRONT + BODY + "\n<!-- qaudit:begin -->\n"
    place = {"path_in_repo": "README.md", "repo_id": REPO}
    alice = HfApi(endpoint=desk.hub.url, token="hf_alice")
    alice.upload_file(path_or_fileobj=text.encode(), **place)
    with pytest.raises(HubError, match=r"in `README\.md` of `alice/m`, the markers"):
        desk.look(saved)
    for message in ("", "  ", "two\nlines", "x" * 200, "a\x1b[31m"):
        with pytest.raises(QauditError, match="is not one line"):
            title_of(message)
