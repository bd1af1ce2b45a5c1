"""Several draws of calibration text: what is measured for them, and the floor under all of them.

Every subject is measured with every draw while its weights are there. The last checkpoint is
measured once more with the first draw, the same sums formed in another order. Nothing but
rounding can tell the two apart, and that is no small matter: a difference in the last digit of
the first block makes GPTQ round other weights by the fifth. What comes out is no measurement of
a subject; it says below which difference nothing here can tell anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from qaudit.core.scheme import Scheme
from qaudit.engine.tasks import Machine, Task, look_up
from qaudit.errors import SourceError
from qaudit.planning.repeats import last_checkpoint
from qaudit.saved.results import ResultStore
from qaudit.types import Corpus, Evidence, Subject


def tasks_of(
    subjects: Sequence[Subject], corpus: Corpus, schemes: tuple[Scheme, ...]
) -> list[Task]:
    """Return what is measured of each subject: every draw, and of the last checkpoint the floor."""
    first, *further = corpus.draws
    tasks = [Task(subject, first, schemes, further=tuple(further)) for subject in subjects]
    last = last_checkpoint(subjects)
    if further and last is not None:
        tasks[last] = replace(tasks[last], shows_floor=True)
    return tasks


def floor_of(
    tasks: Sequence[Task], machine: Machine, store: ResultStore
) -> dict[tuple[str, str], float]:
    """Return by how many nats per token rounding moved each (subject, scheme) it was tried on."""
    moved = {}
    for task in tasks:
        if task.shows_floor:
            try:
                found = look_up(task, machine, store).floor
            except SourceError:  # it could not be measured, which is said where it was tried
                continue
            for filed in found.values():
                one, other = (f.measurement for f in filed)
                difference = abs(_loss(one.evidence) - _loss(other.evidence))
                if math.isfinite(difference):
                    moved[one.subject, one.scheme] = difference
    return moved


def _loss(evidence: Evidence) -> float:
    return float(evidence.nll_sum.sum()) / float(evidence.tokens.sum())
