"""The rows of diagnostics, subject by subject, as the tables of an audit. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from qaudit.core.course import previous_of
from qaudit.diagnostics.diagnostic import Diagnostic
from qaudit.diagnostics.registry import part
from qaudit.saved.codec import decode
from qaudit.types import Diagnostics, NotDiagnosed, Subject


@dataclass(frozen=True)
class DiagnosticRows:
    """What the diagnostics of one subject gave, by name, and why others are missing."""

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def tables_of(
    diagnostics: Iterable[Diagnostic],
    rows: Mapping[str, DiagnosticRows],
    labels: Sequence[str],
    subjects: Sequence[Subject],
) -> Diagnostics:
    """Return the rows of all subjects, in the order of the labels; `subjects` is the series."""
    before = {subject.label: previous_of(subject, subjects) for subject in subjects}
    labels_before = {
        label: checkpoint.label for label, checkpoint in before.items() if checkpoint is not None
    }
    of_subject = [rows.get(label, DiagnosticRows()) for label in labels]
    tables: dict[str, Any] = {}
    names = [diagnostic.name for diagnostic in diagnostics]
    for name in names:
        table = [row for record in of_subject for row in record.rows.get(name, ())]
        summary = part(name, "summary")
        tables[name] = table if summary is None else summary.summarize(table, labels_before)
    columns = {field.name for field in fields(Diagnostics)}
    further = {name: tables.pop(name) for name in tables.keys() - columns if tables[name]}
    measured = decode(Diagnostics, {**tables, "others": further}, "diagnostics")
    skipped = (
        NotDiagnosed(label, name, record.reasons[name])
        for label, record in zip(labels, of_subject, strict=True)
        for name in names
        if name in record.reasons and name not in record.rows
    )
    return replace(measured, skipped=tuple(skipped))
