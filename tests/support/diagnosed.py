"""Rows of the weights and sensitivity diagnostics."""

from __future__ import annotations

from dataclasses import replace

from qaudit.types import AuditRecord, Diagnostics, Interval, NotDiagnosed, SensitivityRow, WeightRow
from tests.support import sample

ROLE = SensitivityRow(
    subject="step10",
    scheme="gptq-3bit",
    spec="gptq:bits=3",
    part="role",
    name="down",
    bits=3,
    bits_per_weight=3.125,
    weights=100,
    absolute_change=Interval(0.06, 0.05, 0.07),
    relative_error=Interval(0.02, 0.01, 0.03),
    share=Interval(0.6, 0.52, 0.68),
)


ALL = replace(ROLE, part="all", name="3 bits", share=None)


LAST = "stage2-ingredient3-step1000"


WEIGHT = WeightRow(
    subject=LAST,
    part="role",
    name="down",
    weights=100,
    kurtosis=1.25,
    outlier_share=0.0001,
    effective_range=5.3,
    grid_distance={"3": 0.2886},
    perturbation={"rtn-3bit": 0.2, "gptq-3bit": 0.31},
    previous="stage1-step5000",
    grid_drift={"3": -0.0001},
    movement=0.2,
    details="evidence/diagnostics/x.json",
)


def diagnosed(
    weights: tuple[WeightRow, ...] = (),
    parts: tuple[SensitivityRow, ...] = (),
    skipped: tuple[NotDiagnosed, ...] = (),
) -> AuditRecord:
    tables = Diagnostics(weights=weights, sensitivity=parts, skipped=skipped)
    return replace(sample.audit(), diagnostics=tables)


def parts_of(label: str) -> tuple[SensitivityRow, ...]:
    return tuple(
        replace(row, subject=label)
        for row in (ROLE, ALL, replace(ALL, bits=4, bits_per_weight=4.125))
    )
