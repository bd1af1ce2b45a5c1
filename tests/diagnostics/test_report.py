"""What diagnostics found, in the audit and on the card: roles, strata and positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from qaudit.audit import Audit
from qaudit.types import AuditRecord, Diagnostics, Interval, NotDiagnosed, PositionRow, StratumRow
from tests.support import sample
from tests.support.cards import section, whole
from tests.support.diagnosed import LAST, WEIGHT, diagnosed, parts_of


def why(audit: AuditRecord) -> str:
    return section(whole(audit), "Why")


def test_the_card_says_what_each_role_adds() -> None:
    text = why(diagnosed((WEIGHT,), parts_of(LAST)))
    assert "| `down` | 0.060 [0.050, 0.070] | 60.0 [52.0, 68.0] |" in text
    assert "| `down` | 1.25 | 5.3 | 20 |" in text
    assert "moved by rtn-3bit" in text
    assert "| `down` | - | 5.3 | 20 |" in why(diagnosed((replace(WEIGHT, kurtosis=None),)))
    assert why(diagnosed((replace(WEIGHT, subject="stage1-step500"),))) == ""  # of no interest
    assert text.count(f"What each role of `{LAST}` adds") == text.count("What each role of") == 1


def test_the_card_says_who_went_without_and_names_cannot_break_it() -> None:
    gone = NotDiagnosed("<b>|`x`\n# y", "curvature", "no <room> | here")
    text = why(diagnosed((WEIGHT,), skipped=(gone,)))
    assert text.index("The weights of") < text.index("went without curvature")
    assert "<b>" not in text.replace("`<b>", "")
    assert "\n# y" not in text
    assert "<room>" not in text


def of(estimate: float) -> Interval:
    return Interval(estimate, estimate - 0.01, estimate + 0.01)


def shown(rows: tuple[StratumRow, ...], positions: tuple[PositionRow, ...] = ()) -> AuditRecord:
    return replace(sample.audit(), diagnostics=Diagnostics(strata=rows, positions=positions))


@pytest.fixture
def pick() -> tuple[str, str]:
    pick = sample.audit().pick
    assert pick is not None
    return pick.subject, pick.scheme


def errors(pick: tuple[str, str]) -> dict[str, Any]:
    return {
        "subject": pick[0],
        "scheme": pick[1],
        "spec": "spec",
        "tokens": 4000,
        "ce": of(3.0),
        "relative_error": of(0.02),
        "absolute_change": of(0.06),
    }


@pytest.fixture
def strata(pick: tuple[str, str]) -> tuple[StratumRow, ...]:
    web = StratumRow(stratum="web", **errors(pick), documents=40)
    code = replace(web, stratum="code", relative_error=of(0.05), kl=of(0.1), is_worst=True)
    alone = Interval(0.03, -float("inf"), float("inf"))
    return web, code, replace(web, stratum="mail", documents=1, relative_error=alone)


@pytest.fixture
def positions(pick: tuple[str, str]) -> tuple[PositionRow, ...]:
    early = PositionRow(first=0, last=255, **errors(pick), documents=64)
    return early, replace(early, first=256, last=1023, documents=20, relative_error=of(0.09))


def test_tables_have_the_names_of_the_audit(
    strata: tuple[StratumRow, ...], positions: tuple[PositionRow, ...], tmp_path
) -> None:
    audit = Audit(shown(strata, positions), tmp_path)
    assert audit.strata.to_records()[1]["relative_error_high"] == pytest.approx(0.06)
    assert audit.positions.to_records()[1]["first"] == 256


def test_the_card_names_the_worst_stratum_first(
    strata: tuple[StratumRow, ...], pick: tuple[str, str]
) -> None:
    text = section(whole(shown(strata)), "Where the error is")
    # Code is the largest of three by its estimate, and mail has no upper bound.
    assert (
        f"{pick[0]} at {pick[1]}: most is added on code, 5.000 % (3 strata, intervals overlap)"
        in text
    )
    assert text.index("`code`") < text.index("`mail`") < text.index("`web`")
    assert "| `mail` | 1 | 3.0000 [2.9900, 3.0100] | 3.000 | - |" in text
    bounded = whole(shown(strata[:2]))
    assert "most is added on code, 5.0 [4.0, 6.0] % (2 strata)" in bounded


def test_the_card_shows_positions_where_there_are_several(
    positions: tuple[PositionRow, ...], pick: tuple[str, str]
) -> None:
    text = whole(shown((), positions))
    assert f"{pick[0]} at {pick[1]}, by position in the window" in text
    assert "| 256 to 1,023 | 20 | 3.0000 [2.9900, 3.0100] | 9.0 [8.0, 10.0] | - |" in text
    assert "Where the error is" not in whole(shown((), positions[:1]))
