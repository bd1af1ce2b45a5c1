"""Rows of every stratum, from the evidence of each measurement."""

from __future__ import annotations

from dataclasses import replace

from qaudit.judge.strata import stratum_rows
from qaudit.judge.table import Measurements
from qaudit.types import Diagnostics, Finding


def judge(table: Measurements, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
    return replace(diagnostics, strata=stratum_rows(table)), ()
