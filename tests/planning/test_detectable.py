"""What earlier measurements of an audit tell of what its text and items find."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qaudit.planning.detectable import with_detectable
from tests.support import sample
from tests.support.items import LOST, answered


def test_the_share_of_flips_is_the_median_over_what_is_planned_and_measured() -> None:
    plan = sample.audit().plan
    measured = tuple(map(answered, sample.measurements()))
    assert with_detectable(plan, measured).flips == pytest.approx(40 / 400)
    alone = replace(plan, specs=tuple(spec for spec in plan.specs if spec.startswith("rtn:bits=4")))
    assert with_detectable(alone, measured).flips == pytest.approx(LOST["rtn-4bit"] / 400)


def test_without_items_in_full_precision_no_share_is_known() -> None:
    plan = sample.audit().plan
    assert with_detectable(plan, sample.measurements()).flips is None
    quantized = tuple(answered(m) for m in sample.measurements() if m.scheme != "fp")
    assert with_detectable(plan, quantized).flips is None
