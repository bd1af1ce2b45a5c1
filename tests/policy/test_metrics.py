"""A metric of a policy is one record."""

from __future__ import annotations

from typing import get_args

import pytest

from qaudit.core import items, statistics
from qaudit.judge.gate.questions import SUMS
from qaudit.types import CODES, METRICS, Metric


def test_every_metric_has_a_record_and_a_code_of_its_own() -> None:
    assert get_args(Metric) == tuple(METRICS)
    assert len({record.code for record in METRICS.values()}) == len(METRICS)
    assert {record.code for record in METRICS.values()} <= set(CODES)
    assert list(CODES) == sorted(CODES)


@pytest.mark.parametrize("name", METRICS)
def test_a_record_names_statistics_that_exist(name: str) -> None:
    record = METRICS[name]
    assert record.of_tasks or record.sums in SUMS
    assert callable(getattr(items if record.of_tasks else statistics, record.statistic))
    assert record.worse is None or callable(getattr(statistics, record.worse))
    assert bool(record.compared) == record.of_fidelity
    text = record.sentence.format(scheme="s", subject="a", against="b", change="1")
    assert ("`b`" in text) == (record.against is not None)
