"""Another draw of calibration text in the intervals of tasks, by simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qaudit.core import items
from qaudit.core.items import Marked
from qaudit.judge.table import Measurements
from qaudit.judge.tasks import DrawShare, draw_share, widened
from qaudit.types import Interval
from tests.support import sample
from tests.support.items import answered


def test_an_interval_reaches_farther_by_the_sum_of_squares() -> None:
    found = widened(Interval(0.1, 0.07, 0.14), 0.04)
    assert (found.low, found.high) == pytest.approx((0.1 - 0.05, 0.1 + 0.04 * 2**0.5))


def test_of_a_margin_factor_one_is_no_damage() -> None:
    share = DrawShare(0.2, 1e9)
    near = share.widened(Interval(1.0, 1.0, 1.0), 0.95, origin=1.0)
    assert (near.low, near.high) == (1.0, 1.0)
    far = share.widened(Interval(0.5, 0.5, 0.5), 0.95, origin=1.0)
    assert far.low == pytest.approx(0.5 - 1.96 * 0.2 * 0.5, abs=1e-3)


def test_a_calibrated_scheme_is_wider_by_its_draws_and_no_other() -> None:
    drawn = tuple(map(answered, sample.measurements(64)))
    full = {m.subject: m.evidence.nll_sum for m in drawn if m.scheme == "fp"}
    more = tuple(
        replace(
            sample.with_loss(m, full[m.subject] + scale * (m.evidence.nll_sum - full[m.subject])),
            calibration_seed=seed,
        )
        for seed, scale in enumerate((1.3, 0.7), start=1)
        for m in drawn
        if m.scheme == "gptq-4bit"
    )
    alone = {(r.subject, r.scheme, r.task): r for r in sample.judged(drawn).tasks}
    wide = {(r.subject, r.scheme, r.task): r for r in sample.judged((*drawn, *more)).tasks}
    assert alone.keys() == wide.keys()
    changed = {key[1] for key, row in wide.items() if row != alone[key]}
    assert changed == {"gptq-4bit", "gptq-3bit", "awq-4bit", "awq-3bit"}
    key = ("soup", "gptq-4bit", "mean")
    assert wide[key].drop is not None
    assert alone[key].drop is not None
    assert wide[key].drop.estimate == alone[key].drop.estimate
    half = (alone[key].drop.high - alone[key].drop.low) / 2
    # A draw moves the damage by 30 %: of at most 0.1 + half, at 2 standard errors and more.
    share = draw_share(Measurements.of(sample.series(), (*drawn, *more), 0.95), key[:2])
    assert share is not None
    assert 0.1 < share.share <= 0.3
    assert wide[key].drop.high - wide[key].drop.low == pytest.approx(
        2 * np.hypot(half, share.reach(alone[key].drop, 0.95)), rel=0.02
    )


def test_widened_intervals_hold_the_mean_over_draws_where_those_over_items_do_not() -> None:
    """A draw makes all the damage 30 % larger or smaller; the truth is that of the mean draw."""
    random = np.random.default_rng(0)
    damage, spread, count, held = 0.08, 0.3, 4000, np.zeros(2)
    for _ in range(400):
        own = damage * max(0.0, 1 + spread * random.standard_normal())
        full = random.random(count) < 0.7
        flip = random.random(count)
        right = np.where(full, flip > own / 0.7, False)
        alone = items.drop([Marked(right, full)], 0.95, normalized=False)
        assert alone is not None
        # the share is measured with 14 degrees of freedom, relative to the far end of the loss
        measured = spread * np.sqrt(random.chisquare(14) / 14)
        both = DrawShare(float(measured), 14).widened(alone, 0.95)
        held += [alone.low <= damage <= alone.high, both.low <= damage <= both.high]
    # 400 trials: a standard error of about 1.5 points. Nothing is promised for zero damage.
    assert held[0] / 400 < 0.6
    assert held[1] / 400 > 0.9
