"""Items whose options have given losses."""

from dataclasses import replace

import numpy as np

from qaudit.types import CHOICES, TaskEvidence

LOST = {"fp": 0, "rtn-4bit": 30}
"""Of 360 right answers the ones that a scheme turns wrong; any other scheme 40."""


def items_of(nll, *, options, answer=0, task=CHOICES):
    """Return a task in which the same option of each item is right."""
    count = len(nll) // options
    return TaskEvidence(
        task,
        nll,
        np.repeat(np.arange(count), options),
        np.tile(np.arange(options) == answer, count),
        np.zeros(len(nll), dtype=np.bool_),
    )


def answered(m, tasks=("a", "b")):
    """Return a measurement that has answered 400 items of each task, 40 wrong at best."""
    nll = np.repeat([[1.0, 2.0], [2.0, 1.0]], (360, 40), axis=0)
    nll[: LOST.get(m.scheme, 40)] = [2.0, 1.0]
    parts = tuple(items_of(nll.ravel(), options=2, task=name) for name in tasks)
    return replace(m, evidence=replace(m.evidence, tasks=parts))
