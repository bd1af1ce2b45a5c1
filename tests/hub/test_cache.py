"""One cache for every tool: the client reads what we write, we what it wrote, and theirs stays."""

import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock
from huggingface_hub import hf_hub_download, scan_cache_dir, snapshot_download
from hypothesis import given
from hypothesis import strategies as st

from qaudit.checkpoints.stamps import Stamp, folder_of, own_cache
from qaudit.errors import MachineError
from qaudit.hub import cache as holding_module
from qaudit.hub.cache import Claims, Ledger, Snapshot
from tests.support.fetching import REPO, REVISIONS, Desk, blobs, sha256

STEP1 = REVISIONS["step1"]["model.safetensors"]
NBYTES = len(STEP1)
CDN = "GET /cdn"


def theirs(hub, cache, checkpoint, file=None, **options):
    """Have the client download a revision, or a file of it."""
    where = {"cache_dir": cache, "endpoint": hub.url, "token": False, **options}
    where |= {"revision": checkpoint.commit}
    snapshot_download(REPO, **where) if file is None else hf_hub_download(REPO, file, **where)


def tree(cache):
    """Return what a repository's folder holds: links by where they lead, files by their hash."""
    folder = cache / "models--alice--tiny"
    return {
        path.relative_to(folder).as_posix(): (
            str(path.readlink()) if path.is_symlink() else sha256(path.read_bytes())
        )
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_the_client_fetches_only_the_rest(desk, cache, tmp_path):
    checkpoint = desk.checkpoint("step3")
    desk.fetcher.settings(checkpoint)
    desk.fetcher.weights(checkpoint)
    theirs(desk.hub, tmp_path / "other", checkpoint)
    mine, other = tree(cache), tree(tmp_path / "other")
    assert mine == {path: other[path] for path in mine}
    rest = {Path(path).name for path in other.keys() - mine.keys() if path.startswith("snapshots")}
    assert rest == {"README.md", ".gitattributes"}
    desk.fetcher.weights(desk.checkpoint("step1"))
    scanned = scan_cache_dir(cache)
    assert (scanned.warnings, scanned.incomplete_files) == ([], frozenset())
    (repo,) = scanned.repos
    assert (repo.repo_id, repo.repo_type) == (REPO, "model")
    assert {r.commit_hash for r in repo.revisions} >= {checkpoint.commit}
    desk.requests()
    theirs(desk.hub, cache, checkpoint)
    assert desk.requests(CDN) == 0


def test_what_the_client_fetched_is_verified_and_never_evicted(desk, cache):
    checkpoint = desk.checkpoint("step3")
    theirs(desk.hub, cache, checkpoint)
    desk.requests()
    before = tree(cache)
    assert desk.fetcher.nbytes_missing(checkpoint) == 0
    desk.fetcher.settings(checkpoint)
    desk.fetcher.weights(checkpoint)
    assert desk.requests() == 0
    assert desk.fetcher.nbytes_verified > 3 * NBYTES
    assert desk.fetcher.evict(checkpoint) == 0
    assert tree(cache) == before
    checkpoint = desk.checkpoint("step1")
    theirs(desk.hub, cache, checkpoint)
    blob = Snapshot(REPO).blob(sha256(STEP1))
    for damaged in (b"!" + STEP1[1:], STEP1[:77]):
        blob.write_bytes(damaged)
        desk.heard.clear()
        desk.requests()
        desk.fetcher.weights(checkpoint)
        assert desk.requests(CDN) == 1
        (said,) = desk.heard
        assert "which was there before" in said
        assert desk.fetcher.evict(checkpoint) == 0
        assert blob.read_bytes() == STEP1


def test_files_that_lie_elsewhere_are_used(desk, cache, tmp_path):
    checkpoint = desk.checkpoint("step1")
    place = folder_of(checkpoint) / "model.safetensors"
    place.parent.mkdir(parents=True)
    place.write_bytes(STEP1)
    desk.fetcher.weights(checkpoint)
    assert desk.requests(CDN) == 0
    assert not place.is_symlink()
    place.write_bytes(b"?" * NBYTES)
    desk.fetcher.weights(checkpoint)
    assert place.read_bytes() == STEP1
    assert any("is not what the Hub lists" in said for said in desk.heard)
    assert desk.fetcher.evict(checkpoint) == 0
    shutil.rmtree(cache)  # the client links blobs into a store where files come by their xet hash
    desk.requests()
    stored, blob = tmp_path / "stored", Snapshot(REPO).blob(sha256(STEP1))
    stored.write_bytes(STEP1)
    blob.parent.mkdir(parents=True)
    blob.symlink_to(stored)
    desk.fetcher.weights(checkpoint)
    assert desk.requests(CDN) == 0
    assert desk.fetcher.evict(checkpoint) == 0
    stored.write_bytes(b"damaged")
    desk.fetcher.weights(checkpoint)
    assert (blob.is_symlink(), blob.read_bytes()) == (False, STEP1)
    assert stored.read_bytes() == b"damaged"


def test_a_cache_only_to_be_read(desk, cache, monkeypatch):
    checkpoint = desk.checkpoint("step1")
    theirs(desk.hub, cache, checkpoint)

    def guarded(really):
        def method(path, *rest, **named):
            if path.is_relative_to(cache):
                raise PermissionError(13, "Permission denied")
            return really(path, *rest, **named)

        return method

    for name in ("mkdir", "symlink_to", "touch", "replace", "unlink"):
        monkeypatch.setattr(Path, name, guarded(getattr(Path, name)))
    assert (desk.fetcher.weights(checkpoint) / "model.safetensors").read_bytes() == STEP1
    with pytest.raises(MachineError, match="cannot be written: permission denied") as raised:
        desk.fetcher.weights(desk.checkpoint("step2"))
    assert "HF_HUB_CACHE" in raised.value.hint


def test_evicting_removes_what_was_brought_and_leaves_the_settings(desk, cache):
    checkpoint = desk.checkpoint("step3")
    desk.fetcher.settings(checkpoint)
    before = tree(cache)
    desk.fetcher.weights(checkpoint)
    assert desk.fetcher.evict(checkpoint) == 3 * NBYTES
    assert tree(cache) == before
    assert scan_cache_dir(cache).warnings == []
    assert desk.fetcher.nbytes_missing(checkpoint) == 3 * NBYTES
    desk.requests()
    desk.fetcher.settings(checkpoint)
    assert desk.requests(".*") == 0


def _claim(checkpoint):
    return Snapshot(REPO).lock(f"{checkpoint.commit}.qaudit")


def test_what_another_scan_uses_stays(desk, hub):
    checkpoint = desk.checkpoint("step1")
    other = Desk(hub)
    desk.fetcher.weights(checkpoint)
    other.fetcher.weights(checkpoint)
    assert desk.fetcher.evict(checkpoint) == 0
    assert any("used by another scan" in said for said in desk.heard)
    # A lock that a process holds for a moment keeps nothing.
    moment = threading.Timer(0.05, other.fetcher._claims.release, [_claim(checkpoint)])
    moment.start()
    assert desk.fetcher.evict(checkpoint) == NBYTES
    moment.join()


def test_a_blob_that_revisions_share_or_that_is_needed_goes_last(desk, cache):
    third, fourth = desk.checkpoint("step3"), desk.checkpoint("step4")
    desk.fetcher.weights(third)
    desk.fetcher.weights(fourth)
    assert desk.fetcher.evict(third) == NBYTES
    assert (folder_of(fourth) / "model-00001-of-00003.safetensors").read_bytes()
    assert desk.fetcher.evict(fourth) == 3 * NBYTES
    assert scan_cache_dir(cache).warnings == []
    first, same = desk.checkpoint("step1"), desk.checkpoint("step5")
    desk.fetcher.weights(first)
    assert desk.fetcher.evict(first, keep=[same]) == 0
    assert desk.fetcher.nbytes_missing(same) == 0
    desk.requests()
    desk.fetcher.weights(same)
    assert desk.requests(CDN) == 0
    with FileLock(Snapshot(REPO).lock(sha256(STEP1))):
        assert desk.fetcher.evict(same) == 0
    assert desk.fetcher.evict(same) == NBYTES


def test_a_blob_of_somebody_else_is_theirs_and_half_of_one_is_not(desk, cache):
    first, same = desk.checkpoint("step1"), desk.checkpoint("step5")
    partial = Snapshot(REPO).partial(sha256(STEP1))
    desk.hub.faults += [{"match": CDN, "cut": 5000, "times": 1}, {"match": CDN, "flip": 1}]
    with pytest.raises(Exception, match="fetched twice"):
        desk.fetcher.weights(first)
    partial.write_bytes(b"x" * 4000)
    assert desk.fetcher.evict(first) == 4000
    assert blobs(cache) == set()
    desk.hub.faults.clear()
    desk.fetcher.weights(first)
    theirs(desk.hub, cache, same)
    assert desk.fetcher.evict(first) == 0
    assert desk.fetcher.evict(same) == 0
    assert (folder_of(same) / "model.safetensors").read_bytes() == STEP1
    assert not (folder_of(first) / "model.safetensors").is_symlink()
    shutil.rmtree(cache)
    desk.fetcher.weights(first)
    theirs(desk.hub, cache, first, "model.safetensors", force_download=True)
    assert desk.fetcher.evict(first) == 0
    assert blobs(cache) == {sha256(STEP1)}


def test_a_kill_before_the_rename(desk, cache, monkeypatch):
    """The ledger is written first; until the rename it is about a file that is not there."""
    checkpoint = desk.checkpoint("step1")

    def die(path, to):
        raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Path, "replace", die)
        desk.fetcher.weights(checkpoint)
    desk.fetcher._claims.release(_claim(checkpoint))
    assert blobs(cache) == {f"{sha256(STEP1)}.incomplete"}
    theirs(desk.hub, cache, checkpoint)
    desk.fetcher.weights(checkpoint)
    assert desk.fetcher.evict(checkpoint) == NBYTES  # what the killed run had left
    assert blobs(cache) >= {sha256(STEP1)}


@given(st.lists(st.binary(max_size=30), max_size=8))
def test_torn_lines_are_skipped(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("ledger")
    file, path = folder / "file", folder / "brought.jsonl"
    file.write_bytes(b"one")
    path.write_bytes(b"\n".join(lines))
    Ledger(path).add(file, Stamp.of(file), "x", downloaded=True)
    with path.open("ab") as torn:
        torn.write(b'["/torn", 1, 2')
    ledger = Ledger(path)
    assert ledger.has(file)
    file.write_bytes(b"two")
    os.utime(file, ns=(5, 5))
    assert not ledger.has(file)
    ledger.add(file, Stamp.of(file), "y", downloaded=True)
    assert ledger.has(file)
    ledger.add(file, Stamp.of(file), "y", downloaded=False)
    assert not ledger.has(file)
    ledger.add(file, Stamp.of(file), "y", downloaded=True)
    file.unlink()
    assert not ledger.has(file)


def test_many_threads_and_ledgers_write_whole_lines(tmp_path):
    files = [tmp_path / f"file {k}" for k in range(40)]
    for file in files:
        file.write_bytes(file.name.encode())
    ledgers = [Ledger(tmp_path / "ledger") for _ in range(4)]

    def enter(which):
        for file in files[which::4]:
            ledgers[which].add(file, Stamp.of(file), file.name, downloaded=True)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(enter, range(4)))
    assert all(ledger.has(file) for ledger in ledgers for file in files)


def test_a_ledger_that_cannot_be_written_places_no_blob(desk, cache):
    own_cache().parent.mkdir(parents=True, exist_ok=True)
    checkpoint = desk.checkpoint("step1")
    (own_cache() / "brought.jsonl").mkdir()
    with pytest.raises(MachineError, match=r"brought\.jsonl"):
        desk.fetcher.weights(checkpoint)
    assert sha256(STEP1) not in blobs(cache)


def test_a_claim_ends_with_its_process(tmp_path):
    path = tmp_path / "claim"
    code = (
        "import sys; from pathlib import Path; from qaudit.hub.cache import Claims\n"
        "claims = Claims(); claims.take(Path(sys.argv[1])); print('taken', flush=True); input()"
    )
    program, pipe = [sys.executable, "-c", code, str(path)], subprocess.PIPE
    with subprocess.Popen(program, stdout=pipe, stdin=pipe) as process:
        assert process.stdout.readline() == b"taken\n"
        with Claims().alone(path) as alone:
            assert not alone
        process.kill()
    with Claims().alone(path) as alone:
        assert alone


def test_so_many_claims_are_held_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(holding_module, "MOST_CLAIMS", 2)
    mine, other = Claims(), Claims()
    paths = [tmp_path / name for name in "abc"]
    for path in (*paths[:2], paths[0], paths[2]):
        mine.take(path)
    free = []
    for path in paths:
        with other.alone(path) as alone:
            free.append(alone)
    assert free == [False, True, False]
