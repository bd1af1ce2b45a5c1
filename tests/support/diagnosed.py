"""Rows of diagnostics: weights, sensitivity, curvature of three subjects, the loss around one."""

from dataclasses import replace
from itertools import product

from qaudit.types import CurvatureRow, Diagnostics, Interval, PlaneRow, SensitivityRow, WeightRow
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


def diagnosed(weights=(), parts=(), **tables):
    found = Diagnostics(weights=weights, sensitivity=parts, **tables)
    return replace(sample.audit(), diagnostics=found)


def parts_of(label):
    rows = ROLE, ALL, replace(ALL, bits=4, bits_per_weight=4.125)
    return tuple(replace(row, subject=label) for row in rows)


HELD = "stage1-step5000"


def around(value, half):
    return Interval(value, value - half, value + half)


def model(label, trace, **changes):
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


def role(label, name, trace):
    return CurvatureRow(label, "role", name, 10**5, around(trace, 5.0), probes=30)


def point(label, a, b, change, previous=None):
    half = 0.02 * abs(change)
    return PlaneRow(
        label, "gptq-3bit", "gptq:bits=3", a, b, around(2.7 + change, 0.2), around(change, half),
        previous, 64, 10_000, "cd" * 32, ("weights moved and run in float32",),
    )  # fmt: skip


def slice_of(label):
    return [point(label, 0.0, b, 0.2 * b * b) for b in (-0.5, 0.0, 0.5, 1.0, 1.5)]


def grid_of(label):
    places = product((-0.5, 0.0, 0.5, 1.0), repeat=2)
    return [point(label, a, b, 0.2 * b * b + 0.1 * a * a + 0.05 * a * b, HELD) for a, b in places]


def audit_with(curved, sliced):
    return diagnosed(curvature=tuple(curved), plane=tuple(sliced))


SERIES = [model(HELD, 1000.0), model(LAST, 3000.0), model("soup", 1200.0)]


ROLES = [role(LAST, "q", 400.0), role(LAST, "down", 2000.0)]
