"""From a name on the Hub to an audit: the whole command line, over real sockets."""

from __future__ import annotations

import gzip
import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qaudit.hub import open_hub
from qaudit.planning.pin import read_lock
from tests.support.cli import TEXT, Run, audit_of, refused, settings, weights_in
from tests.support.gguf import write_gguf
from tests.support.hub import Hub
from tests.support.models import text
from tests.support.names import names_of
from tests.support.quantized import quantized_copy

REPO = "lab/series"


@pytest.fixture
def hub(place: Path, online: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve the tiny series of `place` as branches of one repository, and nowhere else."""
    root = online / "root"
    shutil.move(place / "series", root / REPO)
    settings(root / REPO, branch_per_revision=True)
    shutil.copytree(root / REPO, root / "lab/secret")
    settings(root / "lab/secret", private=True)
    with Hub(root).running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def commit_of(hub: Hub, revision: str) -> str:
    with urllib.request.urlopen(f"{hub.url}/api/models/{REPO}/refs") as answer:
        branches = json.load(answer)["branches"]
    return next(b["targetCommit"] for b in branches if b["name"] == revision)


def asked_of(hub: Hub) -> list[str]:
    return [f"{entry['method']} {entry['path']}" for entry in hub.log]


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    """Return a measurement without what it took, where it lies, and the Hub's git ids in hashes."""
    left_out = ("seconds", "evidence", "evidence_sha256", "sha256", "weights_sha256")
    hashes = row.get("weights_sha256", {}).items()
    weights = {name: sha256 for name, sha256 in hashes if name.endswith(".safetensors")}
    return {key: row[key] for key in row if key not in left_out} | {"weights": weights}


# ------------------------------------------------------------------------------- plan, lock, resume


def test_a_dry_run_prices_the_hub_and_fetches_no_weights(hub: Hub, scan: Run, online: Path) -> None:
    done = scan(REPO, "--dry-run", "--json")
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    sizes = {
        p.parent.name: p.stat().st_size for p in (online / "root" / REPO).rglob("*.safetensors")
    }
    assert plan["traffic"]["nbytes_to_fetch"] == sum(sizes.values())  # `main` is the last of them
    assert weights_in(online / "hf") == []
    assert sum("/tree/" in line for line in asked_of(hub)) <= 4
    assert sum(line.endswith("/refs") for line in asked_of(hub)) == 1


def test_the_second_run_goes_on_from_the_lock_and_asks_nothing(
    hub: Hub, scan: Run, place: Path
) -> None:
    done = scan(REPO)
    assert done.code == 0, done.err
    lock = json.loads((place / "out" / "plan.json").read_text(encoding="utf-8"))["resolved"]
    pinned = {c["ref"]["revision"]: c["commit"] for c in lock["checkpoints"]}
    assert pinned["step200"] == commit_of(hub, "step200")
    hub.log.clear()
    again = scan(REPO)
    assert again.code == 0, again.err
    assert asked_of(hub) == []


def test_a_lock_is_measured_elsewhere_on_the_same_commits(
    hub: Hub, scan: Run, qaudit: Run, place: Path, online: Path
) -> None:
    assert scan(REPO, "--set", "disk_budget=1MB").code == 0
    assert weights_in(online / "hf") == []  # measured, and not needed any more
    others = ("--schemes", "rtn-4bit", "--out")  # the lock says which text
    hub.log.clear()
    done = qaudit("scan", "out/plan.json", *others, "second")
    assert done.code == 0, done.err
    assert [line for line in asked_of(hub) if "/api/" in line] == []  # no name, no tree

    for checkpoint in read_lock(place / "out" / "plan.json")[1].checkpoints:
        open_hub().fetcher.weights(checkpoint)
    hub.log.clear()
    done = qaudit("scan", "out/plan.json", *others, "third")
    assert done.code == 0, done.err
    assert asked_of(hub) == []
    first, *others_rows = (
        [numbers(row) for row in audit_of(place / name)["measurements"]]
        for name in ("out", "second", "third")
    )
    assert others_rows == [first, first]


def test_the_same_weights_under_two_names_are_fetched_once(hub: Hub, scan: Run) -> None:
    done = scan(REPO)
    assert done.code == 0, done.err
    blobs = [line for line in asked_of(hub) if line.startswith("GET /cdn/")]
    assert len(set(blobs)) == 3  # of step10, step200, step1000 and `main`
    assert len(blobs) == 3 + 1  # and one range of one of them, its header


def test_without_a_network_what_is_here_is_planned_and_what_is_not_is_named(
    hub: Hub, scan: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scan(REPO, "--dry-run").code == 0
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.log.clear()
    done = scan(REPO, "--dry-run")
    assert done.code == 0, done.err
    assert f"offline: the revisions of `{REPO}` are those of 20" in done.err
    refused(scan("lab/other"), 4, "`lab/other`", "HF_HUB_OFFLINE")
    done = scan(REPO)  # planned, and no weights are here
    assert done.code in (3, 4), done.err
    assert "HF_HUB_OFFLINE" in done.err
    assert asked_of(hub) == []


# ------------------------------------------------------------------ recipes and the default text


def write_c4(root: Path) -> None:
    """Lay a few documents where the files of C4 are."""
    for name, seeds in (
        ("train.00001-of-01024", (300, 310)),
        ("validation.00000-of-00008", (400, 410)),
    ):
        path = root / "datasets/allenai/c4/main/en" / f"c4-{name}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"text": text(seed)}) for seed in range(*seeds))
        path.write_bytes(gzip.compress("\n".join(lines).encode()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "repo", "chosen", "soups"),
    [
        ("olmo2-7b", "allenai/OLMo-2-1124-7B", 12, 1),
        ("smollm3", "HuggingFaceTB/SmolLM3-3B-checkpoints", 16, 2),
        ("pythia-160m", "EleutherAI/pythia-160m", 12, 1),
    ],
)
def test_a_shipped_recipe_is_planned_with_a_call_for_each_checkpoint(
    recipe: str,
    repo: str,
    chosen: int,
    soups: int,
    shipped: Path,
    online: Path,
    monkeypatch: pytest.MonkeyPatch,
    qaudit: Run,
) -> None:
    monkeypatch.chdir(online)
    write_c4(online / "root")
    names = [name for name in names_of(repo) if name != "main"]
    with Hub(online / "root").running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        folder = shipped / "series" / "step10"
        hub.add_names(repo, names, folder, main=None)
        hub.repos[repo].branches["main"] = hub.repos[repo].branches[names[-1]]
        done = qaudit("scan", f"recipes/{recipe}.yaml", "--dry-run", "--json")
        assert done.code == 0, done.err
        calls = [line for line in asked_of(hub) if "/api/models/" in line]
        of_texts = [line for line in asked_of(hub) if "/api/datasets/" in line]
    plan = json.loads(done.out)
    soup = [subject.get("merge") is not None for subject in plan["subjects"]]
    assert (soup.count(False), soup.count(True)) == (chosen, soups)
    assert {text["repo"] for text in plan["texts"]} == {"allenai/c4"}
    extra = chosen_by_soups(recipe)
    assert len(calls) <= 1 + chosen + extra
    assert len(of_texts) <= 4


def chosen_by_soups(recipe: str) -> int:
    """Return how many members of soups a recipe does not measure by themselves."""
    return {"olmo2-7b": 0, "smollm3": 2, "pythia-160m": 4}[recipe]


def test_a_scan_of_the_hub_reads_c4_where_no_text_was_named(
    hub: Hub, online: Path, qaudit: Run, place: Path
) -> None:
    write_c4(online / "root")
    with Hub(online / "root").running() as fresh, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", fresh.url)
        done = qaudit("scan", f"{REPO}@step10", "--schemes", "rtn-4bit", "--out", "out")
        asked = asked_of(fresh)
    assert done.code == 0, done.err
    (fp, _) = audit_of(place / "out")["measurements"]
    assert fp["documents"] == 10
    lock = json.loads((place / "out" / "plan.json").read_text(encoding="utf-8"))["resolved"]
    assert sorted(t["path"] for t in lock["texts"]) == [
        "en/c4-train.00001-of-01024.json.gz",
        "en/c4-validation.00000-of-00008.json.gz",
    ]
    texts = max(k for k, line in enumerate(asked) if "/datasets/" in line)
    weights = [k for k, line in enumerate(asked) if line.endswith("model.safetensors")]
    assert weights[-1] > texts  # the first is a range, its header


# ------------------------------------------------------------------------------- what goes wrong


def test_a_private_repository_without_a_token(hub: Hub, scan: Run, online: Path) -> None:
    refused(
        scan("lab/secret"),
        4,
        "`lab/secret` does not exist, or is private",
        "`hf auth login` or set `HF_TOKEN`",
    )
    assert weights_in(online / "hf") == []


def test_a_revision_that_disappears_after_the_plan_is_skipped(
    hub: Hub, scan: Run, place: Path
) -> None:
    assert scan(REPO, "--dry-run").code == 0  # names, trees and headers are known from here on
    gone = commit_of(hub, "step200")
    hub.faults.append(
        {
            "match": f"/resolve/{gone}/.*safetensors",
            "status": 404,
            "headers": {"X-Error-Code": "RevisionNotFound"},
        }
    )
    done = scan(REPO)
    assert done.code == 3, done.err
    audit = audit_of(place / "out")
    assert {row["subject"] for row in audit["measurements"]} >= {"step10", "step1000"}
    (skipped,) = [row for row in audit["skipped"] if row["subject"] == "step200"]
    assert gone in skipped["reason"] or "step200" in skipped["reason"]
    assert "skipped step200" in done.err


def test_a_server_that_dies_in_the_middle_and_the_same_command_goes_on(
    hub: Hub, scan: Run, place: Path
) -> None:
    assert scan(REPO, "--dry-run").code == 0
    hub.log.clear()
    hub.faults.append({"match": "GET /cdn/", "skip": 1, "status": 503})
    done = scan(REPO)
    assert done.code == 4, done.err
    assert done.err.count("error: ") == 1
    measured = len(list((place / "out" / "evidence").glob("*.npz")))

    hub.faults.clear()
    fetched = [line for line in asked_of(hub) if line.startswith("GET /cdn/")][:1]
    hub.log.clear()
    again = scan(REPO)
    assert again.code == 0, again.err
    assert measured > 0
    assert not set(fetched) & set(asked_of(hub))  # what was brought is not brought again
    assert len(audit_of(place / "out")["measurements"]) == 2 * 4


def test_what_is_kept_is_exported_without_a_download(
    hub: Hub, qaudit: Run, place: Path, online: Path
) -> None:
    scheme = "rtn-4bit:group=32"
    kept = (*TEXT, "--schemes", scheme, "--keep", scheme, "--out", "out")
    assert qaudit("scan", REPO, *kept).code == 0
    for weights in weights_in(online / "hf"):
        weights.unlink()
    ships = audit_of(place / "out")["verdict"]["classes"][0]  # type: ignore[index]
    named = ("--subject", ships["subject"], "--scheme", scheme)
    hub.log.clear()
    done = qaudit("export", "out", *named, "--out", "new")
    assert done.code == 0, done.err
    assert "written from the weights that the scan kept" in done.err
    assert asked_of(hub) == []


def test_a_subject_is_diagnosed_before_its_weights_leave_the_disk(
    hub: Hub, scan: Run, place: Path, online: Path
) -> None:
    """Measured first, diagnosed by a later scan: fetched once more, and then never again."""
    tight = (REPO, "--set", "disk_budget=1MB")
    assert scan(*tight).code == 0
    assert weights_in(online / "hf") == []
    hub.log.clear()
    assert scan(*tight, "--set", "diagnostics=weights").code == 0
    assert weights_in(online / "hf") == []
    tables = audit_of(place / "out")["diagnostics"]
    models = [row for row in tables["weights"] if row["part"] == "model"]  # type: ignore[index]
    assert [row["subject"] for row in models] == ["step10", "step200", "step1000", "main"]
    assert all("safetensors" not in line for line in asked_again(hub, scan, tight))


def asked_again(hub: Hub, scan: Run, tight: tuple[str, ...]) -> list[str]:
    hub.log.clear()
    assert scan(*tight, "--set", "diagnostics=weights").code == 0
    return asked_of(hub)


# ---------------------------------------------------------------- files that are quantized already


def test_a_quantized_repository_is_fetched_verified_and_pinned(
    place: Path, scan: Run, online: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = online / "root"
    quantized_copy(place / "series/step10", root / "lab/series-GPTQ" / "v1", "gptq")
    shutil.move(place / "series", root / REPO)
    for name in (REPO, "lab/series-GPTQ"):
        settings(root / name, branch_per_revision=True)
    arguments = (f"{REPO}@step10", "--shipped", "lab/series-GPTQ@v1")
    with Hub(root).running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        done = scan(*arguments)
        assert done.code == 0, done.err
        rows = audit_of(place / "out")["measurements"]
        assert [row["scheme"] for row in rows] == ["fp", "rtn-4bit", "series-GPTQ"]
        lock = json.loads((place / "out" / "plan.json").read_text())["resolved"]
        (pinned,) = lock["shipped"]
        assert len(pinned["commit"]) == 40
        fetched = audit_of(place / "out")["plan"]["traffic"]["nbytes_to_fetch"]
        assert fetched >= sum(file["nbytes"] for file in pinned["files"])
        hub.log.clear()
        assert scan(*arguments).code == 0
        assert not [one for one in asked_of(hub) if "safetensors" in one]


def test_one_gguf_file_of_a_repository_is_fetched_verified_and_pinned(
    place: Path, scan: Run, online: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, repo = online / "root", "lab/series-GGUF"
    folder = root / repo / "v1" / "files"
    folder.mkdir(parents=True)
    base = place / "series/step10"
    for kind in ("Q4_0", "Q8_0"):
        write_gguf(base, folder / f"series-{kind}.gguf", lambda n, kind=kind: kind)
    size = (folder / "series-Q4_0.gguf").stat().st_size
    shutil.move(place / "series", root / REPO)
    for name in (REPO, repo):
        settings(root / name, branch_per_revision=True)
    file = f"{repo}@v1//files/series-Q4_0.gguf"
    with Hub(root).running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        missing = scan(f"{REPO}@step10", "--shipped", f"{repo}@v1//files/series-Q5_0.gguf")
        refused(missing, 4, "there is no file `files/series-Q5_0.gguf`", "files/series-Q")
        done = scan(f"{REPO}@step10", "--shipped", file, "--set", "disk_budget=40MB")
        assert done.code == 0, done.err
        rows = audit_of(place / "out")["measurements"]
        assert [row["scheme"] for row in rows] == ["fp", "rtn-4bit", "series-Q4_0"]
        assert "gguf" in rows[-1]["spec"]
        plan = json.loads((place / "out" / "plan.json").read_text())
        (pinned,) = plan["resolved"]["shipped"]
        assert (pinned["files"][0]["nbytes"], len(pinned["commit"])) == (size, 40)
        assert not [one for one in asked_of(hub) if "Q8_0" in one]
        hub.log.clear()
        assert scan(f"{REPO}@step10", "--shipped", file, "--set", "disk_budget=40MB").code == 0
        # Of a file that was evicted the header is read again, for the plan.
        assert len([one for one in asked_of(hub) if "gguf" in one and "/resolve/" in one]) <= 1


@pytest.mark.slow
def test_shipped_files_leave_within_the_disk_budget_and_resume(
    place: Path, scan: Run, online: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = online / "root"
    for bits in (4, 8):
        quantized_copy(place / "series/step10", root / f"lab/{bits}bit" / "v1", "gptq", bits=bits)
    shutil.move(place / "series", root / REPO)
    for name in (REPO, "lab/4bit", "lab/8bit"):
        settings(root / name, branch_per_revision=True)
    arguments = (f"{REPO}@step10", "--shipped", "lab/4bit@v1", "--shipped", "lab/8bit@v1")
    with Hub(root).running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        done = scan(*arguments, "--set", "disk_budget=1MB")
        assert done.code == 0, done.err
        assert weights_in(online / "hf") == []  # measured, and not needed any more
        rows = audit_of(place / "out")["measurements"]
        assert [row["scheme"] for row in rows] == ["fp", "rtn-4bit", "4bit", "8bit"]
        hub.log.clear()
        assert scan(*arguments, "--set", "disk_budget=1MB").code == 0
        assert not _weights_asked(hub)
        fewer = (*arguments, "--set", "evaluation_documents=11", "--out", "fewer")
        refused(scan(*fewer, "--set", "disk_budget=90kB"), 4, "needs", "disk_budget=")
        hub.faults.append({"match": "GET /cdn/", "skip": 1, "status": 503})
        cut = scan(*fewer)
        assert cut.code == 4, cut.err
        hub.faults.clear()
        hub.log.clear()
        done = scan(*fewer)
        assert done.code == 0, done.err
        assert 0 < len(_weights_asked(hub)) < 3  # base and two files, less what is there


def _weights_asked(hub: Hub) -> list[str]:
    return [one for one in asked_of(hub) if one.startswith("GET /cdn/")]
