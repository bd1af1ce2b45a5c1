"""A plan says why a subject that is interrupted would begin again, where it would."""

from __future__ import annotations

import pytest

from qaudit.diagnostics.registry import parse_diagnostics
from qaudit.planning.price import begins_again_notes


@pytest.mark.parametrize(
    ("rounds", "diagnose", "reason"),
    [
        (3, "curvature", "the items of tasks go through in about 3 rounds"),
        (1, "weights", "`--set diagnostics=weights` reads what is quantized"),
    ],
)
def test_what_is_not_kept_within_itself_is_said(rounds: int, diagnose: str, reason: str) -> None:
    works = [each.work((), 2) for each in parse_diagnostics([diagnose])]
    (note,) = begins_again_notes(rounds, works)
    assert note == f"a subject that is interrupted begins again, because {reason}"


def test_nothing_is_said_of_a_plain_plan() -> None:
    assert begins_again_notes(1, []) == ()
