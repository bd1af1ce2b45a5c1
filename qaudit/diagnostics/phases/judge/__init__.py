"""The runs of an audit along their course: change points, the end of improvement, correlations.

Every claim has an interval or a probability that holds for all schemes at once. None of them is
about causes: within one run everything changes together.
"""

from __future__ import annotations

from dataclasses import replace

from qaudit.diagnostics.phases.judge.courses import phase_findings, phases_of
from qaudit.diagnostics.phases.traits import traits_of
from qaudit.judge.table import Table
from qaudit.types import Diagnostics, Finding


def judge(table: Table, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
    """Return the diagnostics with the table `phases`, and the findings QA030 to QA032."""
    courses = phases_of(table, traits_of(diagnostics))
    return replace(diagnostics, phases=tuple(courses)), phase_findings(table, courses)
