"""The plan on the command line: its options, its folder, its lock, and what it says first."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.planning.prepare import LONGEST_NAME, folder_name
from tests.support.cli import QUICK, STEPS, TEXT, Run, audit_of, refused
from tests.support.hub import Hub

REPO = "lab/series"
LABELS = [f"step{step}" for step in STEPS]


@pytest.fixture
def hub(place: Path, online: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve the tiny series as branches of one repository; caches are empty."""
    shutil.copytree(place / "series", online / "root" / REPO)
    settings = {"branch_per_revision": True, "main": LABELS[-1]}
    (online / "root" / REPO / "repo.json").write_text(json.dumps(settings), encoding="utf-8")
    with Hub(online / "root").running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def planned(text: str) -> list[str]:
    """Return the lines of a plan, without those that change from one moment to the next."""
    lines = text.splitlines()
    stop = next((k for k, line in enumerate(lines) if line.startswith("time ")), len(lines))
    return [line for line in lines[:stop] if not line.startswith(("memory ", "disk "))]


# ------------------------------------------------------------------------------- what is said


def test_a_scan_begins_with_the_plan_that_a_dry_run_prints(hub: Hub, scan: Run) -> None:
    dry = scan(REPO, "--checkpoints", "step10", "--dry-run")
    assert planned(dry.out)[0].startswith("plan     1 checkpoint, 1 scheme")
    assert scan(REPO, "--checkpoints", "step10").err.splitlines()[0] == planned(dry.out)[0]
    done = scan(REPO, "--checkpoints", "step200")
    assert planned(done.err) == planned(
        dry.out.replace("step10", "step200")  # the same sizes, another checkpoint
    )


def test_a_plan_of_the_hub_is_data_too(hub: Hub, scan: Run, place: Path) -> None:
    done = scan(REPO, "--dry-run", "--json", "--set", "disk_budget=50MB")
    plan = json.loads(done.out)
    assert [subject["label"] for subject in plan["subjects"]] == [*LABELS, "main"]
    assert all(len(checkpoint["commit"]) == 40 for checkpoint in plan["checkpoints"])
    sizes = {c["files"][0]["sha256"]: c["files"][0]["nbytes"] for c in plan["checkpoints"]}
    assert len(sizes) == 3  # main is the last of them
    assert plan["traffic"]["nbytes_to_fetch"] == sum(sizes.values())
    assert plan["traffic"]["nbytes_disk_budget"] == 50_000_000
    assert any("`main`" in finding["message"] for finding in plan["findings"])
    assert not (place / "out").exists()
    (header,) = hub.asked("GET /cdn/.*")  # one stands for all files of its size
    assert header["status"] == 206


def test_a_budget_that_holds_nothing_is_refused_with_one_that_does(hub: Hub, scan: Run) -> None:
    done = scan(REPO, "--set", "disk_budget=100KB")
    refused(done, 4, "100 kB may be used", "give `--set disk_budget=")
    proposed = done.err.partition("disk_budget=")[2].partition("`")[0]
    assert scan(REPO, "--set", f"disk_budget={proposed}").code == 0


# ---------------------------------------------------------------------------------- options


@pytest.mark.slow
def test_a_local_scan_never_loads_the_client_of_the_hub(place: Path) -> None:
    code = """
import sys
from qaudit.cli import main
try:
    main()
finally:
    heavy = {"qaudit.hub.api", "qaudit.hub.fetch"}
    if "--dry-run" in sys.argv:  # an audit itself loads transformers, which loads the rest
        heavy |= {"huggingface_hub", "httpx2", "torch", "transformers"}
    print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
    base = [sys.executable, "-c", code, "scan", "series/step10", *QUICK]
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"}
    for arguments in (["-q"], ["--dry-run"]):
        done = subprocess.run(
            [*base, *arguments],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.splitlines()[-1] == "[]"


# --------------------------------------------------------------------------------- its folder


@pytest.mark.parametrize(
    ("targets", "name"),
    [
        (["org/name"], "org-name"),
        (["hf://org/name"], "org-name"),
        (["org/name@stage1-step1000"], "org-name-stage1-step1000"),
        (["org/name-*"], "org-name--"),
        (["models/step10"], "models-step10"),
        (["recipes/olmo2-7b.yaml"], "olmo2-7b"),
        (["demo"], "demo"),
        (["a", "b"], "a+b"),
        (["out/mine/plan.json"], "mine"),
        (["series/step10", "series/step200"], "step10+step200"),  # folders on this machine
        (["."], "place"),
    ],
)
def test_the_folder_is_named_after_all_targets(place: Path, targets: list[str], name: str) -> None:
    assert folder_name(targets) == name


@given(st.lists(st.from_regex(r"[a-z]{1,9}/[a-z]{1,20}", fullmatch=True), min_size=1, max_size=9))
def test_other_targets_have_another_folder_and_no_name_is_too_long(targets: list[str]) -> None:
    name = folder_name(targets)
    assert 0 < len(name) <= LONGEST_NAME
    assert "/" not in name
    assert folder_name([*targets, "org/more"]) != name
    assert folder_name(["org/more", *targets]) != name


# ----------------------------------------------------------------------------------- its lock


def test_a_local_scan_leaves_a_plan_that_is_a_target_and_that_status_and_collect_read(
    place: Path, scan: Run, qaudit: Run
) -> None:
    assert scan("series/step10").code == 0
    again = qaudit("scan", "out/plan.json", "--out", "again")
    assert again.code == 0, again.err
    rows = [audit_of(place / name)["measurements"] for name in ("out", "again")]
    assert [row["ce"] for row in rows[0]] == [row["ce"] for row in rows[1]]
    status = qaudit("status", "out")
    assert (status.code, "1 of 1 subject measured" in status.out) == (0, True)
    (place / "out" / "audit.json").unlink()
    assert qaudit("collect", "out").code == 0
    assert audit_of(place / "out")["measurements"] == rows[0]


def test_another_scheme_is_measured_at_the_commits_of_the_first(
    hub: Hub, place: Path, scan: Run
) -> None:
    scan(REPO, "--checkpoints", "step10")
    branches = hub.repos[REPO].branches
    was, branches["step10"] = branches["step10"], branches["step200"]
    hub.log.clear()
    done = scan(REPO, "--checkpoints", "step10", "--schemes", "rtn-3bit")
    assert done.code == 0
    assert not hub.asked("/api/")  # weights that were evicted come again, from where they were
    assert [s["commit"] for s in audit_of(place / "out")["subjects"]] == [was]
    moved = scan(REPO, "--checkpoints", "step10", "--schemes", "rtn-3bit", "--set", "update=true")
    assert f"it was at {was[:10]}" in " ".join(moved.err.split())
    assert [s["commit"] for s in audit_of(place / "out")["subjects"]] == [branches["step10"]]


def test_a_lock_that_is_damaged_is_refused_and_made_anew_when_asked(
    hub: Hub, place: Path, scan: Run
) -> None:
    scan(REPO, "--checkpoints", "step10")
    lock = place / "out" / "plan.json"
    whole = lock.read_text(encoding="utf-8")
    lock.write_text(whole[:100], encoding="utf-8")
    refused(scan(REPO, "--checkpoints", "step10"), 2, "cannot be read", "pass `--set update=true`")
    assert scan(REPO, "--checkpoints", "step10", "--set", "update=true").code == 0
    again = json.loads(lock.read_text(encoding="utf-8"))
    assert again["resolved"] == json.loads(whole)["resolved"]


def test_a_lock_is_not_chosen_from_and_takes_options_that_choose_nothing(
    hub: Hub, place: Path, qaudit: Run
) -> None:
    asked = [REPO, "--checkpoints", "step10", *TEXT, "--schemes", "rtn-4bit", "--out", "out"]
    assert qaudit("scan", *asked).code == 0
    for arguments, sentence, hint in (
        (["series"], "other targets are given beside it", "by itself"),
        (["--checkpoints", "step200"], "`checkpoints` would change that", "leave it out"),
        (["--soup", "a+b"], "`soups` would change that", "leave it out"),
        (["--set", "last=1"], "`last` would change that", "leave it out"),
        (["--evaluation", "other.jsonl"], "`evaluation` would change that", "leave it out"),
    ):
        refused(qaudit("scan", "out/plan.json", *arguments), 2, sentence, hint)
    again = qaudit("scan", "out/plan.json", "--schemes", "rtn-3bit", "--json")
    audit = json.loads(again.out)
    assert [row["scheme"] for row in audit["measurements"]] == ["fp", "rtn-3bit"]
    assert audit_of(place / "qaudit-out" / "out") == audit


def test_a_lock_over_folders_that_changed_is_refused(
    hub: Hub, place: Path, qaudit: Run, scan: Run
) -> None:
    assert scan(f"{REPO}@step10", "series/step200").code == 0
    weights = place / "series" / "step200" / "model.safetensors"
    weights.write_bytes((place / "series" / "step1000" / "model.safetensors").read_bytes())
    refused(qaudit("scan", "out/plan.json"), 2, "have changed since", "targets themselves")
    assert scan(f"{REPO}@step10", "series/step200").code == 0  # planned anew


def test_a_disk_budget_on_a_shared_cache_is_refused_before_anything_is_fetched(
    hub: Hub, scan: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "mounts").write_text("server:/x / nfs4 rw 0 0\n")
    monkeypatch.setattr("qaudit.host.MOUNTS", place / "mounts")
    done = scan(REPO, "--set", "disk_budget=50MB")
    refused(done, 4, "network file system (nfs4)", "leave out `disk_budget`")
    assert not (place / "out").exists()
