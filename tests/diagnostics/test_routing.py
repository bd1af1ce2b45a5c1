"""Routing beside KL: columns, layers, card, figure and the rule of a policy."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from qaudit.core import statistics
from qaudit.diagnostics.routing import FIGURE, judge
from qaudit.judge.gate import gate
from qaudit.judge.table import Measurements
from qaudit.report.folder import figures
from qaudit.report.views import View
from qaudit.types import AuditRecord, Diagnostics, Measurement, Routing
from tests.support import sample
from tests.support.cards import section, whole
from tests.support.filled import filled
from tests.support.gated import TODAY, A, held, of, policy, rule

BLOCKS = np.array([0, 1, 3])
SHARES = np.array([0.99, 0.95, 0.9])
RULE = rule(metric="routing_agreement", margin=0.1, subjects=(A,), schemes=("rtn-4bit",))


def routed(measured: Measurement, seed: int = 0) -> Measurement:
    """Return a measurement with the routing of three layers, the last of which moves most."""
    if measured.scheme == "fp":
        return measured
    rng = np.random.default_rng([seed, measured.calibration_seed])
    tokens = measured.evidence.tokens
    other_LD = (1 - SHARES)[:, None] * rng.uniform(0.5, 1.5, (3, len(tokens))) * tokens
    other_LD *= 1 + 0.3 * measured.calibration_seed  # a draw moves all documents alike
    same = tokens - other_LD.round().astype(np.int64)
    return replace(
        measured, evidence=replace(measured.evidence, routing=Routing(BLOCKS, same, 0.5 * other_LD))
    )


@cache
def measured() -> tuple[Measurement, ...]:
    return tuple(routed(m, seed) for seed, m in enumerate(sample.measurements(16)))


@cache
def audit() -> AuditRecord:
    table = Measurements.of(sample.series(), measured(), 0.95)
    diagnostics, _ = judge(table, Diagnostics())
    return replace(sample.assemble(measured(), sample.series()), diagnostics=diagnostics)


def test_a_row_of_a_measurement_has_the_mean_over_layers() -> None:
    found = {(m.subject, m.scheme): m for m in measured()}
    for row in filled(audit().measurements):
        routing = found[row.subject, row.scheme].evidence.routing
        if routing is None:
            assert row.routing_agreement is None and row.routing_moved is None
            continue
        assert row.routing_agreement is not None and row.routing_moved is not None
        assert row.routing_agreement.estimate == pytest.approx(
            routing.same.sum() / (3 * row.tokens)
        )
        assert row.routing_moved.estimate == pytest.approx(routing.moved.sum() / (3 * row.tokens))
        assert row.routing_agreement.low < row.routing_agreement.estimate


def test_each_layer_has_its_interval_and_all_hold_at_once() -> None:
    found = measured()
    table = Measurements.of(sample.series(), found, 0.95)
    diagnostics, findings = judge(table, Diagnostics())
    assert not findings
    first = next(m for m in found if m.evidence.routing is not None)
    rows = [
        r for r in diagnostics.routing if (r.subject, r.scheme) == (first.subject, first.scheme)
    ]
    assert [row.block for row in rows] == [0, 1, 3]
    routing, tokens = first.evidence.routing, first.evidence.tokens
    assert routing is not None
    level = statistics.simultaneous(0.95, 3)
    for layer, row in enumerate(rows):
        other = statistics.interval(
            ((tokens - routing.same[layer])[tokens > 0], tokens[tokens > 0]),
            statistics.per_token,
            level,
        )
        assert row.agreement.estimate == pytest.approx(1 - other.estimate)
        assert row.agreement.low == pytest.approx(1 - other.high)
        assert row.moved.estimate == pytest.approx(routing.moved[layer].sum() / tokens.sum())


def test_the_card_has_a_table_and_a_picture_and_one_of_a_dense_model_has_neither() -> None:
    text = section(whole(audit()), "Routing")
    assert "| rtn-4bit |" in text and "least in block" in text and "routing" in text
    assert section(whole(sample.audit(16)), "Routing") == ""
    assert FIGURE.is_drawn(View(audit())) and not FIGURE.is_drawn(View(sample.audit(16)))
    drawn = figures(audit())["routing"]
    assert ">block<" in drawn and 'data-name="rtn-4bit"' in drawn


def test_a_rule_bounds_the_share_of_tokens_with_other_experts() -> None:
    found = [routed(m) for m in held().table.measurements]
    for margin, outcome in ((0.2, "pass"), (0.02, "fail")):
        bound = rule(
            metric="routing_agreement", margin=margin, subjects=(A,), schemes=("rtn-4bit",)
        )
        (check, *_) = gate(policy(bound), of(found), today=TODAY).checks
        assert (check.outcome, check.rule) == (outcome, "QA045")


def test_a_model_without_experts_has_no_answer_and_the_hint_says_why() -> None:
    (check, *_) = gate(policy(RULE), held(), today=TODAY).checks
    assert check.outcome == "missing"
    assert "the choice of experts of" in check.message and "only models with experts" in check.hint
