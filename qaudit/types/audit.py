"""Everything that was planned, measured, skipped and concluded, as one value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from qaudit.types.diagnostics import Diagnostics
from qaudit.types.judged import Comparison, Finding, MeasurementRow, Pick, PooledRow, TaskRow
from qaudit.types.measured import Skipped
from qaudit.types.planned import Plan
from qaudit.types.subjects import Subject


@dataclass(frozen=True)
class AuditRecord:
    """Everything that was planned, measured, skipped and concluded."""

    plan: Plan
    environment: dict[str, Any]
    protocol: dict[str, Any]
    subjects: tuple[Subject, ...]
    measurements: tuple[MeasurementRow, ...]
    tasks: tuple[TaskRow, ...]
    comparisons: tuple[Comparison, ...]
    findings: tuple[Finding, ...]
    pick: Pick | None
    skipped: tuple[Skipped, ...]
    pooled: tuple[PooledRow, ...] = ()  # where calibration was drawn several times
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    schema: str = "1"
    qaudit: str = ""
