"""`--repeats`: several draws of calibration text, from the command line to the card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import qaudit.engine.measure
from tests.support.cli import TEXT, Outcome, Run, audit_of, refused
from tests.support.models import write_documents

LABELS = ["step10", "step200", "step1000"]
TINY = ("--calibration-documents", "2", "--context", "32", "--claim", "method")
SCHEMES = "gptq-3bit:group=16,rtn-3bit:group=16"
GPTQ = "gptq-3bit:group=16"


@pytest.fixture
def repeat(place: Path, qaudit: Run) -> Run:
    """Return a function that scans in `place` under one scheme that calibrates and one not."""

    def run(*arguments: object) -> Outcome:
        fixed = ("--schemes", SCHEMES, "--out", "out")
        return qaudit("scan", "series", *TEXT, *TINY, *fixed, *arguments)

    return run


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    really = qaudit.engine.measure.send

    def watched(task: Any, *rest: Any) -> Any:
        seen.append(task.subject.label)
        return really(task, *rest)

    monkeypatch.setattr("qaudit.engine.measure.send", watched)
    return seen


def rows(audit: dict[str, Any]) -> set[tuple[str, str, int]]:
    return {(r["subject"], r["scheme"], r["calibration_seed"]) for r in audit["measurements"]}


def test_every_draw_is_measured_and_told_apart(place: Path, repeat: Run) -> None:
    done = repeat("--repeats", "2")
    assert done.code == 0
    audit = audit_of(place / "out")
    once = {(label, name, 0) for label in LABELS for name in ("fp", GPTQ, "rtn-3bit:group=16")}
    assert rows(audit) == once | {(label, GPTQ, 1) for label in LABELS}
    assert [(p["subject"], p["scheme"], p["draws"]) for p in audit["pooled"]] == [
        (label, GPTQ, 2) for label in LABELS
    ]
    noise = {(n["subject"], n["scheme"]): n for n in audit["diagnostics"]["noise"]}
    assert set(noise) == {(label, GPTQ) for label in LABELS}
    assert all(noise[label, GPTQ]["draw"] > 0 for label in LABELS)
    assert audit["plan"]["protocol"]["calibration_draws"] == 2
    assert audit["plan"]["recipe"]["repeats"] == 2
    losses = {(r["subject"], r["scheme"], r["calibration_seed"]): r for r in audit["measurements"]}
    for pooled in audit["pooled"]:
        mean = sum(losses[pooled["subject"], GPTQ, seed]["ce"] for seed in (0, 1)) / 2
        assert pooled["ce"] == pytest.approx(mean)


def test_the_card_says_what_the_width_is_made_of(place: Path, repeat: Run) -> None:
    repeat("--repeats", "2")
    card = (place / "out" / "card.md").read_text(encoding="utf-8")
    assert "What makes added losses uncertain" in card
    assert "Arithmetic is not included." in card
    assert f"| {GPTQ}" in card
    assert "--repeats 2" in card.partition("Reproduce")[2]
    assert "drawn 2 times, and the intervals include how they differ" in card


def test_the_plan_prices_every_draw(repeat: Run) -> None:
    one, two = (repeat("--dry-run", "--repeats", n, "--json") for n in (1, 2))
    first, second = json.loads(one.out), json.loads(two.out)
    assert second["streams"] == first["streams"] + 3 * 2  # full precision is beside each
    assert second["nbytes_read"] == pytest.approx(first["nbytes_read"] * 2)
    words = " ".join(repeat("--dry-run", "--repeats", 2).out.split())
    assert "and full precision, 2 calibration draws: 15 streams" in words


def test_a_second_draw_later_measures_only_that(
    place: Path, repeat: Run, passes: list[str]
) -> None:
    repeat()
    before = rows(audit_of(place / "out"))
    assert passes == LABELS
    repeat("--repeats", "2")
    assert passes[3:] == LABELS
    assert rows(audit_of(place / "out")) == before | {(label, GPTQ, 1) for label in LABELS}
    again = audit_of(place / "out")
    repeat("--repeats", "2")
    assert len(passes) == 6
    assert audit_of(place / "out")["diagnostics"] == again["diagnostics"]
    assert audit_of(place / "out")["pooled"] == again["pooled"]


def test_a_lost_measurement_of_a_draw_is_measured_again(
    place: Path, repeat: Run, passes: list[str]
) -> None:
    repeat("--repeats", "2")
    audit, count = audit_of(place / "out"), len(passes)
    lost = next(r for r in audit["measurements"] if r["calibration_seed"] == 1)
    (place / "out" / lost["evidence"]).unlink()
    repeat("--repeats", "2")
    assert passes[count:] == ["step10"]
    assert audit_of(place / "out")["pooled"] == audit["pooled"]
    assert audit_of(place / "out")["diagnostics"] == audit["diagnostics"]


def test_a_pick_from_the_folder_sees_all_draws(place: Path, repeat: Run, qaudit: Run) -> None:
    write_documents(place / "evaluation.jsonl", range(200, 240))
    repeat("--repeats", "2")
    pooled = {p["subject"]: p["ce"] for p in audit_of(place / "out")["pooled"]}
    done = qaudit("pick", "out", "--objective", f"loss@{GPTQ}", "--json")
    found = json.loads(done.out)
    point = next(p for p in found["pareto"] if p["scheme"] == GPTQ)
    assert point["ce"] == pytest.approx(min(pooled.values()))


def test_too_little_calibration_text_is_refused_before_any_weight_is_read(
    repeat: Run, passes: list[str]
) -> None:
    done = repeat("--repeats", "3")
    refused(
        done,
        2,
        "3 calibration draws of 2 documents need 6 different ones, "
        "and the calibration text gives 4",
        "lower `--repeats` or `--calibration-documents`",
    )
    assert passes == []


@pytest.mark.parametrize("number", ["0", "17", "two"])
def test_a_number_of_draws_that_cannot_be_is_refused(repeat: Run, number: str) -> None:
    done = repeat("--repeats", number)
    assert done.code == 2
    assert "--repeats" in done.err


def test_a_recipe_and_the_environment_ask_for_draws_too(
    place: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "audit.yaml").write_text(
        f"targets: [series]\nschemes: ['{GPTQ}']\nlast: 1\nrepeats: 2\n"
        "calibration: calibration.jsonl\nevaluation: evaluation.jsonl\n"
        "calibration_documents: 2\ncontext: 32\n",
        encoding="utf-8",
    )
    done = qaudit("scan", "audit.yaml", "--json", "-q")
    assert {p["draws"] for p in json.loads(done.out)["pooled"]} == {2}
    monkeypatch.setenv("QAUDIT_REPEATS", "1")
    done = qaudit("scan", "audit.yaml", "--json", "-q")
    assert json.loads(done.out)["pooled"] == []


def test_where_nothing_calibrates_the_plan_says_so(place: Path, qaudit: Run) -> None:
    more = ("--schemes", "rtn-4bit", "--repeats", "2", "--out", "out")
    done = qaudit("scan", "series", *TEXT, *TINY, *more)
    assert "no scheme here calibrates: there is nothing to draw again" in done.err
    audit = audit_of(place / "out")
    assert audit["pooled"] == []
    assert {seed for *_, seed in rows(audit)} == {0}
    assert not (place / "out" / "evidence" / "floor").exists()
