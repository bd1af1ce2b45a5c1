"""What the listing remembers, what it asks, and how often: the number of calls is a promise."""

import json
import math
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.checkpoints.safetensors import headers
from qaudit.errors import HubError, UnreachableError
from qaudit.hub.answers import is_commit
from qaudit.hub.api import Client
from qaudit.hub.listing import FIRST_NBYTES, Listing
from tests.support.fetching import write
from tests.support.hub import Hub

REPO, SHARDED = "alice/tiny", "alice/sharded"


def safetensors(tensors, *, fill=0):
    """Bytes of a file of bf16 tensors."""
    table, at = {}, 0
    for name, shape in tensors.items():
        nbytes = 2 * math.prod(shape)
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    header = json.dumps(table).encode()
    return struct.pack("<Q", len(header)) + header + bytes([fill]) * at


def put(root, repo, revision, files):
    write(root, {revision: {"config.json": b"{}", **files}}, repo)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    for step in (1, 2):
        tensors = {"embed": (8, 4), "head": (4, 8)}
        put(root, REPO, f"step{step}", {"model.safetensors": safetensors(tensors, fill=step)})
    put(root, REPO, "step2-again", {"model.safetensors": safetensors(tensors, fill=2)})
    long = {f"model.layers.{n}." + "x" * 180: (2,) for n in range(1000)}  # past one request
    assert len(safetensors(long)) > FIRST_NBYTES
    shards = [safetensors({"a": (3, 3)}), safetensors(long), safetensors({"b": (5,)})]
    names = [f"model-0000{k + 1}-of-00003.safetensors" for k in range(3)]
    put(root, SHARDED, "final", dict(zip(names, shards, strict=True)))
    return root


SERVED = {"page": 2}


def listing(hub, folder, **options):
    return Listing(Client(hub.url, pause=lambda seconds: None, **options), folder)


def weights(files):
    return [file for file in files if file.path.endswith(".safetensors")]


def test_the_calls_of_a_plan_are_counted(hub, tmp_path):
    mine = listing(hub, tmp_path)
    client = mine.client
    names = mine.revisions(REPO)
    commits = [mine.commit(REPO, revision.name) for revision in names]
    assert (client.calls, client.requests) == (1, 1)  # all names: one call

    trees = {commit: mine.files(REPO, commit) for commit in commits}
    assert len(trees) == 3  # main is step2-again
    pages = 2  # three files, two on a page
    assert client.requests == 1 + 3 * pages

    before = client.requests
    shapes = [mine.shapes(REPO, commit, weights(files)) for commit, files in trees.items()]
    assert shapes[0] == {"embed": ("BF16", (8, 4)), "head": ("BF16", (4, 8))}
    assert shapes[1] == shapes[2]
    # step2 and step2-again are the same bytes: two contents, a link and a range each
    assert client.requests == before + 2 * 2
    assert client.calls == 1 + 3  # ranges are no questions

    for again in (mine, listing(hub, tmp_path)):  # this process, and the next
        asked = again.client.requests
        for commit, files in trees.items():
            assert again.files(REPO, commit) == files
            assert again.shapes(REPO, commit, weights(files)) is not None
            assert again.commit(REPO, commit) == commit
        assert again.client.requests == asked


def test_a_name_becomes_a_commit_or_is_told_the_nearest(hub, tmp_path):
    mine = listing(hub, tmp_path)
    with ThreadPoolExecutor(8) as pool:  # threads ask for names once
        found = set(pool.map(lambda n: mine.commit(REPO), range(16)))
    assert found == {mine.commit(REPO, "main")} == {mine.commit(REPO, "refs/heads/main")}
    commit = mine.commit(REPO, "step1")
    assert is_commit(commit)
    assert mine.commit(REPO, "refs/tags/step1") == commit
    with pytest.raises(HubError, match=f"`{REPO}` has no revision `stepp1`") as caught:
        mine.commit(REPO, "stepp1")
    assert caught.value.hint == "did you mean `step1`?"
    with pytest.raises(HubError) as caught:
        mine.commit(REPO, "quite-another-thing")
    assert "qaudit series" in caught.value.hint
    assert mine.client.requests == 1
    assert mine.commit(REPO, commit[:12]) == commit  # a short id takes a call of its own
    assert mine.client.requests == 2


def test_a_branch_comes_first_and_a_pull_request_is_asked_for(hub, tmp_path):
    names = {
        "branches": [{"name": "v1", "ref": "x", "targetCommit": "b" * 40}],
        "converts": [],
        "tags": [{"name": "v1", "ref": "y", "targetCommit": "a" * 40}],
    }
    answer = {"status": 200, "body": {"id": REPO, "sha": "c" * 40}}
    hub.faults.append({"match": f"/api/models/{REPO}/refs", "status": 200, "body": names})
    hub.faults.append({"match": "/revision/refs%2Fpr%2F1$", **answer})
    mine = listing(hub, tmp_path)
    assert mine.commit(REPO, "v1") == "b" * 40
    assert mine.commit(REPO, "refs/tags/v1") == "a" * 40
    assert mine.commit(REPO, "refs/pr/1") == "c" * 40


def test_offline_names_are_those_last_seen(hub, tmp_path):
    names = listing(hub, tmp_path).revisions(REPO)
    hub.stop()
    said = []
    offline = listing(hub, tmp_path, offline=True, say=said.append)
    assert offline.revisions(REPO) == names
    assert offline.commit(REPO, "step1") == next(r.commit for r in names if r.name == "step1")
    assert len(said) == 1
    assert f"the revisions of `{REPO}` are those of 20" in said[0]
    with pytest.raises(UnreachableError):
        listing(hub, tmp_path).revisions(REPO)


def test_a_header_takes_a_range_and_a_long_one_two(hub, root, tmp_path):
    mine = listing(hub, tmp_path)
    commit = mine.commit(SHARDED)
    shards = weights(mine.files(SHARDED, commit))
    found = mine.shapes(SHARDED, commit, shards)
    expected = {}
    for path in (root / SHARDED / "final").glob("*.safetensors"):
        alone = tmp_path / path.stem
        alone.mkdir()
        (alone / "model.safetensors").symlink_to(path)
        expected |= {name: (info.dtype, info.shape) for name, info in headers(alone).items()}
    assert found == expected
    assert len(found) == 1002
    ranges = [entry["range"] for entry in hub.log if entry["cdn"]]
    long = f"bytes={FIRST_NBYTES}-"
    assert [span for span in ranges if not span.startswith(long)] == [
        f"bytes=0-{min(FIRST_NBYTES, shard.nbytes) - 1}" for shard in shards
    ]
    assert len(ranges) == 3 + 1


BROKEN = [
    b"",
    b"\x02" + b"\0" * 6,
    struct.pack("<Q", 10_000) + b"{}",  # a header longer than the file
    struct.pack("<Q", 10**11) + b"{}",
    struct.pack("<Q", 5) + b"hello",
    struct.pack("<Q", 50_000) + b"[" * 50_000,
    struct.pack("<Q", 2) + b"[]",
    struct.pack("<Q", 21) + b'{"a": {"dtype": "U8"}}'[:21],
    safetensors({"a": (4, 4)})[:-1],  # a tensor past the end
    b"<!doctype html><html><head><title>Not the weights</title>" * 20,
]


def test_a_header_that_is_none_or_of_another_blob_is_refused_by_name(tmp_path):
    root = tmp_path / "root"
    for number, content in enumerate(BROKEN):
        put(root, REPO, f"v{number:02}", {"model.safetensors": content})
    shards = {f"model-{k}.safetensors": safetensors({"a": (k,)}) for k in (1, 2)}
    put(root, REPO, "twice", shards)
    put(root, REPO, "long", {"model.safetensors": b""})
    with (root / REPO / "long" / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(100_000_100)  # a hole: it takes no room
    with Hub(root).running() as hub:
        mine = listing(hub, tmp_path / "store")

        def refused(revision, match):
            commit = mine.commit(REPO, revision)
            with pytest.raises(HubError, match=match.replace("COMMIT", commit)):
                mine.shapes(REPO, commit, weights(mine.files(REPO, commit)))

        for number in range(len(BROKEN)):
            refused(f"v{number:02}", f"{REPO}/model.safetensors.*COMMIT")
        refused("twice", r"tensor `a` is in `model-2.safetensors`")
        hub.log.clear()
        refused("long", "is not a safetensors file")
        assert [entry["range"] for entry in hub.log if entry["cdn"]] == ["bytes=0-131071"]
        other = {"X-Linked-ETag": f'"{"e" * 64}"', "ETag": f'"{"e" * 64}"'}
        hub.faults.append({"match": "/resolve/", "headers": other})
        mine = listing(hub, tmp_path / "another")
        refused("v08", "another blob")


def kept_files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


DAMAGE = [b"", None, b"[1, 2, 3]", b"\xff\xfe\x00", b"[" * 100_000, b'{"key": ["trees"]}', b"{}"]


def test_a_damaged_record_is_as_good_as_absent(hub, tmp_path):
    mine = listing(hub, tmp_path)
    commit = mine.commit(REPO, "step1")
    files = mine.files(REPO, commit)
    shapes = mine.shapes(REPO, commit, weights(files))
    assert len(kept_files(tmp_path)) == 3
    for damage in DAMAGE:
        for path in kept_files(tmp_path):
            path.write_bytes(path.read_bytes()[:-7] if damage is None else damage)
        again = listing(hub, tmp_path)
        assert again.known_files(REPO, commit) is None
        assert again.files(REPO, commit) == files
        assert again.shapes(REPO, commit, weights(files)) == shapes
        with pytest.raises(HubError):
            listing(hub, tmp_path, offline=True).revisions(REPO)
        third = listing(hub, tmp_path)  # mended by the second
        assert third.shapes(REPO, commit, weights(third.files(REPO, commit))) == shapes
        assert third.client.requests == 0
        third.revisions(REPO)


def test_what_lies_on_the_disk_is_believed_no_more_than_the_wire(hub, tmp_path):
    for number, value in enumerate(
        [[["../../x", 1, "a" * 40, None]], [["x", -1, "a" * 40, None]], {"path": "x"}, None]
    ):
        mine = listing(hub, tmp_path / f"trees {number}")
        commit = mine.commit(REPO)
        mine._record(("trees", REPO, "model", commit), value)
        assert mine.known_files(REPO, commit) is None
        assert len(mine.files(REPO, commit)) == 3
    (file,) = weights(mine.files(REPO, commit))
    for number, value in enumerate(
        [[["a", "BF16", [-1]]], [["a", "BF16"]], [["a", 5, [1]]], [["a", "F", [1]]] * 2, ["abc"], 5]
    ):
        mine = listing(hub, tmp_path / f"headers {number}")
        mine._record(("headers", file.identity, str(file.nbytes)), value)
        assert mine.shapes(REPO, commit, [file])
        assert mine.client.requests > 0


def test_one_hub_does_not_answer_for_another(root, hub, tmp_path):
    mine = listing(hub, tmp_path)
    commit = mine.commit(REPO)
    files = mine.files(REPO, commit)
    assert mine.known_files(REPO, commit) == files
    assert mine.known_files(REPO, commit, "dataset") is None
    with Hub(root).running() as other:
        theirs = listing(other, tmp_path)
        assert theirs.known_files(REPO, commit) is None
        assert theirs.files(REPO, commit) == files
        assert theirs.client.requests == 1


@given(st.lists(st.text(), min_size=1, max_size=4), st.sampled_from(["trees", "headers"]))
def test_no_name_leaves_the_folder(key, shelf):
    path = Listing(Client("http://127.0.0.1:1"), Path("/store"))._path((shelf, *key))
    assert path.parent == Path(f"/store/v1/{shelf}")
    assert path.name.removesuffix(".json").isalnum()


def test_a_place_that_is_no_folder_keeps_nothing(hub, tmp_path):
    folder = tmp_path / "store"
    folder.write_text("in the way")
    mine = listing(hub, folder)
    commit = mine.commit(REPO)
    files = mine.files(REPO, commit)
    assert mine.shapes(REPO, commit, weights(files))
    asked = mine.client.requests
    assert mine.shapes(REPO, commit, weights(mine.files(REPO, commit)))
    assert mine.client.requests == asked  # in this process it remembers all the same


def test_nothing_is_half_written(hub, tmp_path, monkeypatch):
    mine = listing(hub, tmp_path)
    monkeypatch.setattr(Path, "replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        mine.revisions(REPO)
    assert kept_files(tmp_path) == []
