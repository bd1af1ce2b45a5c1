"""Files over bad lines: whatever breaks, what is handed out is whole and nothing is lost."""

import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.checkpoints import stamps
from qaudit.checkpoints.stamps import content_read, folder_of, text_path
from qaudit.errors import HubError, Interrupted, MachineError, UnreachableError
from qaudit.hub import fetch as fetch_module
from qaudit.hub.answers import DroppedError, HubFile
from qaudit.hub.cache import Snapshot
from qaudit.hub.fetch import Fetcher, Transfer
from qaudit.hub.series import settings_files
from qaudit.types import TextFile, WeightFile
from tests.support.fetching import CONFIG, REPO, REVISIONS, SHARDS, Desk, blobs, sha256, write
from tests.support.hub import Hub

STEP1 = REVISIONS["step1"]["model.safetensors"]
NBYTES = len(STEP1)


def read(folder, checkpoint):
    return [(folder / file.name).read_bytes() for file in checkpoint.files]


# ------------------------------------------------------------------------- what heals by itself

CDN, HUB = "GET /cdn", r"GET /alice/tiny/resolve/.*model\.safetensors"
LIMITED = {"RateLimit": '"resolvers";r=0;t=7'}
ONCE, TWICE = {"match": CDN, "times": 1}, {"match": CDN, "times": 2}
HUB_ONCE, HUB_TWICE = {"match": HUB, "times": 1}, {"match": HUB, "times": 2}
HEALS = [
    ([{**ONCE, "cut": 0}], "broke"),
    ([{"match": CDN, "cut": 20_000, "times": 12}], "broke"),
    ([{**ONCE, "cut": NBYTES - 1}], "broke"),
    ([{**ONCE, "reset": 0}], "broke"),
    ([{**TWICE, "reset": 100_000}], "broke"),
    ([{**ONCE, "stall": 100_000}], "silent"),
    ([{**ONCE, "silent": True}], "silent"),
    ([{**TWICE, "status": 500}], "500"),
    ([{**HUB_TWICE, "status": 503}], "503"),
    ([{**ONCE, "status": 503, "headers": {"Retry-After": "3"}}], "503"),
    ([{**HUB_ONCE, "status": 429, "headers": LIMITED}], "429"),
    ([{**HUB_ONCE, "status": 429, "headers": {"Retry-After": "5"}}], "429"),
    ([{**HUB_TWICE, "status": 429}], "429"),
    ([{**ONCE, "expired": True}], "403"),
    ([{**ONCE, "cut": 50_000}, {**ONCE, "status": 403}], "403"),  # expired after a break
    ([{**ONCE, "short": 100_000}], "early"),
    ([{**ONCE, "cut": 100_000}, {**ONCE, "norange": True}], "broke"),
    ([{**ONCE, "flip": 123_456}], "wrong hash"),
    ([{**ONCE, "flip": 0}], "wrong hash"),
    ([{**ONCE, "flip": 5}, {**ONCE, "cut": 1000}], "wrong hash"),
]


@pytest.mark.parametrize(("faults", "said"), HEALS, ids=str)
def test_what_breaks_off_ends_whole(hub, cache, faults, said):
    desk = Desk(hub, timeout_seconds=0.3 if said == "silent" else 20.0)
    desk.hub.faults += [dict(fault) for fault in faults]
    checkpoint = desk.checkpoint("step1")
    folder = desk.fetcher.weights(checkpoint)
    assert folder == folder_of(checkpoint)
    assert (folder / "model.safetensors").read_bytes() == STEP1
    assert blobs(cache) == {sha256(STEP1)}
    assert said in " ".join(desk.heard)
    assert desk.steps[-1] == ("step1", NBYTES, NBYTES)


WHERE = "`model.safetensors` of `alice/tiny` at `step1`"
A_DAY = {"match": HUB, "status": 429, "headers": {"Retry-After": "86400"}}
ENDS = [
    ({"match": CDN, "cut": 0}, f"{WHERE} broke off at 0"),
    ({"match": CDN, "status": 503}, f"{WHERE} .* 503"),
    ({"match": HUB, "status": 429}, f"{WHERE} .* 429"),
    ({"match": CDN, "silent": True}, f"{WHERE} .* silent"),
    (A_DAY, f"asks to wait 86400 s before it sends {WHERE}"),
    ({"match": CDN, "flip": 7}, f"{WHERE} .* sha256 .* fetched twice"),
]


@pytest.mark.parametrize(("fault", "says"), ENDS, ids=str)
def test_a_break_leaves_no_file(hub, cache, fault, says):
    desk = Desk(hub, options={"tries": 2}, timeout_seconds=0.3 if "silent" in fault else 20.0)
    checkpoint = desk.checkpoint("step1")
    hub.faults.append(dict(fault))
    with pytest.raises(HubError if "flip" in fault else UnreachableError, match=says) as raised:
        desk.fetcher.weights(checkpoint)
    assert isinstance(raised.value, UnreachableError) == ("flip" not in fault)
    assert not folder_of(checkpoint).exists()
    assert blobs(cache) <= {f"{sha256(STEP1)}.incomplete"}
    assert desk.fetcher.nbytes_missing(checkpoint) == NBYTES
    hub.faults.clear()  # and the next time all is well
    assert read(desk.fetcher.weights(checkpoint), checkpoint) == [STEP1]


def test_an_attempt_that_brought_bytes_begins_the_count_anew_and_waits_are_kept(desk):
    halves = [{"match": CDN, "status": 503, "times": 5}, {"match": CDN, "cut": 9000, "times": 1}]
    desk.hub.faults += [dict(fault) for fault in halves * 2]
    checkpoint = desk.checkpoint("step1")
    assert read(desk.fetcher.weights(checkpoint), checkpoint) == [STEP1]
    assert len(desk.pauses) == 12
    desk.pauses.clear()
    desk.hub.faults += [
        {**HUB_ONCE, "status": 429, "headers": LIMITED},
        {**ONCE, "status": 503, "headers": {"Retry-After": "31"}},
    ]
    desk.fetcher.weights(desk.checkpoint("step2"))
    assert desk.pauses == [8.0, 31.0]


def test_what_came_before_a_break_is_not_sent_again(desk):
    desk.hub.faults.append({"match": CDN, "cut": 120_000, "times": 1})
    desk.fetcher.weights(desk.checkpoint("step1"))
    first, second = desk.hub.asked(CDN)
    assert (first["range"], second["range"]) == (None, "bytes=120000-")
    assert first["sent"] + second["sent"] == NBYTES
    assert (desk.fetcher.nbytes_fetched, desk.fetcher.nbytes_verified) == (NBYTES, NBYTES)
    (said,) = desk.heard
    assert said.startswith("model.safetensors broke off at 120.0 of 300.0 kB (")
    assert "going on in" in said


def test_no_transfer_goes_on_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_module, "_MOST_BREAKS", 20)
    line = Line(STEP1, [1] * NBYTES)
    with pytest.raises(UnreachableError, match="in 20 attempts, too often"):
        fetch(_listed(STEP1), tmp_path / "blobs" / "x", line)
    assert line.asked == list(range(20))


# ----------------------------------------------------------------------------- across processes


_FETCH = f"""
import sys
from qaudit.hub.api import Client
from qaudit.hub.fetch import Fetcher
from qaudit.hub.listing import Listing
from qaudit.types import Checkpoint, Ref, WeightFile
url, commit, sha256 = sys.argv[1:]
client = Client(url, timeout_seconds=60)
file = WeightFile("model.safetensors", {NBYTES}, sha256)
Fetcher(client, Listing(client)).weights(Checkpoint(Ref({REPO!r}, "step1"), "x", (file,), commit))
"""


@contextmanager
def another(hub, checkpoint, begun):
    """Have another process fetch the weights, and enter once it has begun."""
    program = [sys.executable, "-c", _FETCH, hub.url, str(checkpoint.commit), sha256(STEP1)]
    process = subprocess.Popen(program, env={**os.environ, "HF_HUB_OFFLINE": "0"})
    while not begun():
        assert process.poll() is None
        threading.Event().wait(0.01)
    yield process


def test_a_killed_process_is_gone_on_with(hub, desk, cache):
    checkpoint, partial = desk.checkpoint("step1"), Snapshot(REPO).partial(sha256(STEP1))
    hub.faults.append({"match": CDN, "stall": 200_000, "times": 1})
    came = lambda: partial.exists() and partial.stat().st_size >= 200_000  # noqa: E731
    with another(hub, checkpoint, came) as process:
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert process.wait() == -signal.SIGKILL
    assert desk.fetcher.nbytes_missing(checkpoint) == 100_000

    hub.log.clear()
    folder = desk.fetcher.weights(checkpoint)
    assert (folder / "model.safetensors").read_bytes() == STEP1
    (asked,) = hub.asked(CDN)
    assert (asked["range"], asked["sent"]) == ("bytes=200000-", 100_000)
    assert blobs(cache) == {sha256(STEP1)}


def test_two_processes_share_one_download(hub, desk):
    checkpoint = desk.checkpoint("step1")  # which the other may send once we were seen to wait
    heard = SimpleNamespace(is_set=lambda: bool(desk.heard))
    hub.faults.append({"match": CDN, "until": heard, "times": 1})
    with another(hub, checkpoint, lambda: bool(hub.asked(CDN))) as process:
        assert read(desk.fetcher.weights(checkpoint), checkpoint) == [STEP1]
        assert process.wait() == 0
    assert len(hub.asked(CDN)) == 1
    assert any("fetched by another process" in text for text in desk.heard)


def test_what_another_run_left_is_believed_only_by_its_hash(desk, cache):
    checkpoint, partial = desk.checkpoint("step1"), Snapshot(REPO).partial(sha256(STEP1))
    partial.parent.mkdir(parents=True)
    wrong = [(bytes(1000), ["bytes=1000-", None])]
    for data, ranges in (*wrong, (STEP1 + b"!", [None]), (STEP1, []), (b"", [None])):
        partial.write_bytes(data)
        desk.heard.clear()
        desk.requests()
        assert read(desk.fetcher.weights(checkpoint), checkpoint) == [STEP1]
        assert [entry["range"] for entry in desk.hub.asked(CDN)] == ranges
        assert len(desk.heard) == (len(ranges) == 2)
        assert blobs(cache) == {sha256(STEP1)}
        assert desk.fetcher.evict(checkpoint) == NBYTES


def test_a_stopped_fetcher_ends_soon_and_keeps_what_came(hub, cache):
    desk = Desk(hub, options={"pause": None})
    checkpoint = desk.checkpoint("step1")
    hub.faults.append({"match": CDN, "cut": 90_000})
    desk.note = lambda text: desk.client.break_off()  # type: ignore[method-assign]
    with pytest.raises(Interrupted, match="stopped"):
        desk.fetcher.weights(checkpoint)
    assert desk.fetcher.nbytes_missing(checkpoint) == NBYTES - 90_000


def test_shards_come_side_by_side_and_shared_ones_once(hub, cache):
    desk = Desk(hub, options={"workers": 3})
    checkpoint, other = desk.checkpoint("step3"), desk.checkpoint("step4")
    bad = rf"GET /cdn/{checkpoint.files[1].sha256}"
    hub.faults += [{"match": bad, "flip": 3}, {"match": CDN, "cut": 1000}]
    with pytest.raises(HubError, match="model-00002-of-00003"):  # which ends the others
        desk.fetcher.weights(checkpoint)
    desk.requests()
    hub.faults[:] = [{"match": CDN, "until": SimpleNamespace(is_set=lambda: asked(hub) == 3)}]
    folder = desk.fetcher.weights(checkpoint)
    assert read(folder, checkpoint) == list(SHARDS.values())
    assert (folder / "model.safetensors.index.json").read_bytes() == b'{"weight_map": {}}'
    hub.faults.clear()
    desk.requests()
    assert desk.fetcher.nbytes_missing(other) == NBYTES
    folder = desk.fetcher.weights(other)
    assert desk.requests(CDN) == 1
    assert read(folder, other)[:2] == list(SHARDS.values())[:2]
    assert len(blobs(cache)) == 5


def asked(hub):
    return len(hub.asked(CDN))


def test_a_damaged_or_edited_file_is_fetched_again(desk, hub, cache):
    checkpoint = desk.checkpoint("step1")
    path = desk.fetcher.weights(checkpoint) / "model.safetensors"
    for damaged in (STEP1[:100] + bytes([STEP1[100] ^ 1]) + STEP1[101:], STEP1[:-1], STEP1 + b"\0"):
        path.write_bytes(damaged)
        desk.heard.clear()
        desk.requests()
        assert (desk.fetcher.weights(checkpoint) / "model.safetensors").read_bytes() == STEP1
        assert desk.requests(CDN) == 1
        assert any("is not what its name says" in text for text in desk.heard)
        assert blobs(cache) == {sha256(STEP1)}
    real = path.resolve()
    for is_new in (False, True):  # in place, and on what may be the same inode
        before = real.stat()
        while real.stat().st_ctime_ns == before.st_ctime_ns:
            if is_new:
                real.unlink()
            real.write_bytes(STEP1[:-1] + bytes([STEP1[-1] ^ 1]))
        os.utime(real, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert content_read(checkpoint) != {"model.safetensors": sha256(STEP1)}
        Desk(hub).fetcher.weights(checkpoint)
        assert real.read_bytes() == STEP1
        assert content_read(checkpoint) == {"model.safetensors": sha256(STEP1)}


def test_hashed_once(desk, hub, cache, monkeypatch):
    monkeypatch.setattr(stamps, "SETTLED_NS", -1)
    checkpoint = desk.checkpoint("step1")
    real = desk.fetcher.weights(checkpoint) / "model.safetensors"
    os.utime(real, ns=(1, 1))  # now it is a file nobody knows
    again, third = Desk(hub), Desk(hub)
    again.fetcher.weights(checkpoint)
    third.fetcher.weights(checkpoint)
    assert (again.fetcher.nbytes_verified, third.fetcher.nbytes_verified) == (NBYTES, 0)
    assert desk.requests() == 2
    assert third.steps == [("step1", NBYTES, NBYTES)]


def test_what_is_on_this_machine_needs_no_hub(desk, hub, tmp_path):
    checkpoint = desk.checkpoint("step3")
    desk.fetcher.settings(checkpoint)
    desk.fetcher.weights(checkpoint)
    hub.stop()
    again = Desk(hub)
    folder = again.fetcher.settings(checkpoint)
    assert read(again.fetcher.weights(checkpoint), checkpoint) == list(SHARDS.values())
    assert (folder / "config.json").read_bytes() == CONFIG
    ref = replace(checkpoint.ref, location=str(tmp_path), revision=None)
    local = replace(checkpoint, commit=None, ref=ref)
    assert again.fetcher.weights(local) == again.fetcher.settings(local) == tmp_path
    assert again.fetcher.nbytes_missing(local) == again.fetcher.evict(local) == 0
    assert again.client.requests == 0


@contextmanager
def _full_after(monkeypatch, nbytes, number):
    """Let files that are written without a buffer take so many bytes and no more."""
    really = io.FileIO.write

    class Full(io.FileIO):
        def write(self, data, /):
            room = nbytes - self.tell()
            if room <= 0:
                raise OSError(number, os.strerror(number))
            return really(self, data[:room])

    def opened(path, mode="r", buffering=-1, **rest):
        return Full(path, mode) if buffering == 0 else open(path, mode, buffering, **rest)  # noqa: PTH123

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)
        yield


def test_a_full_disk_keeps_nothing(desk, monkeypatch):
    checkpoint = desk.checkpoint("step1")
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        full = number != errno.EIO
        said = pytest.raises(MachineError, match="no space left" if full else "cannot be written")
        with _full_after(monkeypatch, 100_000, number), said as raised:
            desk.fetcher.weights(checkpoint)
        assert type(raised.value) is MachineError
        assert desk.fetcher.nbytes_missing(checkpoint) == NBYTES - (0 if full else 100_000)
    assert read(desk.fetcher.weights(checkpoint), checkpoint) == [STEP1]
    desk.requests()
    usage = shutil.disk_usage("/")._replace(free=2 * NBYTES)  # room for every shard, not for all
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(MachineError, match=r"step3 needs 900 kB more, and 600 kB are free"):
        desk.fetcher.weights(desk.checkpoint("step3"))
    assert not desk.requests(CDN)  # before the first byte


def test_each_file_looks_for_room(tmp_path, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=NBYTES - 1001)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    line, partial = Line(STEP1, []), tmp_path / "partial"
    partial.write_bytes(STEP1[:1000])
    with pytest.raises(MachineError, match="are free"):
        fetch(_listed(STEP1), partial, line)
    partial.write_bytes(STEP1[:1001])
    fetch(_listed(STEP1), partial, line)
    assert line.asked == [1001]


def test_a_path_that_leaves_and_a_hash_that_is_none_are_refused(desk, cache):
    checkpoint = desk.checkpoint("step1")
    for path in ("../evil", "/etc/evil", "a/../../evil", "a//evil", "./evil", "", "a\\evil",
                 "a\nevil", "a/."):  # fmt: skip
        bad = TextFile("hf://datasets/a/b/x", "alice/tiny", "1" * 40, path, 3, sha256(b"abc"))
        with pytest.raises(HubError, match="not a plain path"):
            desk.fetcher.text(bad)
        evil = replace(checkpoint, files=(WeightFile(path, 3, sha256(b"abc")),))
        with pytest.raises(HubError, match="not a plain path"):
            desk.fetcher.weights(evil)
    assert not list(cache.rglob("*evil*"))
    for identity in ("../../evil", "git:../evil", "abc", "", "G" * 64):
        evil = replace(checkpoint, files=(WeightFile("model.safetensors", 3, identity),))
        with pytest.raises(HubError, match="is not the hash of a file"):
            desk.fetcher.weights(evil)


def test_nothing_is_written_through_a_link(desk, cache, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    text = TextFile("x", REPO, desk.listing.commit(REPO, "step1"), "sub/x.txt", 0, sha256(b""))
    snapshots = cache / "datasets--alice--tiny" / "snapshots"
    for place in (snapshots / text.commit / "sub", snapshots / text.commit, snapshots):
        if place.exists():
            shutil.rmtree(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(elsewhere)
        with pytest.raises(HubError, match="not a folder of its own"):
            desk.fetcher.text(text)
        assert list(elsewhere.iterdir()) == []


# ------------------------------------------------------------------------------------ settings


def test_equal_files_come_once_and_a_missing_config_is_named(cache, tmp_path):
    files = {"config.json": CONFIG, "generation_config.json": CONFIG, "vocab.json": CONFIG}
    write(tmp_path / "hub", {"only": files, "bare": {"README.md": b"#"}})
    with Hub(tmp_path / "hub").running() as hub:
        desk = Desk(hub)
        folder = desk.fetcher.settings(desk.checkpoint("only"))
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
        assert len(hub.asked("GET .*resolve-cache")) == 1
        with pytest.raises(HubError, match=r"no `config.json` in `alice/tiny@bare`"):
            desk.fetcher.settings(desk.checkpoint("bare"))


ROOT_TOKENS = "tokenizer.json special_tokens_map.json"
ROOT_ALL = f"config.json generation_config.json preprocessor_config.json {ROOT_TOKENS}"
OF_B = "b/config.json b/tokenizer.model"
STORED = f"{ROOT_ALL} {OF_B} modeling.py model.safetensors.index.json a/config.json b/modeling.py"


def test_a_folder_has_all_its_settings_from_itself_or_above(cache, tmp_path):
    stored = [*STORED.split(), *(f"{folder}/model.safetensors" for folder in "abc")]
    write(tmp_path / "hub", {"main": {path: path.encode() for path in stored}})
    with Hub(tmp_path / "hub").running() as hub:
        for subfolder, code, expected in (
            (None, False, f"{ROOT_ALL} model.safetensors.index.json"),
            ("a", False, f"a/config.json {ROOT_TOKENS}"),
            ("b", False, OF_B),
            ("c", False, ROOT_ALL),
            ("b", True, f"{OF_B} b/modeling.py"),
            ("a", True, f"a/config.json modeling.py {ROOT_TOKENS}"),
        ):
            desk = Desk(hub)
            checkpoint = desk.checkpoint("main", subfolder=subfolder)
            folder = desk.fetcher.settings(checkpoint, code=code)
            assert folder == folder_of(checkpoint)
            found = {p.name: p.read_text() for p in folder.iterdir() if p.is_file()}
            assert found == {Path(source).name: source for source in expected.split()}
            if subfolder:
                desk.fetcher.weights(checkpoint)
                file = folder / "model.safetensors"
                assert file.read_text() == f"{subfolder}/model.safetensors"
                file.unlink()
    listed = [HubFile("config.json", 10, "0" * 40, None), HubFile("a.model", 10**8, "1" * 40, None)]
    assert [path for _, path in settings_files(listed, None)] == ["config.json"]


_names = st.sampled_from([
    "config.json", "tokenizer.json", "tokenizer.model", "vocab.txt", "x.py", "spiece.model",
    "model.safetensors", "chat_template.jinja", "additional_chat_templates/tools.jinja",
])  # fmt: skip
_paths = st.builds(lambda folders, name: "/".join([*folders, name]),
                   st.lists(st.sampled_from("ab"), max_size=2), _names)  # fmt: skip


@given(st.sets(_paths), st.sampled_from([None, "a", "a/b"]), st.booleans())
def test_settings_come_from_above(paths, subfolder, code):
    files = [HubFile(path, 1, sha256(path.encode())[:40], None) for path in sorted(paths)]
    placed = settings_files(files, subfolder, code=code)
    start = f"{subfolder}/" if subfolder else ""
    names = [path for _, path in placed]
    assert len(set(names)) == len(names)
    for file, path in placed:
        assert path.startswith(start)
        inside = path[len(start) :]
        assert not inside.endswith(".safetensors")
        assert code or not inside.endswith(".py")
        above = file.path.removesuffix(inside)
        assert start.startswith(above)
    beside = {path for path in paths if path == f"{start}config.json"}
    assert beside <= {file.path for file, _ in placed}


def test_a_text_of_a_dataset_comes_the_same_way(cache, tmp_path):
    lines = b'{"text": "hello"}\n' * 9000
    folder = tmp_path / "hub" / "datasets" / "alice" / "web" / "main" / "en"
    folder.mkdir(parents=True)
    (folder / "one.jsonl").write_bytes(lines)
    with Hub(tmp_path / "hub").running() as hub:
        desk = Desk(hub)
        commit = desk.listing.commit("alice/web", "main", "dataset")
        file = desk.listing.file("alice/web", commit, "en/one.jsonl", "dataset")
        text = TextFile("x", "alice/web", commit, file.path, file.nbytes, file.identity)
        assert text.sha256.startswith("git:")
        hub.faults += [
            {"match": "GET .*one.jsonl", "cut": 70_000, "times": 1, "skip": 1},
            {"match": "GET .*resolve-cache", "flip": 9, "times": 1},
        ]
        path = desk.fetcher.text(text)
        assert path == text_path(text)
        assert path.read_bytes() == lines
        assert path.is_relative_to(cache / "datasets--alice--web")
        assert sum("wrong hash" in said for said in desk.heard) == 1
        hub.log.clear()
        assert desk.fetcher.text(text) == path
        assert not hub.log


class Line:
    """A source that brings so many bytes at each attempt and then breaks off."""

    def __init__(self, data, brings):
        self.data, self.brings, self.asked = data, list(brings), list[int]()
        self.stopped = threading.Event()

    @contextmanager
    def download(self, repo, commit, file, start, **rest):
        self.asked.append(start)
        brings = self.brings.pop(0) if self.brings else len(self.data)

        def pieces():
            yield self.data[start : start + brings]
            if start + brings < len(self.data):
                raise DroppedError("it broke")

        yield pieces()


def fetch(file, partial, line, counted=None):
    """Fetch one file over a line, and count what is there of it."""
    counted = [] if counted is None else counted
    progress = SimpleNamespace(advance=lambda blob, nbytes: counted.append(nbytes))
    listing = None
    fetcher = Fetcher(line, listing, pause=lambda seconds: None)
    snapshot = Snapshot(REPO, commit="c" * 40, revision="c" * 40, label="x")
    Transfer(fetcher, snapshot, file, progress).fetch(partial)


def _listed(data):
    return HubFile("x.safetensors", len(data), "0" * 40, sha256(data))


@given(
    data=st.binary(max_size=60),
    had=st.binary(max_size=70) | st.none(),
    good=st.booleans(),
    brings=st.lists(st.integers(1, 30), max_size=12),
)
def test_whatever_was_there_and_wherever_it_breaks_the_bytes_are_right(
    tmp_path_factory, data, had, good, brings
):
    partial = tmp_path_factory.mktemp("x") / "partial"
    if had is not None:
        partial.write_bytes(data[: len(had)] if good else had)
    counted = []
    line = Line(data, brings)
    fetch(_listed(data), partial, line, counted)
    assert partial.read_bytes() == data
    assert sum(counted) == len(data)


def test_two_hosts_without_locks(hub, cache, monkeypatch):
    desks = [Desk(hub), Desk(hub)]
    checkpoint = desks[0].checkpoint("step1")
    for number in (errno.ENOLCK, errno.ENOSYS):
        refusing = Mock(side_effect=OSError(number, os.strerror(number)))
        monkeypatch.setattr("fcntl.flock", refusing)
        desks[0].requests()
        both = SimpleNamespace(is_set=lambda: asked(hub) == 2)
        hub.faults[:] = [{"match": CDN, "until": both}]
        with ThreadPoolExecutor(2) as pool:
            folders = list(pool.map(lambda desk: desk.fetcher.weights(checkpoint), desks))
        assert [read(folder, checkpoint) for folder in folders] == [[STEP1], [STEP1]]
        assert blobs(cache) == {sha256(STEP1)}
        shutil.rmtree(cache)
