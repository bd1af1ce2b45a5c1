"""Items whose options have given losses."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qaudit.types import CHOICES, TaskEvidence


def items_of(
    nll: npt.NDArray[np.float64], *, options: int, answer: int = 0, task: str = CHOICES
) -> TaskEvidence:
    """Return a task in which the same option of each item is right."""
    count = len(nll) // options
    return TaskEvidence(
        task,
        nll,
        np.repeat(np.arange(count), options),
        np.tile(np.arange(options) == answer, count),
        np.zeros(len(nll), dtype=np.bool_),
    )
