"""`--claim method`: everything on one draw of calibration text, what decides on two more."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import qaudit.audit
import qaudit.engine.measure
from qaudit.planning.further import further_draws
from tests.support.cli import TEXT, Outcome, Run, audit_of, refused, weights_in
from tests.support.cli import settings as hub_settings
from tests.support.hub import Hub
from tests.support.models import write_documents

LABELS = ["step10", "step200", "step1000"]
GPTQ, RTN = "gptq-3bit:group=16", "rtn-3bit:group=16"
SCHEMES = ("--schemes", f"{GPTQ},{RTN}")
TINY = ("--calibration-documents", "2", "--context", "32", "--claim", "method")
FURTHER = {1, 2}
FIRST = len(LABELS)
"""The passes of the first plan."""


@pytest.fixture
def scan(place: Path, qaudit: Run) -> Run:
    """Return a function that scans in `place`, whose calibration text is enough for 4 draws."""
    write_documents(place / "calibration.jsonl", range(100, 108))

    def run(*arguments: object, target: str = "series") -> Outcome:
        schemes = () if "--schemes" in arguments else SCHEMES
        return qaudit("scan", target, *TEXT, *TINY, *schemes, "--out", "out", *arguments)

    return run


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return the passes of engine runs: the subject and the seed of its calibration text."""
    seen: list[tuple[str, int]] = []
    really = qaudit.engine.measure.send

    def watched(task: Any, *rest: Any) -> Any:
        seen.append((task.subject.label, task.corpus.protocol.calibration_seed))
        return really(task, *rest)

    monkeypatch.setattr("qaudit.engine.measure.send", watched)
    return seen


def seeds_of(audit: dict[str, Any]) -> dict[tuple[str, str], set[int]]:
    seeds: dict[tuple[str, str], set[int]] = {}
    for row in audit["measurements"]:
        seeds.setdefault((row["subject"], row["scheme"]), set()).add(row["calibration_seed"])
    return seeds


def test_what_decides_is_measured_on_two_more_draws_within_the_plans_upper_price(
    place: Path, scan: Run, passes: list[tuple[str, int]]
) -> None:
    plan = json.loads(scan("--dry-run", "--json").out)
    assert plan["further"]["draws"] == 2
    assert 0 < plan["further"]["seconds_low"] < plan["further"]["seconds_high"]
    words = " ".join(scan("--dry-run").out.split())
    assert "then what decides is measured again with 2 more draws of calibration text" in words
    assert "at most 8 streams" in words
    assert scan().code == 0
    audit = audit_of(place / "out")
    seeds = seeds_of(audit)
    again = {cell for cell, some in seeds.items() if some != {0}}
    classes = audit["verdict"]["classes"]
    assert 1 <= len(again) <= 2
    assert {name for _, name in again} == {GPTQ}
    assert all(seeds[cell] == {0, *FURTHER} for cell in again)
    assert again == {
        (one["subject"], one["scheme"]) for one in classes if one["scheme"] == GPTQ
    } | {(one["runner_up"], GPTQ) for one in classes if one["runner_up_scheme"] == GPTQ}
    # What was drawn once takes the noise of these draws.
    assert {(p["subject"], p["scheme"], p["draws"]) for p in audit["pooled"]} == {
        (label, GPTQ, 3 if (label, GPTQ) in again else 1) for label in LABELS
    }
    assert all((p["draws"] == 1) == (p["draw_noise"] is not None) for p in audit["pooled"])
    assert {seed for _, seed in passes[:FIRST]} == {0}
    assert sorted(passes[FIRST:]) == sorted((s, k) for s, _ in again for k in FURTHER)
    assert audit["plan"]["recipe"]["repeats"] is None
    measured = sum(row["calibration_seed"] > 0 for row in audit["measurements"])
    assert measured <= plan["further"]["streams"]


def test_with_too_little_text_there_is_one_draw_and_a_note(place: Path, scan: Run) -> None:
    write_documents(place / "calibration.jsonl", range(100, 105))
    note = (
        "calibration text was drawn once, and intervals leave out the draw: 3 draws of 2 "
        "documents need 6 different ones, and the text gives 5"
    )
    plan = json.loads(scan("--dry-run", "--json").out)
    assert note in plan["notes"]
    assert plan["further"] is None
    assert scan().code == 0
    audit = audit_of(place / "out")
    assert note in audit["plan"]["protocol"]["notes"]
    assert set().union(*seeds_of(audit).values()) == {0}


@pytest.mark.parametrize("arguments", [("--repeats", 1), ("--schemes", RTN)])
def test_one_draw_was_requested_or_nothing_calibrates(
    place: Path, scan: Run, arguments: tuple[object, ...]
) -> None:
    assert json.loads(scan(*arguments, "--dry-run", "--json").out)["further"] is None
    assert scan(*arguments).code == 0
    audit = audit_of(place / "out")
    assert set().union(*seeds_of(audit).values()) == {0}
    assert audit["pooled"] == []
    assert "calibration_draws" not in audit["plan"]["protocol"]


def test_a_scan_that_ends_between_its_plans_is_resumed(
    place: Path, scan: Run, passes: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("qaudit.planning.further.further_draws", interrupted)
        assert scan().code == 130
    assert len(passes) == FIRST
    assert scan().code == 0
    assert {seed for _, seed in passes[FIRST:]} == FURTHER
    resumed = audit_of(place / "out")
    count = len(passes)
    assert scan().code == 0
    assert len(passes) == count
    assert audit_of(place / "out")["pooled"] == resumed["pooled"]


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_scan_that_is_killed_between_its_plans_is_resumed(
    place: Path, scan: Run, passes: list[tuple[str, int]]
) -> None:
    killed = (
        "import os, signal, qaudit.planning.further as further\n"
        "further.further_draws = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from qaudit.cli import main; main()"
    )
    write_documents(place / "calibration.jsonl", range(100, 108))
    done = subprocess.run(
        [sys.executable, "-c", killed, "scan", "series", *TEXT, *TINY, *SCHEMES, "--out", "out"],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (place / "out" / "audit.json").exists()
    assert scan().code == 0
    assert {seed for _, seed in passes} == FURTHER  # the first draw is not measured again


@pytest.mark.slow
def test_further_draws_fetch_again_what_the_disk_budget_evicted(
    place: Path, scan: Run, online: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.move(place / "series", online / "root" / "lab" / "series")
    hub_settings(online / "root" / "lab" / "series", branch_per_revision=True)
    with Hub(online / "root").running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        arguments = ("--disk-budget", "1MB")
        plan = json.loads(scan(*arguments, "--dry-run", "--json", target="lab/series").out)
        largest = plan["traffic"]["nbytes_to_fetch"] + plan["further"]["nbytes_to_fetch"]
        hub.log.clear()
        done = scan(*arguments, target="lab/series")
        assert done.code == 0, done.err
        sent = sum(one["sent"] for one in hub.log)
    small = 100_000  # headers and tokenizers
    assert plan["traffic"]["nbytes_to_fetch"] + small < sent <= largest + small
    assert weights_in(online / "hf") == []
    assert set().union(*seeds_of(audit_of(place / "out")).values()) >= FURTHER


def test_another_dtype_moves_the_loss_by_what_the_noise_table_says(place: Path, scan: Run) -> None:
    assert scan("--compare-dtype", "bfloat16").code == 0
    audit = audit_of(place / "out")
    noise = {(one["subject"], one["scheme"]): one for one in audit["diagnostics"]["noise"]}
    moved = {
        key: row["other_dtype"] for key, row in noise.items() if row["other_dtype"] is not None
    }
    assert {subject for subject, _ in moved} == {audit["pick"]["subject"]}
    assert all(0 < part < 0.05 for part in moved.values())  # bfloat16 has 8 bits: 2^-8 is 0.004
    assert "bfloat16" in (place / "out" / "card.md").read_text(encoding="utf-8")
    again = scan("--compare-dtype", "float32")
    refused(again, 2, "`--compare-dtype float32` is the dtype that everything", "`bfloat16`")


def test_what_ships_is_rounded_otherwise_in_a_round_of_its_own(
    place: Path, scan: Run, passes: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--claim", "file", "--schemes", GPTQ)
    assert scan(*arguments).code == 0  # it would take more than a tenth
    assert len(passes) == FIRST
    card = (place / "out" / "card.md").read_text(encoding="utf-8")
    assert "Arithmetic is not included." in card
    monkeypatch.setattr("qaudit.planning.further.ARITHMETIC", 10)
    assert "what ships is computed rounded otherwise" in " ".join(
        scan(*arguments, "--dry-run").out.split()
    )
    assert scan(*arguments).code == 0
    audit = audit_of(place / "out")
    assert passes[FIRST:] == [(audit["pick"]["subject"], 0)]
    noise = {(one["subject"], one["scheme"]) for one in audit["diagnostics"]["noise"]}
    pick = audit["pick"]["subject"]
    assert noise == {(pick, "fp"), (pick, audit["pick"]["scheme"])}
    card = (place / "out" / "card.md").read_text(encoding="utf-8")
    assert "Arithmetic: in no interval." in card
    assert scan(*arguments, "--no-arithmetic").code == 0
    assert len(passes) == FIRST + 1
    card = (place / "out" / "card.md").read_text(encoding="utf-8")
    assert "Arithmetic is not included." in card
    assert "--no-arithmetic" in card.partition("Reproduce")[2]


def test_further_draws_that_fail_leave_the_first_and_an_incomplete_audit(
    place: Path, scan: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_weights(*arguments: Any) -> Any:
        passes = further_draws(*arguments)
        for one in passes:
            (place / "series" / one.subject.label / "model.safetensors").unlink(missing_ok=True)
        return passes

    monkeypatch.setattr("qaudit.planning.further.further_draws", without_weights)
    done = scan()
    assert done.code == 3
    assert "a further round of it was not measured" in done.err
    audit = audit_of(place / "out")
    assert {subject for subject, _ in seeds_of(audit)} == set(LABELS)
    assert audit["pooled"] == []
