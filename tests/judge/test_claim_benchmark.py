"""What benchmarks of verdicts measured: that it holds, and of which schemes it is."""

from __future__ import annotations

import pytest

from benchmarks.claim import coverage_of_generated, false_ships
from benchmarks.deciding import followed
from benchmarks.evidence import SCHEMES, recorded
from qaudit.core.registry import parse_scheme


@pytest.mark.parametrize("scheme", SCHEMES)
def test_recorded_specs_are_those_of_the_defaults(scheme: str) -> None:
    assert recorded().about["schemes"][scheme] == parse_scheme(scheme).spec


@pytest.mark.parametrize("part", [0.7, 1.3])
def test_the_printed_command_decides_in_four_of_five_cases(part: float) -> None:
    found = followed("lognormal", part, 64, 150)
    # 150 trials of which a third is undecided: an error of 3 points beside 99 %.
    assert found.commands >= 0.9 * found.undecided > 0
    assert found.decided >= 0.8 * found.commands
    assert found.wrong <= 3


def test_the_claim_of_a_file_holds_and_ships_wrongly_in_one_of_forty_at_most() -> None:
    # 600 trials have an error of 0.9 points of coverage and of 0.6 of false SHIP.
    assert coverage_of_generated("lognormal", 64, 600, 0) >= 0.94 * 600
    for candidates in (1, 4):
        assert false_ships(candidates, 64, 600, 1) <= 0.04 * 600
