"""The runs of an audit along their course: change points, the end of improvement, correlations.

Every claim has an interval or a probability that holds for all schemes at once. None of them is
about causes: within one run everything changes together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qaudit.diagnostics.phases.judge.courses import phase_findings, phases_of
from qaudit.diagnostics.phases.traits import traits_of
from qaudit.judge.table import Table
from qaudit.saved.phased import phase_rows
from qaudit.types import Finding


def judge(table: Table, tables: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """Return the table `phases` and the findings QA030 to QA032."""
    courses = phases_of(table, traits_of(tables))
    return phase_rows(courses), phase_findings(table, courses)
