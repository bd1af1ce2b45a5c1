"""Writing to the Hub, call by call: what is followed, what is believed, and who gets the token."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qaudit.errors import HubError, UnreachableError
from qaudit.hub.answers import GarbledError, HubFile
from qaudit.hub.client import Client
from qaudit.hub.publishing.commit import (
    LostReplyError,
    Publisher,
    account_in,
    complaints_in,
    discussions_in,
    number_in,
)
from qaudit.hub.publishing.upload import Addition, Change, PullRequest, links_in, modes_in
from tests.support.hub import Hub
from tests.support.hub.fixtures import Serve
from tests.support.hub.git import blob_in_memory
from tests.support.hub.repositories import Repository

REPO = "alice/m"
LARGE = Addition("a.npz", b"numbers" * 100)
SMALL = Addition("a.md", b"words")


@pytest.fixture
def hub(serve: Serve) -> Hub:
    hub = serve(tokens={"hf_bob": "bob"})
    hub.repos[REPO] = Repository(REPO)
    hub.repos[REPO].commit({"x": blob_in_memory("x", b"x")}, "begin")
    return hub


def publisher(hub: Hub, token: str | None = "hf_bob") -> Publisher:
    return Publisher(Client(hub.url, token=token, pause=lambda seconds: None))


def change(hub: Hub, **settings: Any) -> Change:
    parent = hub.repos[REPO].branches["main"]
    return Change(REPO, parent, "title", "words", (LARGE, SMALL), **settings)


def send(hub: Hub, **settings: Any) -> PullRequest:
    return publisher(hub).send(change(hub, **settings), lambda done, total: None)


def test_ids_are_those_of_git_and_of_lfs() -> None:
    for addition in (LARGE, SMALL, Addition("empty.md", b"")):
        blob = blob_in_memory(addition.path, addition.data)
        listed = HubFile(addition.path, blob.nbytes, blob.git_id, blob.sha256)
        assert addition.is_in({addition.path: listed})
        assert not Addition(addition.path, addition.data + b".").is_in({addition.path: listed})
        assert not addition.is_in({})


def test_a_commit_adds_removes_and_opens_one_pull_request(hub: Hub) -> None:
    made = send(hub, removed=("x",))
    assert (made.number, made.revision) == (1, "refs/pr/1")
    commit = hub.repos[REPO].resolve("refs/pr/1")
    assert commit is not None
    assert sorted(commit.files) == ["a.md", "a.npz"]
    assert commit.files["a.npz"].sha256 == LARGE.sha256
    assert publisher(hub).open_pull_requests("bob", REPO) == (made,)


def test_pull_requests_are_looked_for_on_every_page(hub: Hub) -> None:
    rows = [
        {"num": k, "title": "t", "author": {"name": "bob"}, "status": s, "isPullRequest": r}
        for k, s, r in ((9, "open", True), (8, "closed", True), (7, "open", False))
    ]
    gone = {**rows[0], "num": 6, "author": None}
    older = {**rows[0], "num": 2, "status": "draft"}
    hub.faults = [
        {"match": "discussions.*p=0", "body": {"discussions": [*rows, gone], "count": 5}},
        {"match": "discussions.*p=1", "body": {"discussions": [older], "count": 5}},
    ]
    assert [r.number for r in publisher(hub).open_pull_requests("bob", REPO)] == [9, 2]
    assert len(hub.asked("discussions")) == 2


def test_an_uploaded_file_is_confirmed_where_the_hub_asks_for_that(hub: Hub) -> None:
    upload = {"href": f"{hub.cdn}/cdn/upload/{LARGE.sha256}", "header": {"x-note": "1"}}
    verify = {"href": f"{hub.url}/api/verify", "header": {}}
    told = {"oid": LARGE.sha256, "size": 1, "actions": {"upload": upload, "verify": verify}}
    hub.faults = [
        {"match": "objects/batch", "body": {"objects": [told]}},
        {"match": "POST /api/verify", "body": {}},
    ]
    send(hub)
    (put,) = hub.asked("PUT /cdn/upload")
    (confirmed,) = hub.asked("POST /api/verify")
    assert (put["auth"], confirmed["auth"]) == (False, True)
    assert hub.leaks == []


def test_a_header_that_carries_a_token_elsewhere_is_left_out(hub: Hub) -> None:
    header = {"Authorization": "Bearer hf_bob"}
    upload = {"href": f"{hub.cdn}/cdn/upload/{LARGE.sha256}", "header": header}
    told = {"oid": LARGE.sha256, "size": 1, "actions": {"upload": upload}}
    hub.faults = [{"match": "objects/batch", "body": {"objects": [told]}}]
    send(hub)
    assert hub.leaks == []


def test_an_upload_in_parts_is_refused(hub: Hub) -> None:
    upload = {"href": f"{hub.cdn}/cdn/upload/x", "header": {"chunk_size": "9"}}
    told = {"oid": LARGE.sha256, "size": 1, "actions": {"upload": upload}}
    hub.faults = [{"match": "objects/batch", "body": {"objects": [told]}}]
    with pytest.raises(HubError, match="in parts"):
        send(hub)


def test_a_commit_follows_a_renamed_repository_with_all_it_carries(hub: Hub) -> None:
    hub.repos["alice/new"] = hub.repos[REPO]
    to = {"Location": "/api/models/alice/new/commit/main?create_pr=1"}
    hub.faults = [{"match": "POST /api/models/alice/m/commit", "status": 307, "headers": to}]
    assert send(hub).number == 1
    assert len(hub.repos[REPO].discussions) == 1


@pytest.mark.parametrize("status", [301, 302, 303])
def test_a_redirect_that_would_drop_what_a_commit_carries_is_no_answer(
    hub: Hub, status: int
) -> None:
    to = {"Location": "/api/models/alice/m"}
    hub.faults = [{"match": "POST .*/commit/", "status": status, "headers": to}]
    with pytest.raises(HubError, match=f"answers {status}"):
        send(hub)


def test_a_commit_does_not_follow_to_another_server(hub: Hub, serve: Serve) -> None:
    other = serve()
    to = {"Location": f"{other.url}/api/models/alice/m/commit/main"}
    hub.faults = [{"match": "POST .*/commit/", "status": 307, "headers": to}]
    with pytest.raises(HubError, match="redirects to"):
        send(hub)
    assert other.log == []


def test_a_hub_that_is_gone_before_the_commit_lost_no_reply(hub: Hub) -> None:
    with pytest.raises(UnreachableError, match="asked 3 times: no connection"):
        publisher(hub).send(change(hub), lambda done, total: hub.stop())
    assert hub.asked("/commit/") == []


def test_a_commit_that_nobody_heard_is_sent_when_the_hub_is_back(hub: Hub) -> None:
    client = Client(hub.url, token="hf_bob", pause=lambda seconds: hub.start())
    made = Publisher(client).send(change(hub), lambda done, total: hub.stop())
    assert made.number == len(hub.repos[REPO].discussions) == 1


def test_an_answer_without_a_number_is_a_lost_reply(hub: Hub) -> None:
    for body in ({"success": True}, "<html>", {"pullRequestUrl": "https://x/models/1"}):
        hub.faults = [{"match": "POST .*/commit/", "body": body}]
        with pytest.raises(LostReplyError, match="makes no sense"):
            send(hub)


@pytest.mark.parametrize(
    ("read", "answer"),
    [
        (account_in, {"name": 7}),
        (account_in, []),
        (discussions_in, {"discussions": {}}),
        (discussions_in, {"discussions": [], "count": -1}),
        (discussions_in, {"discussions": [{"num": True}], "count": 1}),
        (complaints_in, {"errors": ["words"]}),
        (modes_in, {"files": [{"path": "../x", "uploadMode": "lfs"}]}),
        (modes_in, {"files": [{"path": "x"}]}),
        (links_in, {"objects": [{"oid": "x"}]}),
        (links_in, {"objects": [{"oid": "0" * 64, "error": {"message": "no room"}}]}),
        (links_in, {"objects": [{"oid": "0" * 64, "actions": {"upload": {"href": 1}}}]}),
        (
            links_in,
            {"objects": [{"oid": "0" * 64, "actions": {"upload": {"href": "x", "header":
             {"a": "b\r\nc: d"}}}}]},
        ),
        (number_in, {"pullRequestUrl": "https://hub/alice/m/discussions/0"}),
        (number_in, {"pullRequestUrl": "https://hub/alice/m/discussions/1/../../x"}),
    ],
)  # fmt: skip
def test_answers_that_make_no_sense_are_not_believed(read: Any, answer: Any) -> None:
    with pytest.raises(GarbledError):
        read(json.loads(json.dumps(answer)))
