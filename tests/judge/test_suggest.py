"""What is worth measuring next, on a series whose truth is known."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from qaudit.judge.scores import suggest
from qaudit.judge.table import Measurements
from qaudit.report.plan import render_suggestion, suggestion_to_json
from qaudit.types import Checkpoint
from tests.support.courses import checkpoint, measurements, subjects

K = np.arange(24)
RATES = [1e-3] * 14 + [1e-3 * (1 - k / 10) for k in range(1, 11)]
LOSS = 3.0 - 0.01 * K - 0.02 * np.maximum(0, K - 13)
ERROR = 0.02 + 0.004 * np.maximum(0, K - 13) ** 1.6
QUANTIZED = LOSS * (1 + ERROR)


def series() -> list[Checkpoint]:
    return [s.first for s in subjects(RATES)]


def measured(which: range | list[int]) -> Measurements:
    made = [s for k, s in enumerate(subjects(RATES)) if k in which]
    labels = [s.label for s in made]
    found = measurements(labels, LOSS[list(which)], {"rtn-3bit": ERROR[list(which)]}, scatter=0)
    return Measurements.of(made, found, 0.95)


def test_the_best_unmeasured_checkpoint_is_among_the_first_named() -> None:
    found = suggest(measured(range(0, 24, 3)), series(), "rtn-3bit")
    best = int(np.argmin(np.where(K % 3 == 0, np.inf, QUANTIZED)))
    assert f"step{best + 1}" in [row.label for row in found.prospects[:3]]
    assert {row.label for row in found.prospects}.isdisjoint(
        {f"step{k + 1}" for k in range(0, 24, 3)}
    )
    gains = [row.gain for row in found.prospects]
    assert gains == sorted(gains, reverse=True)


def test_most_intervals_hold_what_measuring_would_show() -> None:
    found = suggest(measured(range(0, 24, 2)), series(), "rtn-3bit")
    truth = {f"step{k + 1}": QUANTIZED[k] for k in K}
    # Documents of the draw are a little easier or harder than all: a common shift.
    shift = (found.best_loss or 0.0) - truth[found.best]
    inner = [row for row in found.prospects if not row.beyond]
    held = [
        row.loss.low - 0.02 <= truth[row.label] + shift <= row.loss.high + 0.02 for row in inner
    ]
    assert np.mean(held) >= 0.8


def test_what_lies_beyond_the_measured_is_marked() -> None:
    found = suggest(measured(range(12)), series(), "rtn-3bit")
    assert {row.beyond for row in found.prospects} == {True}
    assert "further off than its interval" in render_suggestion(found)


def test_few_measurements_suggest_nothing_and_say_so() -> None:
    found = suggest(measured(range(5)), series(), "rtn-3bit")
    assert found.prospects == ()
    text = " ".join(render_suggestion(found).split())
    assert "5 checkpoints are measured; it takes 6" in text


def test_a_name_without_a_place_does_not_move_the_others() -> None:
    main = checkpoint(0, label="main", step=None, tokens=None)
    found = suggest(measured(range(0, 24, 3)), [*series(), main], "rtn-3bit")
    assert found.unit == "tokens"
    assert "main" not in [row.label for row in found.prospects]


def test_the_learning_rate_is_used_only_where_all_have_one() -> None:
    made = series()
    found = suggest(measured(range(0, 24, 3)), made, "rtn-3bit")
    assert "learning rate" in found.signals
    unknown = [*made[:-1], replace(made[-1], learning_rate=None)]
    found = suggest(measured(range(0, 24, 3)), unknown, "rtn-3bit")
    assert "learning rate" not in found.signals


def test_it_is_said_what_predictions_are_worth() -> None:
    found = suggest(measured(range(0, 24, 3)), series(), "rtn-3bit")
    text = render_suggestion(found)
    assert text.count("Error at checkpoints left out") == 2
    assert ("signals are used" in text) == (
        "signals" in {w.method for w in (found.error, found.loss) if w}
    )
    assert "they are in no audit" in text
    assert max(map(len, text.split("\n")[1:10])) <= 120
    document = json.loads(suggestion_to_json(found))
    assert document["prospects"][0]["loss"].keys() == {"estimate", "low", "high"}


def test_names_of_others_move_no_cursor() -> None:
    evil = checkpoint(25, 0.0, label="a\x1b[2J\nb")
    text = render_suggestion(suggest(measured(range(0, 24, 3)), [*series(), evil], "rtn-3bit"))
    assert "\x1b" not in text
    assert "a?[2J?b" in text
