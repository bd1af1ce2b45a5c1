"""The finding about kinds of devices: silent for one, measured for several, or said to be not."""

from __future__ import annotations

import pytest

from qaudit.judge.devices import device_findings
from qaudit.judge.pooling import Moved

FLOOR = {("a", "rtn-4bit"): Moved(1e-4)}


def test_one_kind_or_none_is_no_finding() -> None:
    assert device_findings([], {}, FLOOR, ["a"]) == ()
    assert device_findings(["H200"], {}, FLOOR, ["a"]) == ()


@pytest.mark.parametrize(("nats", "level"), [(5e-5, "info"), (1e-4, "info"), (2e-4, "warn")])
def test_kinds_that_differ_by_more_than_rounding_are_a_warning(nats: float, level: str) -> None:
    moved = {
        ("a", "fp", "H200"): Moved(1e-6),
        ("a", "rtn-4bit", "H200"): Moved(nats, kl=3e-5),
    }
    (finding,) = device_findings(["A100", "H200"], moved, FLOOR, ["a"])
    assert (finding.rule, finding.level, finding.outcome) == ("QA044", level, "pass")
    assert f"on H200 the loss of `a` at rtn-4bit differs by {nats:.2g} nats" in finding.message
    assert "KL divergence by 3e-05, where rounding alone moves it by 0.0001" in finding.message
    assert bool(finding.hint) == (level == "warn")


def test_a_cell_without_a_floor_is_held_to_nothing() -> None:
    moved = {("a", "fp", "H200"): Moved(1e-6)}
    (finding,) = device_findings(["A100", "H200"], moved, {}, ["a"])
    assert (finding.level, finding.subject, finding.scheme) == ("warn", "a", "fp")


@pytest.mark.parametrize("moved", [{}, {("a", "fp", "B"): Moved(0.0)}])
def test_a_kind_that_measured_nothing_again_is_said(moved) -> None:
    (finding,) = device_findings(["A", "B", "C"], moved, FLOOR, ["a", "b"])
    assert (finding.level, finding.outcome, finding.subject) == ("warn", "inconclusive", "b")
    assert "3 kinds of devices (A, B, C), and by how much these differ is not" in finding.message
