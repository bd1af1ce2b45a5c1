"""Phases on the card, in the audit and on the picture, of runs whose course is known."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from qaudit.diagnostics import phases
from qaudit.diagnostics.phases import section
from qaudit.judge import judge
from qaudit.judge.table import Measurements
from qaudit.report.markdown import render_blocks
from qaudit.report.views import View
from qaudit.types import AuditRecord, Diagnostics
from tests.support import sample
from tests.support.cards import titles, whole
from tests.support.courses import measurements, subjects

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
