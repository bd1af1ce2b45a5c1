"""The pick: of the classes of a verdict the one that `pick` in audit.json and `@pick` are about."""

from __future__ import annotations

from collections.abc import Sequence

from qaudit.judge.objectives import LOSS, Objective
from qaudit.judge.table import Measurements
from qaudit.judge.verdict import choices
from qaudit.types import ClassVerdict, Pick

MAIN = "4"
"""The class of the pick where it was measured; else that of the most bits."""


def choose(
    table: Measurements, objective: Objective | None = None, classes: Sequence[str] = ()
) -> Pick | None:
    """Pick a subject and a scheme, or nothing where nothing is measured that could be."""
    return pick_of(choices(table, objective or LOSS, classes))


def pick_of(classes: Sequence[ClassVerdict]) -> Pick | None:
    chosen = main_class(classes)
    if chosen is None or chosen.subject is None or chosen.scheme is None:
        return None
    subjects = dict.fromkeys(name.rpartition(" at ")[0] for name in chosen.contenders)
    return Pick(
        subject=chosen.subject,
        scheme=chosen.scheme,
        objective=chosen.objective,
        runner_up=chosen.runner_up,
        runner_up_scheme=chosen.runner_up_scheme,
        interval=chosen.lead,
        confirmed_on=chosen.confirmed_on,
        reference=chosen.reference,
        contenders=tuple(label for label in subjects if label != chosen.subject),
        changes=chosen.changes,
        held_out=chosen.held_out,
    )


def main_class(classes: Sequence[ClassVerdict]) -> ClassVerdict | None:
    """Return the class that is shown where only one can be."""
    named = [decision for decision in classes if decision.subject is not None]
    of_main = (decision for decision in named if decision.bit_class == MAIN)
    return next(of_main, named[0] if named else None)
