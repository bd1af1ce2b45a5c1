"""The client over real sockets, against a server that fails in every way we could think of."""

import json
import logging
import socket
import subprocess
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError
from hypothesis import given
from hypothesis import strategies as st

from qaudit.errors import HubError, Interrupted, QauditError, UnreachableError, UsageError
from qaudit.hub.answers import (
    LONGEST_WAIT_SECONDS,
    TRIES,
    TRIES_UNREACHED,
    DroppedError,
    GarbledError,
    HubFile,
    files_in,
    is_repository,
    requested_wait_seconds,
    wait_seconds,
)
from qaudit.hub.api import Client
from tests.support.fetching import write
from tests.support.hub import Hub

REPO = "alice/tiny"
BOB, ALICE, STRANGER = "hf_bobBOBbobBOBbob", "hf_aliceALICEalice", "hf_strangerSTRANGER"
SERVED = {"tokens": {ALICE: "alice", BOB: "bob"}}
WEIGHTS = bytes(range(256)) * 1200
NAMES = {"main", "step1", "step2"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root, gated = tmp_path_factory.mktemp("hub"), {"gated": "auto", "readers": ["carol"]}
    files = {s: {"model.safetensors": WEIGHTS + s.encode(), "e": b""} for s in ("step1", "step2")}
    for name, settings in {"tiny": {}, "secret": {"private": True}, "gated": gated}.items():
        write(root, files, f"alice/{name}")
        (root / "alice" / name / "repo.json").write_text(json.dumps(settings))
    return root


class Watched:
    """A client that never waits, and what it wanted to wait and to say.

    Silence is taken for what it is after half a second; a busy machine needs more for an answer.
    """

    def __init__(self, url, fault=(), **options):
        self.pauses = []
        self.said = []
        options |= {"timeout_seconds": 0.5 if {*fault} & {"silent", "stall"} else 30.0}
        self.client = Client(url, pause=self.pauses.append, say=self.said.append, **options)


def weights(client, repo=REPO, revision="step1"):
    commit = client.commit(repo, revision)
    (file,) = (f for f in client.files(repo, commit) if f.path == "model.safetensors")
    return commit, file


def text_of(error):
    """All that a person or a log could ever see of an error."""
    hint = error.hint if isinstance(error, QauditError) else ""
    return "".join(traceback.format_exception(error)) + repr(error) + hint


def test_the_real_client_takes_the_local_hub_for_the_real_one(hub, tmp_path):
    where = {"endpoint": hub.url, "token": ALICE}
    refs = HfApi(**where).list_repo_refs("alice/secret")
    folder = snapshot_download("alice/secret", revision="step1", cache_dir=tmp_path, **where)
    assert Path(folder).name in {tag.target_commit for tag in refs.tags}
    assert Path(folder, "model.safetensors").read_bytes() == WEIGHTS + b"step1"
    with pytest.raises(RepositoryNotFoundError):
        HfApi(hub.url, token=BOB).model_info("alice/secret")
    assert hub.leaks == []


# ------------------------------------------------------------- faults injected -> what happened
REFS, TREE = (f"GET /api/models/{REPO}/{what}" for what in ("refs", "tree"))
LIMITED = {"match": REFS, "status": 429}
ANSWERED, GIVEN_UP, REFUSED = "answered", UnreachableError, HubError

WHAT_HAPPENS_TO_A_QUESTION = [
    # what the server does, how it ends, and the waits, or how many
    ({"reset": 0, "times": 2}, ANSWERED, 2),
    ({"reset": 0}, GIVEN_UP, TRIES - 1),
    ({"silent": True, "times": 1}, ANSWERED, 1),
    ({"cut": 5, "times": 1}, ANSWERED, 1),
    ({"status": 408, "times": 1}, ANSWERED, 1),
    ({"status": 500, "times": 5}, ANSWERED, 5),
    ({"status": 502, "times": 6}, GIVEN_UP, 5),
    ({"status": 503, "headers": {"Retry-After": "7"}, "times": 1}, ANSWERED, [7.0]),
    ({"status": 504, "times": 1}, ANSWERED, 1),
    ({"status": 429, "headers": {"RateLimit": '"api";r=0;t=55'}, "times": 2}, ANSWERED, [56.0] * 2),
    ({"status": 429, "headers": {"Retry-After": "3"}, "times": 1}, ANSWERED, [3.0]),
    ({"status": 429, "times": 1, "headers": {"RateLimit": '"api";r=9;t=200', "Retry-After": "4"}},
     ANSWERED, [4.0]),
    ({"status": 429, "times": 3}, ANSWERED, 3),
    ({"status": 429, "headers": {"Retry-After": "1"}}, GIVEN_UP, [1.0] * 5),
    ({"status": 429, "headers": {"Retry-After": "3600"}}, GIVEN_UP, []),
    ({"status": 200, "body": b"<html>Log in to the hotel</html>"}, REFUSED, 0),
    ({"status": 200, "body": b""}, REFUSED, 0),
    ({"status": 200, "body": b"[" * 100_000}, REFUSED, 0),
    ({"status": 200, "body": b"[1, 2]"}, REFUSED, 0),
    ({"status": 200, "body": {"branches": [{"name": "main"}], "tags": []}}, REFUSED, 0),
    ({"status": 200, "body": {"tags": [], "branches": [
        {"name": "../../x", "targetCommit": "a" * 40}]}}, REFUSED, 0),
    ({"status": 307, "headers": {"Location": f"/api/models/{REPO}/refs"}}, REFUSED, 0),
    ({"status": 307, "headers": {"Location": "file:///etc/passwd"}}, REFUSED, 0),
    ({"status": 404}, REFUSED, 0),
    ({"status": 418}, REFUSED, 0),
]  # fmt: skip


def test_a_question_survives_or_says_why_not(hub):
    for fault, end, waits in WHAT_HAPPENS_TO_A_QUESTION:
        hub.faults[:] = [{"match": REFS, **fault}]
        seen = Watched(hub.url, fault)
        if end == ANSWERED:
            assert {r.name for r in seen.client.revisions(REPO)} == NAMES, fault
        else:
            with pytest.raises(end) as caught:
                seen.client.revisions(REPO)
            assert REPO in caught.value.message and caught.value.hint, fault
        assert len(seen.pauses) == len(seen.said), fault
        assert waits in (seen.pauses, len(seen.pauses)), fault
        assert sum(seen.pauses) < TRIES * LONGEST_WAIT_SECONDS


def test_a_wait_is_announced_and_a_machine_that_is_not_there_given_up_sooner(hub):
    window = {"RateLimit": '"api";r=0;t=55', "RateLimit-Policy": '"fixed window";"api";q=500;w=300'}
    hub.faults += [{**LIMITED, "headers": window, "times": 1}, {"match": REFS, "status": 503}]
    seen = Watched(hub.url)
    with pytest.raises(UnreachableError, match=r"asked 6 times: it answers 503"):
        seen.client.revisions(REPO)
    assert seen.said[0] == "the Hub asks to wait 56 s (429)"
    assert seen.said[1].startswith(f"the revisions of `{REPO}`: it answers 503; trying again in")
    with socket.socket() as held:  # bound and not listening: refuses
        held.bind(("127.0.0.1", 0))
        seen = Watched(f"http://127.0.0.1:{held.getsockname()[1]}")
        with pytest.raises(UnreachableError, match="no connection") as caught:
            seen.client.revisions(REPO)
    assert len(seen.pauses) == TRIES_UNREACHED - 1
    assert "goes on from here" in caught.value.hint


def test_a_wait_ends_when_everything_is_broken_off(hub):
    hub.faults.append({**LIMITED, "headers": {"Retry-After": "300"}})
    waiting = threading.Event()
    client = Client(hub.url, say=lambda text: waiting.set())
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(client.revisions, REPO)
        waiting.wait()
        client.break_off()
    with pytest.raises(Interrupted, match="stopped while asking"):
        asking.result()
    before = client.requests
    with pytest.raises(Interrupted):
        client.commit(REPO)
    assert client.requests == before


def test_pages_that_do_not_end_are_refused(hub, monkeypatch):
    monkeypatch.setattr("qaudit.hub.api._MOST_PAGES", 20)
    tree = f"{hub.url}/api/models/{REPO}/tree/{'a' * 40}?recursive=true&expand=false"
    around = {"status": 200, "body": [], "headers": {"Link": f'<{tree}>; rel="next"'}}
    hub.faults.append({"match": TREE, **around})
    client = Watched(hub.url).client
    with pytest.raises(HubError, match="do not end"):
        client.files(REPO, "a" * 40)
    assert client.requests == 21


RESOLVE, CDN = "GET /alice/tiny/resolve", "GET /cdn/"
DUE = len(WEIGHTS) + len("step1")


def told(commit, blob, nbytes=DUE, **more):
    headers = {"X-Repo-Commit": commit, "ETag": f'"{blob}"', "X-Linked-Size": str(nbytes)}
    return headers | {name.replace("_", "-"): value for name, value in more.items()}


LIES = [
    (200, lambda c, b: told("d" * 40, b), b"x", "another commit"),
    (200, lambda c, b: {"ETag": b}, b"x", "another commit .*`nothing`"),
    (200, lambda c, b: told(c, "e" * 64), b"x", "another blob"),
    (200, lambda c, b: {"X-Repo-Commit": c}, b"x", "another blob .*`nothing`"),
    (200, lambda c, b: told(c, b, 5), b"x", "another size"),
    (200, told, b"x" * (DUE + 1), "more bytes"),
    (200, lambda c, b: told(c, b, Content_Encoding="gzip"), b"x", "encoding"),
    (206, lambda c, b: told(c, b, Content_Range="bytes 5-9/10"), b"x", "another part"),
    (206, told, b"x", "another part"),
    (416, told, b"x", "fewer bytes"),
    (200, lambda c, b: told(c, "W/" + "e" * 64), b"x", "another blob"),
    (302, lambda c, b: told(c, b, Location="file:///etc/passwd"), b"x", "cannot be trusted"),
]


def test_a_server_that_offers_other_bytes_is_not_believed(hub):
    client = Watched(hub.url).client
    commit, file = weights(client)

    def got(raises, status, headers, body):
        answer = {"match": RESOLVE, "status": status, "headers": headers, "body": body}
        hub.faults[:], came = [answer], b""
        with raises, client.download(REPO, commit, file, 0) as chunks:
            for chunk in chunks:
                came += chunk
        return came

    for status, lie, body, why in LIES:
        raises = pytest.raises(HubError, match=why)
        assert len(got(raises, status, lie(commit, file.blob), body)) <= file.nbytes
    early = pytest.raises(DroppedError, match=f"ended {file.nbytes - 3} bytes early")
    assert got(early, 200, told(commit, file.blob, Content_Length=None), b"xyz") == b"xyz"


def test_a_part_is_asked_for_again(hub):
    for fault, waits in [
        ({"match": CDN, "expired": True, "times": 2}, 2),
        *(({"match": CDN, how: 5, "times": 1}, 1) for how in ("cut", "short", "stall")),
        ({"match": RESOLVE, "status": 503, "times": 3}, 3),
        ({"match": CDN, "norange": True, "times": 1}, 0),
    ]:
        seen = Watched(hub.url, fault)
        commit, file = weights(seen.client)
        hub.faults[:] = [fault]
        assert seen.client.read(REPO, commit, file, 100, 200) == WEIGHTS[100:200], fault
        assert len(seen.pauses) == waits, fault


# ------------------------------------------------------------------------- rights, and the token


def test_without_a_token_private_and_missing_look_the_same(root):
    for bare in (False, True):  # with a code, and as the real Hub sends it
        with Hub(root, https_style_401=bare).running() as hub:
            for name in ("secret", "missing"):
                words = f"`alice/{name}` does not exist, or is private$"
                with pytest.raises(HubError, match=words) as caught:
                    Watched(hub.url).client.revisions(f"alice/{name}")
                assert "hf auth login" in caught.value.hint and "HF_TOKEN" in caught.value.hint


CLOSED = "does not exist, or is private and closed to this token"
WHO_SEES_WHAT = [
    (BOB, lambda c: c.revisions("alice/missing"), f"`alice/missing` {CLOSED}", "check the name"),
    (BOB, lambda c: c.revisions("alice/secret"), CLOSED, "check the name"),
    (BOB, lambda c: c.revisions("alice/missing", "dataset"),
     "dataset `alice/missing` does not exist", "/datasets/alice/missing"),
    (None, lambda c: bytes_of(c, "alice/gated"),
     "`alice/gated` is gated, and you are not logged in", "hf auth login"),
    (BOB, lambda c: bytes_of(c, "alice/gated"),
     "`alice/gated` is gated, and your account has no access", "/alice/gated"),
    (STRANGER, lambda c: c.revisions(REPO), "does not accept the token", "HF_TOKEN"),
    (None, lambda c: c.commit(REPO, "step9"),
     "`alice/tiny` has no revision `step9`", "qaudit series alice/tiny"),
    (None, lambda c: c.files(REPO, "a" * 40),
     f"`alice/tiny` has no revision `{'a' * 40}`", "qaudit series"),
    (None, lambda c: c.file(REPO, c.commit(REPO), "model.bin"),
     "there is no `model.bin` in `", "upper and lower case"),
    (None, lambda c: c.read(REPO, c.commit(REPO), HubFile("model.bin", 8, "", None), 0, 8),
     "there is no `model.bin` in `", "upper and lower case"),
    (None, lambda c: c.revisions("../../etc/passwd"),
     "`../../etc/passwd` is no name of a repository", "org/name"),
]  # fmt: skip


def bytes_of(client, repo):
    commit, file = weights(client, repo)
    with client.download(repo, commit, file, 0) as chunks:
        return sum(map(len, chunks)) - file.nbytes


def test_an_error_says_which_and_what_to_do(hub, caplog):
    caplog.set_level(logging.DEBUG)
    for token, ask, message, hint in WHO_SEES_WHAT:
        seen = Watched(hub.url, token=token)
        with pytest.raises(HubError) as caught:
            ask(seen.client)
        assert message in caught.value.message
        assert hint in caught.value.hint
        assert seen.pauses == []
        shown = text_of(caught.value) + caplog.text + repr(seen.client) + "".join(seen.said)
        assert (token or BOB) not in shown


def test_a_server_that_repeats_the_token(hub, caplog):
    caplog.set_level(logging.DEBUG)
    echo = {"X-Error-Message": f"no: Bearer {BOB}\x1b[31m" + "x" * 999, "X-Error-Code": "Other"}
    for status in (400, 401, 403, 404, 409, 451, 503):
        hub.faults[:] = [{"match": REFS, "status": status, "headers": echo, "body": BOB.encode()}]
        seen = Watched(hub.url, token=BOB)
        with pytest.raises(QauditError) as caught:
            seen.client.revisions(REPO)
        mine = text_of(caught.value) + "".join(seen.said) + repr(vars(seen.client))
        logged = [r.getMessage() for r in caplog.records if "receive_response_headers" not in r.msg]
        assert BOB not in mine + "".join(line for line in logged if "receive_response" not in line)
        assert len(caught.value.message) < 400
        assert caught.value.message.isprintable()


def test_a_403_says_whose_right_is_missing(hub):
    for message, said in (
        ("Access to this resource is disabled.", "`alice/tiny` is disabled"),
        ("token lacks the right", "has no right to read .*token lacks the right"),
        ("", "has no right to read"),
    ):
        headers = {"X-Error-Message": message} if message else {}
        hub.faults[:] = [{"match": REFS, "status": 403, "headers": headers}]
        with pytest.raises(HubError, match=said):
            Watched(hub.url, token=BOB).client.revisions(REPO)


def test_the_token_goes_to_the_hub_and_to_nobody_else_and_only_what_is_asked_for(hub):
    client = Watched(hub.url, token=ALICE).client
    assert bytes_of(client, "alice/secret") == 0
    assert len(hub.log) == client.requests == client.calls + 2
    client.read("alice/secret", *weights(client, "alice/secret"), 0, 8)
    assert {line["cdn"]: line["auth"] for line in hub.log} == {False: True, True: False}
    assert hub.leaks == []
    assert {line["ua"].split("/")[0] for line in hub.log} == {"qaudit"}
    assert not any("agent" in line["path"] or "telemetry" in line["path"] for line in hub.log)


def test_a_question_that_is_led_elsewhere_takes_no_token_along(root, hub):
    with Hub(root, tokens={BOB: "bob"}).running() as other:
        client = Watched(hub.url, token=BOB).client
        tree = f"{other.url}/api/models/{REPO}/tree/{client.commit(REPO)}"
        for led in (
            {"status": 307, "headers": {"Location": tree}},
            {"status": 200, "body": [], "headers": {"Link": f'<{tree}>; rel="next"'}},
        ):
            hub.faults[:] = [{"match": TREE, **led}]
            client.files(REPO, client.commit(REPO))
        HfApi(other.url, token=BOB).list_repo_refs(REPO)  # another use of the library keeps its own
        assert [line["auth"] for line in other.log] == [False, False, True]


def test_a_file_that_lies_elsewhere_is_fetched_without_the_token(root, hub):
    client = Watched(hub.url, token=BOB).client
    commit, file = weights(client)
    with Hub(root).running() as other:
        link = f"/cdn/{file.blob}?X-Signature={other.links.sign()}"
        told_there = told(commit, file.blob) | {"Location": f"{other.url}{link}"}
        hub.faults.append({"match": RESOLVE, "status": 302, "headers": told_there})
        moved = {"Location": f"{other.cdn}{link}"}
        other.faults.append({"match": "/cdn/", "status": 302, "headers": moved, "times": 1})
        with client.download(REPO, commit, file, 0) as chunks:
            assert sum(map(len, chunks)) == file.nbytes
        assert [line["auth"] for line in other.log] == [False, False]
        location = {"Location": f"{other.url}/{REPO}/resolve/{commit}/{file.path}"}
        hub.faults[:] = [{"match": RESOLVE, "status": 302, "headers": location}]
        with pytest.raises(HubError, match=r"another commit .*`nothing`"):
            bytes_of(client, REPO)


def test_a_token_that_no_header_can_hold_is_refused_and_not_shown():
    for token in ("hf_x\nInjected: 1", "hf x", "hf_\u00e9", '"hf_x"\r'):
        with pytest.raises(HubError, match="characters that no token has") as caught:
            Client("http://127.0.0.1:1", token=token)
        assert token not in text_of(caught.value)


# ------------------------------------------------------------------------------ the environment


def test_offline_asks_nothing_and_says_how_to_go_online(hub):
    client = Watched(hub.url, offline=True).client
    file = HubFile("a", 1, "a" * 40, None)
    questions = [
        lambda: client.revisions(REPO),
        lambda: client.commit(REPO),
        lambda: client.files(REPO, "a" * 40),
        lambda: client.file(REPO, "a" * 40, "a"),
        lambda: client.repositories("alice/*"),
        lambda: client.read(REPO, "a" * 40, file, 0, 1),
        lambda: client.download(REPO, "a" * 40, file, 0).__enter__(),
    ]
    for ask in questions:
        with pytest.raises(HubError, match="HF_HUB_OFFLINE") as caught:
            ask()
        assert "HF_HUB_OFFLINE" in caught.value.hint
    assert hub.log == []


def test_the_environment_is_read_at_the_call(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.url + "/")
    monkeypatch.setenv("HF_TOKEN", ALICE)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert Client.from_environment().offline
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    client = Client.from_environment()
    assert client.endpoint == hub.url
    assert {r.name for r in client.revisions("alice/secret")} == NAMES  # the token is sent
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "yes")
    with pytest.raises(HubError, match=r"does not exist, or is private$"):
        Client.from_environment().revisions("alice/secret")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "true")
    assert Client.from_environment().offline
    monkeypatch.delenv("HF_ENDPOINT")
    assert Client.from_environment().endpoint == "https://huggingface.co"


ODD = [
    *(("HF_ENDPOINT", f"http://{host}") for host in ("localhost:99999999", "localhost:x", "[::1")),
    *(("HF_ENDPOINT", text) for text in ("huggingface.co", "ftp://x", "\x1b[31m")),
    ("HF_ENDPOINT", f"https://me:{'emases'[::-1]}@hub.example"),
    *(("HF_HUB_DOWNLOAD_TIMEOUT", text) for text in ("x", "")),
    ("HF_HUB_ETAG_TIMEOUT", "1.5"),
    ("HTTP_PROXY", "http://[::1"),
    ("HTTPS_PROXY", "http://a:b:c"),
    ("ALL_PROXY", "ftp://x"),
    ("all_proxy", "socks5://x"),
    ("SSL_CERT_FILE", "/nowhere/certificates"),
]


@pytest.mark.parametrize(("name", "value"), ODD)
def test_an_odd_variable_is_named(name, value, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught:
        Client.from_environment().revisions(REPO)
    assert f"`{name}`" in caught.value.message
    assert caught.value.message.isprintable()
    assert caught.value.hint
    assert "sesame" not in text_of(caught.value)


@given(text=st.text(max_size=20).filter(lambda text: "\0" not in text))
def test_any_endpoint_is_taken_or_refused(text):
    try:
        Client(text)
    except QauditError as error:
        assert "HF_ENDPOINT" in error.message


PLACES = [
    {},
    {"HF_HOME": "/somewhere/hf"},
    {"HF_HOME": "~/hf"},
    {"HF_HUB_CACHE": "/somewhere/cache"},
    {"HF_HUB_CACHE": "$HOME/cache", "HF_HOME": "/elsewhere"},
    {"HUGGINGFACE_HUB_CACHE": "~/old"},
    {"XDG_CACHE_HOME": "/xdg"},
    {"XDG_CACHE_HOME": "~/xdg", "HOME": "/home/somebody"},
    {"XDG_CACHE_HOME": "/xdg", "HF_HOME": "/hf", "HF_HUB_CACHE": "/cache"},
]


def test_the_shared_cache_is_where_the_library_has_it():
    script = """
import importlib, json, os, sys
from pathlib import Path
from huggingface_hub import constants
from qaudit.checkpoints.stamps import hub_cache
alone = dict(os.environ)
places = []
for named in json.loads(sys.argv[1]):
    os.environ.clear()
    os.environ.update(alone | named)
    importlib.reload(constants)
    places.append((str(Path(constants.HF_HUB_CACHE)), str(hub_cache())))
print(json.dumps(places))
"""
    environment = {"HOME": "/home/nobody", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", script, json.dumps(PLACES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    places = json.loads(done.stdout)
    assert len({theirs for theirs, _ in places}) == len(PLACES)
    for named, (theirs, ours) in zip(PLACES, places, strict=True):
        assert ours == theirs, named


def entry(path, nbytes=1, git_id="a" * 40, sha256=None):
    return [path, nbytes, git_id, sha256]


HOSTILE_TREES = [
    # paths: up, absolute, empty parts, characters, lengths
    *([entry(path)] for path in ("../x", "a/../../x", "/etc/x", "./x", "a//b", "a/", "", "a\\b")),
    *([entry(path)] for path in ("a\0b", "a\nb", "a\x1b[31mb", "a\x9bb", "a\ud800", "a" * 256)),
    [entry("/".join(["a" * 200] * 21))],
    [entry(5)],
    [entry("a"), entry("a")],
    *([entry("a", nbytes)] for nbytes in (-1, "1", 1.5, True, 10**30, None, [1, 2])),
    *([entry("a", 1, git_id)] for git_id in ("abc", "A" * 40, "a" * 40 + "\n", None)),
    *([entry("a", 1, "a" * 40, sha256)] for sha256 in ("../x", ["b" * 64])),
    ["a"],
    [["a", 1]],
    {"a": 1},
    None,
]


def test_a_tree_that_could_do_harm_is_refused_whole():
    for page in HOSTILE_TREES:
        with pytest.raises(GarbledError) as caught:
            files_in([entry("config.json"), *page] if isinstance(page, list) else page)
        assert str(caught.value).isprintable()


def on_the_wire(path, **more):
    return {"type": "file", "path": path, "size": 1, "oid": "a" * 40, **more}


def test_odd_trees_over_the_wire_are_refused_by_name_and_folders_are_no_files(hub):
    client = Watched(hub.url).client
    two_sizes = on_the_wire("x", lfs={"oid": "b" * 64, "size": 2, "pointerSize": 1})
    for file, wrong in (
        (on_the_wire("../../x"), f"the files of `{REPO}`.*makes no sense.*`'../../x'`"),
        (two_sizes, r"the size of `x` is `\[1, 2\]`"),
    ):
        hub.faults[:] = [{"match": TREE, "status": 200, "body": [file]}]
        with pytest.raises(HubError, match=wrong):
            client.files(REPO, "a" * 40)
    folders = [
        {"type": "directory", "path": "../x", "oid": "a" * 40},
        {"type": "submodule", "path": "y", "oid": "a" * 40},
    ]
    tree = [*folders, on_the_wire("a/b"), on_the_wire("a/a")]
    hub.faults[:] = [{"match": TREE, "status": 200, "body": tree}]
    assert [file.path for file in client.files(REPO, "b" * 40)] == ["a/a", "a/b"]
    answer = {"status": 200, "body": [on_the_wire("other.json")]}
    hub.faults[:] = [{"match": f"POST /api/models/{REPO}/paths-info", **answer}]
    with pytest.raises(HubError, match="other files"):
        client.file(REPO, "a" * 40, "config.json")


paths = st.text(st.characters(), max_size=20) | st.from_regex(r"[.a/\\]{0,9}", fullmatch=True)


@given(paths)
def test_a_path_that_is_believed_stays_below_its_folder(path):
    try:
        (file,) = files_in([entry(path)])
    except GarbledError:
        return
    base = Path("/base/folder")
    assert Path(base, file.path).is_relative_to(base)
    assert ".." not in Path(file.path).parts
    assert Path(base, file.path).relative_to(base).as_posix() == path
    file.path.encode()


@given(st.text(max_size=30) | st.from_regex(r"[a-zA-Z0-9_./-]{1,30}", fullmatch=True))
def test_a_repository_has_the_names_that_the_library_takes(name):
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
        valid = True
    except HFValidationError:
        valid = False
    assert is_repository(name) <= valid
    assert valid <= is_repository(name) or name[:1] in "._-" or not name[-1:].isalnum()


WINDOW, EPOCH = '"api";r=0;t=55', "Thu, 01 Jan 1970 00:0"


def test_a_wait_is_read_from_what_the_server_says():
    for status, headers, wait in (
        (429, {"ratelimit": WINDOW}, 56.0),
        (429, {"ratelimit": '"api"; r = 0 ; t = 55'}, 56.0),
        (429, {"ratelimit": '"api";r=3;t=55'}, None),
        (503, {"ratelimit": WINDOW}, None),  # every answer carries it
        (503, {"retry-after": "12"}, 12.0),
        (429, {"retry-after": f"{EPOCH}1:00 GMT"}, 50.0),
        (429, {"retry-after": f"{EPOCH}0:01 GMT"}, 0.0),
        (429, {"retry-after": "-5"}, None),
        (429, {"retry-after": "soon"}, None),
        (429, {}, None),
    ):
        assert requested_wait_seconds(status, headers, now=10.0) == wait, headers


@given(st.integers(1, 50), st.text(), st.sampled_from([None, 429, 503]))
def test_waits_grow_bounded_and_repeatable(failures, call, status):
    dropped = DroppedError("it broke", status=status)
    wait = wait_seconds(dropped, failures, call, "")
    assert 0.0 < wait <= LONGEST_WAIT_SECONDS
    assert wait == wait_seconds(dropped, failures, call, "")
    if failures < 4:
        assert wait < wait_seconds(dropped, failures + 1, call, "") * 1.7
