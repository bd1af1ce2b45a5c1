"""What the runs of an audit show along their course, with what diagnostics found beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qaudit.judge.phases import phase_findings, phases_of
from qaudit.judge.table import Table
from qaudit.saved.phased import phase_rows
from qaudit.types import Finding, Measurement, Subject

_TRAITS = (("weights", "kurtosis", "kurtosis"), ("curvature", "trace", "curvature"))
"""Table of the diagnostics, its column, and what the column is called beside an error."""


def phases_in(
    subjects: Sequence[Subject],
    measurements: Sequence[Measurement],
    confidence: float,
    diagnosed: Mapping[str, Any],
) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """Return the rows of the diagnostics and the findings."""
    table = Table.of(subjects, measurements, confidence)
    courses = phases_of(table, traits_of(diagnosed))
    return phase_rows(courses), phase_findings(table, courses)


def traits_of(diagnosed: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return what diagnostics found of whole models: quantity -> subject -> value."""
    return dict(_traits(diagnosed))


def _traits(diagnosed: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    for name, column, called in _TRAITS:
        whole = [row for row in diagnosed.get(name, ()) if row["part"] == "model"]
        known = {row["subject"]: row[column] for row in whole if row.get(column) is not None}
        if known:
            yield called, known
