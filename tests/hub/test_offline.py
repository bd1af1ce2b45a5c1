"""What others downloaded is found offline: names, trees, files, and what is not there is named."""

import json
import os
import shutil

import numpy as np
import pytest
from huggingface_hub import hf_hub_download, snapshot_download
from safetensors.numpy import save

from qaudit.checkpoints.stamps import text_path
from qaudit.errors import HubError
from qaudit.hub.api import Client
from qaudit.hub.fetch import Fetcher
from qaudit.hub.listing import Listing
from qaudit.hub.series import with_files
from qaudit.text.texts import find_text
from tests.support.fetching import write
from tests.support.series import find_series

REPO, TEXTS = "alice/branches", "alice/text"
FOLDER = "models--alice--branches"
SMALL = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}"}
INDEX = "model.safetensors.index.json"


def tensors(**shapes):
    return save({name: np.ones(shape, np.float16) for name, shape in shapes.items()})


def sharded(**shapes):
    """Return one shard for each tensor, under names that only the index tells to be a set."""
    names = {tensor: f"part-{tensor}.safetensors" for tensor in shapes}
    index = json.dumps({"metadata": {}, "weight_map": names}).encode()
    files = {names[tensor]: tensors(**{tensor: shape}) for tensor, shape in shapes.items()}
    return files | {INDEX: index}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    one = SMALL | {"model.safetensors": tensors(a=(3, 4))}
    many = SMALL | sharded(a=(5, 2), b=(7,))
    revisions = {"step1": one, "run%2Fstep2": many, "step3": SMALL | {"deep/er/x.txt": b"x"} | one}
    write(root, revisions, REPO)
    (root / REPO / "repo.json").write_text('{"branch_per_revision": true}')
    texts = {"en/a.jsonl": b'{"text": "a"}\n', "en/b.json.gz": b"not read here"}
    write(root, {"v1": texts}, f"datasets/{TEXTS}")
    return root


def download(hub, cache, *revisions, **options):
    """Have the unmodified client download revisions."""
    for revision in revisions:
        where = {"cache_dir": cache, "endpoint": hub.url, "token": False, **options}
        snapshot_download(REPO, revision=revision, **where)
    hub.log.clear()


def online(hub, folder):
    return Listing(Client(hub.url, pause=lambda seconds: None), folder)


def offline_listing(folder, said=None):
    """Open a listing that remembers nothing and has nobody to ask."""
    heard = said if said is not None else []
    return Listing(Client("http://127.0.0.1:1", offline=True, say=heard.append), folder / "empty")


def test_what_was_downloaded_is_as_the_hub_lists_it(hub, cache, tmp_path):
    download(hub, cache, "main", "step1", "run/step2", "step3")
    theirs, mine = online(hub, tmp_path / "online"), offline_listing(tmp_path)
    names = {r.name: r.commit for r in theirs.revisions(REPO)}
    assert {r.name: r.commit for r in mine.revisions(REPO)} == names
    for name, commit in names.items():
        assert mine.commit(REPO, name) == commit
        listed = [[(f.path, f.nbytes, f.identity) for f in asked.files(REPO, commit)]
                  for asked in (mine, theirs)]  # fmt: skip
        assert listed[0] == listed[1]
        assert mine.is_partial(REPO, commit)
        weights = [f for f in mine.files(REPO, commit) if f.path.endswith(".safetensors")]
        assert mine.shapes(REPO, commit, weights) == theirs.shapes(REPO, commit, weights)
    series = with_files(mine, find_series(mine, REPO))
    ours = with_files(theirs, find_series(theirs, REPO))
    assert [(c.label, c.commit, c.files) for c in series] == [
        (c.label, c.commit, c.files) for c in ours
    ]
    assert mine.client.requests == 0
    for checkpoint in series:
        fetcher = Fetcher(mine.client, mine)
        fetcher.settings(checkpoint)
        assert fetcher.nbytes_missing(checkpoint) == 0
        folder = fetcher.weights(checkpoint)  # hashes all of it
    blob = (folder / checkpoint.files[0].name).resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"\x01")  # it rots
    with pytest.raises(HubError, match=rf"`{checkpoint.files[0].name}`.*HF_HUB_OFFLINE"):
        Fetcher(mine.client, mine).weights(checkpoint)


def test_a_text_that_was_downloaded_is_found(hub, cache, tmp_path):
    source, other = (f"hf://datasets/{TEXTS}/en/{name}" for name in ("a.jsonl", "b.json.gz"))
    hf_hub_download(TEXTS, "en/a.jsonl", repo_type="dataset", cache_dir=cache, endpoint=hub.url)
    mine = offline_listing(tmp_path)
    text = find_text(mine, source)
    assert text == find_text(online(hub, tmp_path / "online"), source)
    assert Fetcher(mine.client, mine).text(text) == text_path(text)
    with pytest.raises(HubError, match=r"`en/b\.json\.gz` of `alice/text`.*HF_HUB_OFFLINE"):
        find_text(mine, other)


def test_a_name_that_was_not_downloaded_is_named(hub, cache, tmp_path):
    names = online(hub, tmp_path / "mine").revisions(REPO)
    download(hub, cache, "step1")
    assert Listing(Client(hub.url, offline=True), tmp_path / "mine").revisions(REPO) == names
    with pytest.raises(HubError, match=r"`step3` of `alice/branches`.*HF_HUB_OFFLINE"):
        offline_listing(tmp_path).commit(REPO, "step3")
    with pytest.raises(HubError) as caught:
        offline_listing(tmp_path).commit(REPO, "stepp1")
    assert caught.value.hint == "did you mean `step1`?"

    shutil.rmtree(cache)
    commit = names[-1].commit
    download(hub, cache, commit)  # without a name
    target, mine = f"{REPO}@{commit}", offline_listing(tmp_path)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE") as caught:
        mine.revisions(REPO)
    assert f"`{target}`" in caught.value.hint
    (found,) = with_files(mine, find_series(mine, target))  # by its id
    assert [file.name for file in found.files] == ["model.safetensors"]


def test_an_incomplete_snapshot_is_refused_alone(hub, cache, tmp_path):
    said = []
    download(hub, cache, "step1", allow_patterns=["config.json"])
    mine = offline_listing(tmp_path, said)
    with pytest.raises(HubError, match=r"not whole on this machine, and `HF_HUB_OFFLINE`"):
        with_files(mine, find_series(mine, REPO))
    assert len(said) == 2  # that names, and files, are those that lie here
    shutil.rmtree(cache)
    download(hub, cache, "run/step2", ignore_patterns=["part-b*"])
    mine = offline_listing(tmp_path)
    with pytest.raises(HubError, match=r"`alice/branches@run/step2`.*`part-b\.safet") as caught:
        with_files(mine, find_series(mine, REPO))
    commit = (cache / FOLDER / "refs" / "run" / "step2").read_text()
    assert f"hf download {REPO} --revision {commit}" in caught.value.hint
    download(hub, cache, "step1")
    mine = offline_listing(tmp_path)
    read = {c.ref.revision: c for c in with_files(mine, find_series(mine, REPO))}
    assert [name for name, c in read.items() if not c.files] == ["run/step2"]
    assert "`part-b.safetensors`" in read["run/step2"].suspect[0]


COMMIT, BLOB = "a" * 40, "b" * 64


def lay(cache, path, text=COMMIT):
    place = cache / FOLDER / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text, encoding="utf-8")
    return place


def point(cache, path, target):
    place = cache / FOLDER / "snapshots" / COMMIT / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)


def test_links_elsewhere_are_no_files_and_damage_is_refused(cache, tmp_path):
    lay(cache, f"blobs/{BLOB}", "good")
    lay(cache, "blobs/not-a-hash", "x")
    outside = tmp_path / "outside" / BLOB
    outside.parent.mkdir()
    outside.write_text("secret", encoding="utf-8")
    point(cache, "good", f"../../blobs/{BLOB}")
    point(cache, "outside", outside)
    point(cache, "no-hash", "../../blobs/not-a-hash")
    point(cache, "folder", outside.parent)
    lay(cache, f"snapshots/{COMMIT}/regular", "x")
    assert [file.path for file in offline_listing(tmp_path).files(REPO, COMMIT)] == ["good"]
    lay(cache, "refs/main", "")
    with pytest.raises(HubError, match="cannot be believed: the commit of `main`"):
        offline_listing(tmp_path).revisions(REPO)
    shutil.rmtree(cache)
    point(cache, "gone", f"../../blobs/{'d' * 64}")
    with pytest.raises(HubError, match="what the cache has of `alice/branches` is damaged"):
        offline_listing(tmp_path).files(REPO, COMMIT)


def test_a_name_that_is_none_condemns_all_of_them(cache, tmp_path):
    lay(cache, "refs/main")
    lay(cache, f"blobs/{BLOB}", "good")
    point(cache, "good", f"../../blobs/{BLOB}")
    for name in ("ev\\il", "ev\nil", b"ev\xffil"):
        mine = offline_listing(tmp_path)
        assert mine.revisions(REPO)
        assert mine.files(REPO, COMMIT)
        odd = os.fsdecode(name)
        link = cache / FOLDER / "snapshots" / COMMIT / odd
        ref = lay(cache, f"refs/{odd}")
        point(cache, odd, f"../../blobs/{BLOB}")
        with pytest.raises(HubError, match="cannot be believed") as caught:
            offline_listing(tmp_path).revisions(REPO)
        assert "refs" in caught.value.hint
        with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
            offline_listing(tmp_path).files(REPO, COMMIT)
        ref.unlink()
        link.unlink()
