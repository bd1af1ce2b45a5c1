"""The local Hub that the other tests rely on: the unmodified client takes it for the real one.

Its faults are held to what they say by the tests of our client, which expect each of them.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.numpy import load_file, save_file

from tests.house.source import ROOT
from tests.support.hub import Hub, write_headers
from tests.support.hub.fixtures import Serve

TOKENS = {"hf_alice": "alice", "hf_bob": "bob", "hf_reader": "bob:read"}
NAMES = ("step2", "step10", "step100", "step1000", "step1100")
WEIGHTS = "model.safetensors"
SMALL, LARGE = "/alice/tiny/resolve/step2/config.json", f"/alice/tiny/resolve/step2/{WEIGHTS}"


@pytest.fixture(autouse=True)
def _with_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)


def write_tensors(path: Path, number: int) -> None:
    tensors = {
        "model.layers.0.weight": np.full((8, 8), number, np.float32),
        "lm_head.weight": np.full((4, 8), -number, np.float16),
    }
    save_file(tensors, path, {"format": "pt"})


def write_repo(folder: Path, *revisions: str, **settings: Any) -> Path:
    for number, name in enumerate(revisions):
        (folder / name / "extra" / "deep").mkdir(parents=True)
        write_tensors(folder / name / WEIGHTS, number)
        (folder / name / "config.json").write_text('{"model_type": "llama"}')
        (folder / name / "README.md").write_text("---\nlicense: mit\n---\n# tiny\n")
        (folder / name / "extra" / "deep" / "notes.txt").write_text("below")
        (folder / name / "extra.txt").write_text("sorts before the folder of that name")
    if settings:
        (folder / "repo.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root of five repos, of which nobody changes a file."""
    root = tmp_path_factory.mktemp("root")
    write_repo(root / "alice/tiny", *NAMES)
    write_repo(root / "alice/private", "v1", private=True, readers=["carol"])
    write_repo(root / "alice/gated", "v1", gated="manual")
    write_repo(root / "datasets/carol/texts", "v1")
    write_repo(
        root / "bob/series",
        *("stage1%2Fstep5", "stage1%2Fstep9", "soup"),
        branch_per_revision=True,
        aliases={"final": "soup", "stage1/step7": "stage1/step5"},
        tags={"v1.0": "soup"},
        main=None,
    )
    return root


@pytest.fixture
def hub(serve: Serve, root: Path) -> Hub:
    return serve(root, tokens=TOKENS)


def api(hub: Hub, token: str | bool = False) -> HfApi:
    return HfApi(endpoint=hub.url, token=token)


def ask(
    hub: Hub, target: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Ask with nothing but the standard library: no redirect is followed, nothing is repeated."""
    parts = urlsplit(target if target.startswith("http") else hub.url + target)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    try:
        connection.request(method, f"{parts.path}?{parts.query}", body, headers)
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def link_to(hub: Hub, target: str = LARGE) -> str:
    status, headers, _ = ask(hub, target)
    assert status == 302
    return headers["location"]


# ---------------------------------------------- what lies there


def test_revisions_are_tags_in_natural_order(hub: Hub) -> None:
    found = api(hub).list_repo_refs("alice/tiny")
    assert [tag.name for tag in found.tags] == list(NAMES)
    assert [branch.name for branch in found.branches] == ["main"]
    assert found.branches[0].target_commit == found.tags[-1].target_commit


def test_revisions_may_be_branches_that_share_files(hub: Hub) -> None:
    found = api(hub).list_repo_refs("bob/series")
    commits = {branch.name: branch.target_commit for branch in found.branches}
    names = {"main", "stage1/step5", "stage1/step7", "stage1/step9", "soup", "final"}
    assert set(commits) == names
    assert len(set(commits.values())) == 6  # an alias has a commit of its own
    assert [(tag.name, tag.target_commit) for tag in found.tags] == [("v1.0", commits["soup"])]

    def weights(revision: str) -> str:
        (file,) = api(hub).get_paths_info("bob/series", WEIGHTS, revision=revision)
        return file.lfs.sha256  # type: ignore[union-attr]

    assert weights("final") == weights("soup") != weights("stage1/step5")
    assert weights("stage1/step7") == weights("stage1/step5")
    assert set(api(hub).list_repo_files("bob/series")) == {".gitattributes", "README.md"}


def test_a_setting_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    write_repo(tmp_path / "a/b", "step1", privat=True)
    with pytest.raises(ValueError, match=r"repo\.json: unknown keys \['privat'\]"):
        Hub(tmp_path)


# ---------------------------------------------- what the client sees


def test_a_tree_is_listed_page_by_page(serve: Serve, root: Path) -> None:
    hub = serve(root, page=3)
    entries = list(api(hub).list_repo_tree("alice/tiny", revision="step2", recursive=True))
    paths = [entry.path for entry in entries]
    assert paths == sorted(paths)
    assert {"extra", "extra.txt", "extra/deep", "extra/deep/notes.txt", WEIGHTS} <= set(paths)
    assert len(hub.asked("/tree/step2")) == -(-len(paths) // 3)
    (weights,) = (entry for entry in entries if entry.path == WEIGHTS)
    data = (root / "alice/tiny/step2" / WEIGHTS).read_bytes()
    assert (weights.size, weights.lfs.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    inside = api(hub).list_repo_tree("alice/tiny", "extra", revision="step2")
    assert [entry.path for entry in inside] == ["extra/deep"]


def test_a_repo_is_described_at_any_revision(hub: Hub) -> None:
    tags = {tag.name: tag.target_commit for tag in api(hub).list_repo_refs("alice/tiny").tags}
    for revision in ("step10", tags["step10"], tags["step10"][:9]):
        info = api(hub).model_info("alice/tiny", revision=revision, files_metadata=True)
        assert (info.id, info.sha, info.gated) == ("alice/tiny", tags["step10"], False)
    assert info.config == {"model_type": "llama"}
    assert info.card_data is not None and info.card_data.license == "mit"
    sizes = {file.rfilename: file.size for file in info.siblings or ()}
    assert sizes["config.json"] == len('{"model_type": "llama"}')


def test_datasets_are_served_beside_models(hub: Hub, root: Path, tmp_path: Path) -> None:
    client = api(hub)
    info = client.dataset_info("carol/texts", revision="v1")
    assert (
        info.sha == client.list_repo_refs("carol/texts", repo_type="dataset").tags[0].target_commit
    )
    with pytest.raises(RepositoryNotFoundError):
        client.model_info("carol/texts")
    for name in ("config.json", WEIGHTS):
        got = hf_hub_download(
            "carol/texts", name, repo_type="dataset", endpoint=hub.url, cache_dir=tmp_path
        )
        assert Path(got).read_bytes() == (root / "datasets/carol/texts/v1" / name).read_bytes()
    assert [dataset.id for dataset in client.list_datasets()] == ["carol/texts"]


def test_repos_are_found_by_owner_and_word_page_by_page(serve: Serve, root: Path) -> None:
    hub = serve(root, tokens=TOKENS, page=1)
    assert [m.id for m in api(hub).list_models()] == ["alice/gated", "alice/tiny", "bob/series"]
    assert [m.id for m in api(hub).list_models(author="alice")] == ["alice/gated", "alice/tiny"]
    assert [m.id for m in api(hub).list_models(author="alice", search="TIN")] == ["alice/tiny"]
    assert list(api(hub).list_models(author="nobody")) == []
    own = [m.id for m in api(hub, "hf_alice").list_models(author="alice")]
    assert own == ["alice/gated", "alice/private", "alice/tiny"]
    assert len(hub.asked("GET /api/models$")) == 3 + 2 + 1 + 1 + 3


def test_revisions_of_a_repo_share_what_is_equal(hub: Hub, root: Path, tmp_path: Path) -> None:
    for name in ("step2", "step10"):
        folder = Path(
            snapshot_download(
                "alice/tiny", revision=name, endpoint=hub.url, cache_dir=tmp_path, token="hf_bob"
            )
        )
        for path in (root / "alice/tiny" / name).rglob("*"):
            if path.is_file():
                inside = path.relative_to(root / "alice/tiny" / name)
                assert (folder / inside).read_bytes() == path.read_bytes()
    assert len(list((tmp_path / "models--alice--tiny" / "blobs").iterdir())) == 2 + 5
    result = api(hub).verify_repo_checksums("alice/tiny", revision="step2", cache_dir=tmp_path)
    assert not result.mismatches and not result.missing_paths


def test_a_revision_with_a_slash_is_downloaded(hub: Hub, root: Path, tmp_path: Path) -> None:
    for name in ("config.json", WEIGHTS):
        got = hf_hub_download(
            "bob/series", name, revision="stage1/step9", endpoint=hub.url, cache_dir=tmp_path
        )
        there = root / "bob/series/stage1%2Fstep9" / name
        assert Path(got).read_bytes() == there.read_bytes()


def test_a_token_never_reaches_the_cdn(hub: Hub, tmp_path: Path) -> None:
    hf_hub_download(
        "alice/private", WEIGHTS, endpoint=hub.url, cache_dir=tmp_path, token="hf_alice"
    )
    assert {(e["cdn"], e["auth"]) for e in hub.log} == {(False, True), (True, False)}
    assert hub.leaks == []


def test_a_token_that_reaches_the_cdn_is_noticed(hub: Hub) -> None:
    ask(hub, link_to(hub), Authorization="Bearer hf_alice")
    (leak,) = hub.leaks
    assert leak.startswith("/cdn/")


def test_only_headers_are_read_for_shapes(hub: Hub) -> None:
    found = api(hub).get_safetensors_metadata("alice/tiny", revision="step100")
    assert found.parameter_count == {"F32": 64, "F16": 32}
    assert {e["range"] for e in hub.log if e["cdn"]} == {"bytes=0-100000"}


def test_whoami(hub: Hub) -> None:
    assert api(hub, "hf_reader").whoami()["name"] == "bob"


@pytest.mark.parametrize(
    ("repo", "revision", "path", "token", "error", "status"),
    [
        ("alice/nothing", "main", WEIGHTS, False, RepositoryNotFoundError, 401),
        ("alice/nothing", "main", WEIGHTS, "hf_bob", RepositoryNotFoundError, 404),
        ("alice/private", "main", WEIGHTS, False, RepositoryNotFoundError, 401),
        ("alice/private", "main", WEIGHTS, "hf_bob", RepositoryNotFoundError, 404),
        ("alice/gated", "main", WEIGHTS, False, GatedRepoError, 401),
        ("alice/gated", "main", WEIGHTS, "hf_bob", GatedRepoError, 403),
        ("alice/tiny", "nowhere", WEIGHTS, False, RevisionNotFoundError, 404),
        ("alice/tiny", "main", "no.bin", False, RemoteEntryNotFoundError, 404),
        ("alice/tiny", "main", WEIGHTS, "hf_wrong", HfHubHTTPError, 401),
    ],
)
def test_a_refusal_is_what_the_client_knows(
    hub: Hub,
    tmp_path: Path,
    repo: str,
    revision: str,
    path: str,
    token: str | bool,
    error: type[HfHubHTTPError],
    status: int,
) -> None:
    with pytest.raises(error) as caught:
        hf_hub_download(
            repo, path, revision=revision, endpoint=hub.url, cache_dir=tmp_path, token=token
        )
    assert type(caught.value) is error
    assert caught.value.response.status_code == status


def test_a_gated_repo_is_listed_and_its_files_are_not_read(hub: Hub, tmp_path: Path) -> None:
    assert WEIGHTS in api(hub).list_repo_files("alice/gated")
    assert api(hub).model_info("alice/gated").gated == "manual"
    with pytest.raises(GatedRepoError):
        api(hub).list_repo_commits("alice/gated")
    assert hf_hub_download(
        "alice/gated", WEIGHTS, endpoint=hub.url, cache_dir=tmp_path, token="hf_alice"
    )


def test_a_stranger_may_be_refused_without_a_code(serve: Serve, root: Path) -> None:
    hub = serve(root, https_style_401=True)
    with pytest.raises(HfHubHTTPError) as caught:
        api(hub).model_info("alice/private")
    assert type(caught.value) is HfHubHTTPError
    assert caught.value.response.status_code == 401


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the client's own upload
def test_a_pull_request_is_opened_commented_and_merged(serve: Serve, root: Path) -> None:
    hub = serve(root, tokens=TOKENS)
    client = api(hub, "hf_bob")
    changes = [CommitOperationAdd("report.md", b"# fine"), CommitOperationAdd("w.bin", b"weights")]
    made = client.create_commit("alice/tiny", changes, commit_message="Report", create_pr=True)
    assert (made.pr_num, made.pr_revision) == (1, "refs/pr/1")
    assert {"report.md", "w.bin"} <= set(client.list_repo_files("alice/tiny", revision="refs/pr/1"))
    assert "report.md" not in client.list_repo_files("alice/tiny")
    client.comment_discussion("alice/tiny", 1, "Please look.")
    events = client.get_discussion_details("alice/tiny", 1).events
    assert [event.type for event in events] == ["comment", "commit", "comment"]
    with pytest.raises(HfHubHTTPError):
        client.merge_pull_request("alice/tiny", 1)
    api(hub, "hf_alice").merge_pull_request("alice/tiny", 1)
    assert "report.md" in client.list_repo_files("alice/tiny")
    with pytest.raises(HfHubHTTPError):
        more = [CommitOperationAdd("report.md", b"# other")]
        api(hub, "hf_reader").create_commit("alice/tiny", more, commit_message="More")


# ---------------------------------------------- a thousand names, one folder


@pytest.fixture
def many(hub: Hub, root: Path) -> Hub:
    names = [f"stage1-step{1000 * step}" for step in range(1200)]
    folder = root / "alice/tiny/step100"
    hub.add_names("org/many", names, folder, names[-1], aliases={"final": names[-1]})
    return hub


def test_weights_of_a_name_are_valid_and_near_to_the_folders(many: Hub, tmp_path: Path) -> None:
    loaded = []
    for name in ("stage1-step0", "stage1-step7000"):
        folder = snapshot_download("org/many", revision=name, endpoint=many.url, cache_dir=tmp_path)
        done = api(many).verify_repo_checksums("org/many", revision=name, cache_dir=tmp_path)
        assert not done.mismatches
        loaded.append(load_file(Path(folder) / WEIGHTS)["model.layers.0.weight"])
    assert not np.array_equal(*loaded)
    for tensor in loaded:
        np.testing.assert_allclose(tensor, 2.0, rtol=0.5)


def test_any_range_of_a_names_weights_is_what_lies_there(many: Hub) -> None:
    link = link_to(many, f"/org/many/resolve/stage1-step5000/{WEIGHTS}")
    whole = ask(many, link)[2]
    for start, stop in ((0, 8), (7, 300), (300, 301), (len(whole) - 5, len(whole))):
        status, headers, part = ask(many, link, Range=f"bytes={start}-{stop - 1}")
        assert (status, part) == (206, whole[start:stop])
        assert headers["content-range"] == f"bytes {start}-{stop - 1}/{len(whole)}"
    assert ask(many, link, Range="bytes=-9")[2] == whole[-9:]
    assert ask(many, link, Range=f"bytes={len(whole)}-")[0] == 416


def test_sizes_may_be_pretended(serve: Serve, tmp_path: Path) -> None:
    shapes = {f"model.layers.{k}.weight": ("BF16", (4096, 11008)) for k in range(160)}
    total = write_headers(tmp_path / "7b", shapes, shard_nbytes=5 * 10**9)
    (tmp_path / "7b/config.json").write_text("{}")
    (tmp_path / "7b/pytorch_model.bin").write_bytes(b"a pickle")
    hub = serve()
    hub.add_names("org/big", ["step1", "step2"], tmp_path / "7b", pretend_nbytes=29 * 10**9)
    hub.add_names("org/true", ["step1"], tmp_path / "7b", hashed=False)
    for repo, expected in (("org/big", 29 * 10**9), ("org/true", total + 8 + 64)):
        files = api(hub).list_repo_tree(repo, revision="step1")
        sizes = {file.path: file.size for file in files if getattr(file, "lfs", None)}
        assert len(sizes) == 4 and sum(sizes.values()) == expected
        found = api(hub).get_safetensors_metadata(repo, revision="step1")
        assert found.parameter_count == {"BF16": 160 * 4096 * 11008}
    assert set(api(hub).list_repo_files("org/big")) == {".gitattributes", "README.md"}
    link = link_to(hub, "/org/big/resolve/step1/model-00002-of-00003.safetensors")
    status, _, tail = ask(hub, link, Range="bytes=-4096")
    assert status == 206 and len(set(tail)) > 10


def test_a_file_of_names_makes_a_repo(serve: Serve, tmp_path: Path) -> None:
    settings = {"names": "names.txt", "pretend_nbytes": 10**9, "main": "b", "aliases": {"c": "a"}}
    write_repo(tmp_path / "a/b", "served", **settings)
    (tmp_path / "a/b/names.txt").write_text("a\nb\n")
    hub = serve(tmp_path)
    found = {b.name: b.target_commit for b in api(hub).list_repo_refs("a/b").branches}
    assert set(found) == {"main", "a", "b", "c"} and found["main"] == found["b"]


# ---------------------------------------------- what goes wrong


def test_a_revision_can_vanish(hub: Hub) -> None:
    commit = api(hub).model_info("alice/tiny", revision="step10").sha
    hub.repos["alice/tiny"].remove("step10")
    for revision in ("step10", commit):
        with pytest.raises(RevisionNotFoundError):
            api(hub).model_info("alice/tiny", revision=revision)
    assert len(api(hub).list_repo_refs("alice/tiny").tags) == len(NAMES) - 1


def test_a_mistake_in_a_fault_fails_the_test_that_makes_it(root: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown keys \['stats'\]"), Hub(root).running() as hub:
        hub.faults.append({"match": "", "stats": 503})
        assert ask(hub, SMALL)[0] == 500


# ---------------------------------------------- from another process


@pytest.fixture
def process(root: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "tests.support.hub", str(root), "--port", "0"]
    with subprocess.Popen(
        [*command, "--token", "hf_alice=alice"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        first = running.stdout.readline().strip()
        yield first.removeprefix("HF_ENDPOINT=")
        running.terminate()
        running.stdout.close()


def test_it_is_run_and_controlled_from_outside(process: str) -> None:
    hub = Hub()
    hub.url = process
    assert api(hub, "hf_alice").whoami()["name"] == "alice"
    ask(hub, "/_control/faults", "POST", b'[{"match": "config", "status": 503, "times": 1}]')
    assert [ask(hub, SMALL)[0] for _ in range(2)] == [503, 307]
    assert json.loads(ask(hub, "/_control/faults")[2])[0]["times"] == 0
    log = json.loads(ask(hub, "/_control/log?clear=1")[2])
    assert [entry["status"] for entry in log] == [200, 503, 307]
    assert json.loads(ask(hub, "/_control/log")[2]) == []
    ask(hub, "/_control/remove", "POST", b'{"repo": "alice/tiny", "name": "step10"}')
    assert len(api(hub).list_repo_refs("alice/tiny").tags) == len(NAMES) - 1
    assert ask(hub, "/_control/nothing")[0] == 404
