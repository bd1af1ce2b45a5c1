"""Phases on the card, in the audit and on the picture, of runs whose course is known."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from qaudit.diagnostics import phases
from qaudit.diagnostics.phases import section
from qaudit.errors import AuditError
from qaudit.judge import judge
from qaudit.judge.table import Measurements
from qaudit.report.markdown import render_blocks
from qaudit.report.views import View
from qaudit.saved.audits import from_json, to_json
from qaudit.types import AuditRecord, Diagnostics
from tests.support import sample
from tests.support.cards import titles, whole
from tests.support.courses import measurements, subjects
from tests.support.schemas import violations

K = np.arange(12)
LOSS = 3.0 + 1.2 * np.exp(-K)
ERRORS = {"gptq-3bit": 0.04 + 0.05 * (K > 6), "gptq-4bit": 0.01 + 0 * K}
RATES = [1e-3] * 7 + [1e-3 * (1 - k / 5) for k in range(1, 6)]


@cache
def audit(few: int = 12) -> AuditRecord:
    made = subjects(RATES[:few])
    errors = {name: course[:few] for name, course in ERRORS.items()}
    found = measurements([s.label for s in made], LOSS[:few], errors)
    files = {(m.subject, m.spec, 0): ("evidence/x.npz", "0" * 64) for m in found}
    tables, advice = phases.judge(Measurements.of(made, found, 0.95), Diagnostics())
    whole = sample.put_together(found, made, judge(made, found, files))
    return replace(whole, diagnostics=tables, findings=(*whole.findings, *advice))


def test_rows_come_back_as_they_were_and_keep_the_schema() -> None:
    text = to_json(audit())
    assert violations(json.loads(text)) == []
    assert from_json(text).diagnostics == audit().diagnostics
    assert {row.verdict for row in audit().diagnostics.phases[0].changes} >= {"change", "none"}


def test_a_row_of_another_shape_is_refused_by_name() -> None:
    document: dict[str, Any] = json.loads(to_json(audit()))
    document["diagnostics"]["phases"][0]["changes"][1]["verdict"] = "surely"
    assert violations(document)
    with pytest.raises(AuditError, match=r"phases\[0\].changes\[1\].verdict"):
        from_json(json.dumps(document))


def shown(view: View) -> str:
    return render_blocks(section(view).blocks)


def test_the_card_says_where_the_error_changes_and_what_cannot_be_told() -> None:
    text = shown(View(audit()))
    assert "starts to fall between `step7` and `step8`" in text
    assert "under gptq-3bit has a change point, a jump at 7.5M [7M, 8M] tokens" in text
    assert "indistinguishable from the start of the learning rate's decay" in text
    assert "No change point is detectable under gptq-4bit" in text
    assert "stops improving" in text
    assert "Phases" in titles(whole(audit()))


def test_the_card_of_a_short_series_says_why_nothing_was_looked_for() -> None:
    text = shown(View(audit(2)))
    assert "Change points were not searched: 2 checkpoints, and it takes 8" in text
    assert text.count("too few") <= 2


def test_names_of_others_stay_names() -> None:
    (course,) = audit().diagnostics.phases
    evil = "a|b<script>`\n# c"
    row = replace(course, checkpoints=(evil, *course.checkpoints[1:]))
    text = shown(View(replace(audit(), diagnostics=Diagnostics(phases=(row,)))))
    assert "<script>" not in text.replace("`a|b<script>'?# c`", "")
    assert "\n# c" not in text
