from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qaudit.errors import AuditError
from qaudit.saved.audits import from_json, plan_to_json, to_json
from qaudit.saved.codec import text_of
from qaudit.types import AuditRecord, Finding, Interval, Subject, TextFile, Traffic
from tests.support import sample
from tests.support.items import answered
from tests.support.schemas import SCHEMA, violations


def document(audit: AuditRecord | None = None) -> dict[str, Any]:
    return json.loads(to_json(audit or sample.audit()))


def test_the_schema_knows_every_column_of_the_noise() -> None:
    rows = document(sample.repeated())["diagnostics"]["noise"]
    assert {frozenset(row) for row in rows} == {frozenset(SCHEMA["$defs"]["Noise"]["properties"])}


def test_the_columns_of_tasks_keep_their_names() -> None:
    tasks = sample.judged(tuple(map(answered, sample.measurements()))).tasks
    rows = document(replace(sample.audit(), tasks=tasks))["tasks"]
    columns = {
        *("subject", "scheme", "task", "items", "accuracy", "accuracy_low", "accuracy_high"),
        *("drop", "drop_low", "drop_high", "flips", "right_to_wrong", "wrong_to_right"),
        *("p_value", "margin_factor"),
    }
    assert {row["task"] for row in rows} == {"a", "b", "mean"}
    assert all(columns <= row.keys() for row in rows)
    (one,) = (
        row
        for row in rows
        if [row[name] for name in ("subject", "scheme", "task")] == ["soup", "rtn-4bit", "a"]
    )
    assert all(one[name] is not None for name in columns)
    assert (one["items"], one["right_to_wrong"], one["wrong_to_right"]) == (400, 30, 0)
    assert one["drop_low"] < one["drop"] == one["flips"] == 0.075 < one["drop_high"]


def test_names_that_others_build_on_are_all_there() -> None:
    written = document()
    assert set(written) >= {
        "schema", "qaudit", "plan", "environment", "subjects", "measurements", "comparisons",
        "diagnostics", "findings", "pick", "skipped",
    }  # fmt: skip
    assert set(written["measurements"][0]) >= {
        "subject", "scheme", "spec", "ce", "ce_low", "ce_high", "relative_error",
        "relative_error_low", "relative_error_high", "perplexity", "bits_per_byte", "documents",
        "tokens", "bits_per_weight", "seconds", "notes", "evidence", "evidence_sha256",
        "calibration_seed",
    }  # fmt: skip
    assert set(written["subjects"][0]) >= {
        "label", "kind", "revision", "commit", "stage", "step", "tokens_seen", "learning_rate",
        "members", "merge",
    }  # fmt: skip
    assert set(written["pick"]) >= {
        "subject", "scheme", "objective", "runner_up", "low", "high",
    }  # fmt: skip


def test_full_precision_has_no_relative_error_and_a_soup_names_its_members() -> None:
    written = document()
    full = next(m for m in written["measurements"] if m["scheme"] == "fp")
    soup = next(s for s in written["subjects"] if s["kind"] == "soup")
    assert full["relative_error"] is None
    assert full["relative_error_low"] is None
    assert [m["label"] for m in soup["members"]] == [
        f"stage2-ingredient{k}-step1000" for k in (1, 2, 3)
    ]
    assert sum(m["weight"] for m in soup["members"]) == pytest.approx(1)
    assert soup["revision"] is None


def test_a_loss_that_is_not_finite_is_written_as_null_and_comes_back() -> None:
    found = sample.measurements()
    bad = next(m for m in found if m.scheme == "rtn-3bit")
    nll = np.where(np.arange(len(bad.evidence.nll_sum)) == 3, np.nan, bad.evidence.nll_sum)
    broken = tuple(sample.with_loss(m, nll) if m is bad else m for m in found)
    audit = sample.assemble(broken, sample.series())
    audit = replace(audit, environment={**audit.environment, "load": math.nan})
    text = to_json(audit)
    assert "NaN" not in text
    assert "Infinity" not in text
    again = from_json(text)
    assert again.measurements == audit.measurements
    assert again.findings == audit.findings
    assert again.environment["load"] is None
    assert violations(json.loads(text)) == []


def test_numbers_that_are_not_finite_are_null_in_any_document() -> None:
    document = {"high": math.inf, "rows": [math.nan, 1.5]}
    assert json.loads(text_of(document)) == {"high": None, "rows": [None, 1.5]}


def of_the_hub() -> AuditRecord:
    audit = sample.audit()
    *others, (last, weight) = audit.subjects[-1].members
    odd = replace(last, suspect=("its files are those of `main`",), requires=("pickle",))
    soup = replace(audit.subjects[-1], members=(*others, (odd, weight)))
    subjects: tuple[Subject, ...] = (*audit.subjects[:-1], soup)
    plan = replace(
        audit.plan,
        subjects=subjects,
        texts=(
            TextFile("hf://datasets/a/b/c.txt", "a/b", 40 * "c", "c.txt", 7, "git:" + 40 * "d"),
        ),
        traffic=Traffic(350, 10, 61, 100, None),
        findings=(
            Finding("QA009", "warn", "soup", None, "twice the same", "leave one out"),
            Finding("QA010", "info", "soup", None, "odd", "", Interval(1.0, 0.5, math.inf), 2.0),
        ),
        detectable_relative_error=0.0012,
    )
    return replace(audit, plan=plan, subjects=subjects)


EMPTY = dict.fromkeys(("measurements", "comparisons", "findings", "tasks"), ())


@pytest.mark.parametrize(
    "audit",
    [
        sample.audit,
        sample.repeated,
        of_the_hub,
        lambda: sample.audit(1),  # whose intervals have no bound
        lambda: replace(sample.audit(), pick=None, **EMPTY),
    ],
)
def test_an_audit_comes_back_as_it_was_and_keeps_the_published_schema(
    audit: Callable[[], AuditRecord],
) -> None:
    assert from_json(to_json(audit())) == audit()
    assert violations(document(audit())) == []


def test_the_schema_refuses_what_no_audit_has() -> None:
    broken = document(of_the_hub())
    del broken["measurements"][3]["ce_low"]
    broken["comparisons"][0]["verdict"] = "splendid"
    broken["plan"]["checkpoints"][-1]["requires"] = ["everything"]
    del broken["plan"]["traffic"]["nbytes_disk_peak"]
    assert len(violations(broken)) == 4


def test_a_plan_on_its_own_has_the_names_it_has_in_an_audit() -> None:
    alone = json.loads(plan_to_json(sample.audit().plan))
    inside = document()["plan"]
    del inside["protocol"]
    assert alone == inside


def test_names_added_later_are_ignored() -> None:
    newer = document()
    newer["measurements"][0]["sharpness"] = 3
    newer["weather"] = "fine"
    assert from_json(json.dumps(newer)) == sample.audit()


def test_an_audit_from_the_future_is_refused_with_the_version_to_install() -> None:
    with pytest.raises(AuditError, match="schema version 7") as refusal:
        from_json(json.dumps(document() | {"schema": "7", "qaudit": "4.2.0"}))
    assert "4.2.0" in refusal.value.hint


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("measurements", 0, "ce"), "low"),
        (("measurements", 0, "documents"), True),
        (("measurements", 0, "subject"), "a stranger"),
        (("measurements", 0), 3),
        (("measurements",), None),
        (("subjects", 0, "members", 0, "checkpoint"), 99),
        (("subjects", 0, "members"), []),
        (("comparisons", 0, "verdict"), "splendid"),
        (("plan", "checkpoints", 0, "files"), {}),
        (("plan", "recipe", "targets"), "demo"),
        (("pick", "subject"), None),
    ],
)
def test_an_audit_edited_by_hand_is_refused_by_name(path: tuple[Any, ...], value: Any) -> None:
    edited = document()
    inner = edited
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(AuditError, match="`"):
        from_json(json.dumps(edited))


@pytest.mark.parametrize("name", sorted(SCHEMA["required"]))
def test_an_audit_with_a_part_cut_out_is_refused(name: str) -> None:
    cut = document()
    del cut[name]
    with pytest.raises(AuditError):
        from_json(json.dumps(cut))
