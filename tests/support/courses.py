"""Runs whose course is known: what happens to the loss and to each error, and where."""

import hashlib

import numpy as np

from qaudit.judge.table import Measurements
from qaudit.types import Checkpoint, Ref, WeightFile
from tests.support.measured import drawn
from tests.support.sample import alone

EVERY = 1_000_000  # tokens from one checkpoint to the next


def checkpoint(k, rate=None, **changes):
    label = changes.pop("label", f"step{k}")
    sha = hashlib.sha256(label.encode()).hexdigest()
    known = {"step": k, "tokens": k * EVERY, "learning_rate": rate, "family": "known", **changes}
    return Checkpoint(Ref("runs", label), label, (WeightFile("m", 10, sha),), **known)


def subjects(rates):
    return tuple(alone(checkpoint(k, rate)) for k, rate in enumerate(rates, start=1))


def measurements(labels, loss_N, errors, *, documents=64, scatter=0.02, seed=0):
    """Draw evidence of every checkpoint; scatter is a part of each checkpoint's error."""
    draw = np.random.default_rng(seed)
    tokens = np.clip(np.exp(5.3 + 0.5 * draw.standard_normal(documents)), 24, 256).astype(np.int64)
    difficulty = np.exp(0.2 * draw.standard_normal(documents))
    liking = np.exp(0.3 * draw.standard_normal(documents) - 0.045)
    found = []
    for k, label in enumerate(labels):
        own = np.exp(0.003 * draw.standard_normal(documents))
        full = loss_N[k] * difficulty * own * tokens
        found.append(drawn(label, "fp", "fp", full, tokens, 16.0))
        for scheme, course_N in errors.items():
            size = course_N[k] * (1 + scatter * draw.standard_normal())
            noise = 0.2 * course_N[k] * draw.standard_normal(documents)
            hurt = full * (1 + size * liking + noise)
            found.append(drawn(label, scheme, scheme, hurt, tokens, 4.0))
    return tuple(found)


def table(rates, loss_N, errors, **settings):
    made = subjects(rates)
    found = measurements([s.label for s in made], loss_N, errors, **settings)
    return Measurements.of(made, found, 0.95)
