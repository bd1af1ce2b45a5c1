"""An audit with the curvature of three subjects and the loss around one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from qaudit.types import AuditRecord, CurvatureRow, Diagnostics, Interval, PlaneRow
from tests.support import sample

HELD, LAST = "stage1-step5000", "stage2-ingredient3-step1000"


def around(value: float, half: float) -> Interval:
    return Interval(value, value - half, value + half)


def model(label: str, trace: float, **changes: object) -> CurvatureRow:
    row = CurvatureRow(
        subject=label,
        part="model",
        name="all",
        parameters=10**6,
        trace=around(trace, 30.0),
        trace_elsewhere=around(trace, 100.0),
        eigenvalues=(trace / 40,),
        residuals=(0.1,),
        smallest=-3.0,
        loss=2.7,
        probes=30,
        products=47,
        documents=16,
        tokens=2560,
        documents_sha256="ab" * 32,
        notes=("trace: standard error 1.4 % of it after 30 probes",),
    )
    return replace(row, **changes)


def role(label: str, name: str, trace: float) -> CurvatureRow:
    return CurvatureRow(label, "role", name, 10**5, around(trace, 5.0), probes=30)


def point(label: str, a: float, b: float, change: float, previous: str | None = None) -> PlaneRow:
    half = 0.02 * abs(change)
    return PlaneRow(
        label, "gptq-3bit", "gptq:bits=3", a, b, around(2.7 + change, 0.2), around(change, half),
        previous, 64, 10_000, "cd" * 32, ("weights moved and run in float32",),
    )  # fmt: skip


def slice_of(label: str) -> list[PlaneRow]:
    return [point(label, 0.0, b, 0.2 * b * b) for b in (-0.5, 0.0, 0.5, 1.0, 1.5)]


def grid_of(label: str) -> list[PlaneRow]:
    places = (-0.5, 0.0, 0.5, 1.0)
    return [
        point(label, a, b, 0.2 * b * b + 0.1 * a * a + 0.05 * a * b, HELD)
        for a in places
        for b in places
    ]


def audit_with(curved: list[CurvatureRow], sliced: list[PlaneRow]) -> AuditRecord:
    tables = Diagnostics(curvature=tuple(curved), plane=tuple(sliced))
    return replace(sample.audit(), diagnostics=tables)


SERIES = [model(HELD, 1000.0), model(LAST, 3000.0), model("soup", 1200.0)]


ROLES = [role(LAST, "q", 400.0), role(LAST, "down", 2000.0)]


# --------------------------------------------------------------------------------------------------
# An audit as one flat table of values, to compare with a tolerance.


OF_THE_RUN = ("seconds", "details", "path", "evidence", "evidence_sha256")


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return values by their path, without what differs from run to run."""
    if isinstance(value, dict):
        kept = {str(k): v for k, v in value.items() if k not in OF_THE_RUN}
    elif isinstance(value, list):
        kept = {str(k): v for k, v in enumerate(value)}
    else:
        return {name: value}
    return {path: v for k, below in kept.items() for path, v in flat(below, f"{name}/{k}").items()}


def must_be_close(value: Any, expected: Any, tolerance: float) -> None:
    """Assert that floats are close and everything else is equal."""
    values, others = flat(value), flat(expected)
    assert values.keys() == others.keys()
    for name, other in others.items():
        if isinstance(other, float):
            assert math.isclose(values[name], other, rel_tol=tolerance, abs_tol=tolerance), name
        else:
            assert values[name] == other, name
