"""What is said of diagnostics: only what their intervals carry."""

from __future__ import annotations

from dataclasses import replace

from qaudit.diagnostics.sensitivity import diagnosed_findings
from qaudit.types import Interval, SensitivityRow
from tests.support.diagnosed import ALL, ROLE


def rules(*rows: SensitivityRow) -> list[str]:
    return [finding.rule for finding in diagnosed_findings(rows)]


def test_a_role_makes_most_of_the_error_only_with_all_of_its_interval() -> None:
    assert rules(ALL, ROLE) == ["QA035"]
    assert rules(ALL, replace(ROLE, share=Interval(0.6, 0.49, 0.7))) == []
    assert rules(ALL, replace(ROLE, share=None)) == []


def test_what_is_said_of_a_role_is_said_at_the_fewer_bits() -> None:
    four = replace(ROLE, bits=4)
    assert rules(ALL, replace(ALL, bits=4), four) == []
    assert rules(ALL, replace(ALL, bits=4), four, ROLE) == ["QA035"]


def test_a_group_of_layers_is_no_role() -> None:
    assert rules(ALL, replace(ROLE, part="layers", name="0..1")) == []
