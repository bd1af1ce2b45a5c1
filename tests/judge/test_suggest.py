"""What is worth measuring next, on a series whose truth is known."""

import json
from dataclasses import replace

import numpy as np

from qaudit.judge.scores import suggest
from qaudit.judge.table import Measurements
from qaudit.report.plan import render_suggestion, suggestion_to_json
from tests.support.courses import checkpoint, measurements, subjects

K = np.arange(24)
RATES = [1e-3] * 14 + [1e-3 * (1 - k / 10) for k in range(1, 11)]
LOSS = 3.0 - 0.01 * K - 0.02 * np.maximum(0, K - 13)
ERROR = 0.02 + 0.004 * np.maximum(0, K - 13) ** 1.6
QUANTIZED = LOSS * (1 + ERROR)


SERIES = [s.first for s in subjects(RATES)]


def suggested(which, series=SERIES):
    made, at = [subjects(RATES)[k] for k in which], list(which)
    found = measurements([s.label for s in made], LOSS[at], {"rtn-3bit": ERROR[at]}, scatter=0)
    return suggest(Measurements.of(made, found, 0.95), series, "rtn-3bit")


THIRDS = range(0, 24, 3)


def test_the_best_unmeasured_checkpoint_is_named_and_what_predictions_are_worth():
    found = suggested(THIRDS)
    best = int(np.argmin(np.where(K % 3 == 0, np.inf, QUANTIZED)))
    labels = [row.label for row in found.prospects]
    assert f"step{best + 1}" in labels[:3]
    assert {*labels}.isdisjoint(f"step{k + 1}" for k in THIRDS)
    gains = [row.gain for row in found.prospects]
    assert gains == sorted(gains, reverse=True)
    text = render_suggestion(found)
    assert text.count("Error at checkpoints left out") == 2
    assert ("signals are used" in text) == (
        "signals" in {w.method for w in (found.error, found.loss) if w}
    )
    assert "they are in no audit" in text
    assert max(map(len, text.split("\n")[1:10])) <= 120
    document = json.loads(suggestion_to_json(found))
    assert document["prospects"][0]["loss"].keys() == {"estimate", "low", "high"}

    evil = checkpoint(25, 0.0, label="a\x1b[2J\nb")  # its name moves no cursor
    text = render_suggestion(suggested(THIRDS, [*SERIES, evil]))
    assert "\x1b" not in text
    assert "a?[2J?b" in text


def test_most_intervals_hold_what_measuring_would_show():
    found = suggested(range(0, 24, 2))
    truth = {f"step{k + 1}": QUANTIZED[k] for k in K}
    # Documents of the draw are a little easier or harder than all: a common shift.
    shift = (found.best_loss or 0.0) - truth[found.best]
    inner = [row for row in found.prospects if not row.beyond]
    held = [
        row.loss.low - 0.02 <= truth[row.label] + shift <= row.loss.high + 0.02 for row in inner
    ]
    assert np.mean(held) >= 0.8


def test_what_lies_beyond_the_measured_is_marked_and_few_measurements_suggest_nothing():
    found = suggested(range(12))
    assert {row.beyond for row in found.prospects} == {True}
    assert "further off than its interval" in render_suggestion(found)
    found = suggested(range(5))
    assert found.prospects == ()
    text = " ".join(render_suggestion(found).split())
    assert "5 checkpoints are measured; it takes 6" in text


def test_places_and_learning_rates_are_used_where_they_are_known():
    main = checkpoint(0, label="main", step=None, tokens=None)
    found = suggested(THIRDS, [*SERIES, main])
    assert found.unit == "tokens"
    assert "main" not in [row.label for row in found.prospects]
    assert "learning rate" in found.signals
    found = suggested(THIRDS, [*SERIES[:-1], replace(SERIES[-1], learning_rate=None)])
    assert "learning rate" not in found.signals
