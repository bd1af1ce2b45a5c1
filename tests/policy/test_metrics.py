"""A metric of a policy is one record."""

from __future__ import annotations

from typing import get_args

import pytest

from qaudit.core import items, statistics
from qaudit.judge.gate.checks import SUMS
from qaudit.judge.tasks import QUANTITIES
from qaudit.types import CODES, METRICS, Interval, Metric


def test_every_metric_has_a_record_and_a_code_of_its_own() -> None:
    assert get_args(Metric) == tuple(METRICS)
    assert len({record.code for record in METRICS.values()}) == len(METRICS)
    assert {record.code for record in METRICS.values()} <= set(CODES)
    assert list(CODES) == sorted(CODES)


@pytest.mark.parametrize("name", METRICS)
def test_a_record_names_statistics_that_exist(name: str) -> None:
    record = METRICS[name]
    if record.of_rollouts:
        assert record.statistic in QUANTITIES
    else:
        assert record.of_tasks or record.sums in SUMS
        assert callable(getattr(items if record.of_tasks else statistics, record.statistic))
    assert record.worse is None or callable(getattr(statistics, record.worse))
    assert bool(record.compared) == (record.of_fidelity or record.of_rollouts)
    text = record.sentence.format(scheme="s", subject="a", against="b", change="1")
    assert ("`b`" in text) == (record.against is not None)


def test_a_margin_is_the_most_or_the_least() -> None:
    most, least = METRICS["kl"], METRICS["tokens_to_divergence"]
    inside, around, beyond = Interval(3, 2, 4), Interval(5, 4, 6), Interval(8, 7, 9)
    assert most.reaches(inside, 5) == least.reaches(beyond, 5) == (True, False)
    assert most.reaches(around, 5) == least.reaches(around, 5) == (False, False)
    assert most.reaches(beyond, 5) == least.reaches(inside, 5) == (False, True)
