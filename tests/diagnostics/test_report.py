"""What diagnostics found, in the audit and on the card."""

from __future__ import annotations

from dataclasses import replace

from qaudit.types import AuditRecord, NotDiagnosed
from tests.support.cards import section, whole
from tests.support.diagnosed import LAST, WEIGHT, diagnosed, parts_of


def why(audit: AuditRecord) -> str:
    return section(whole(audit), "Why")


def test_the_card_says_what_each_role_adds() -> None:
    text = why(diagnosed((WEIGHT,), parts_of(LAST)))
    assert "| `down` | 0.060 [0.050, 0.070] | 60.0 [52.0, 68.0] |" in text
    assert "| `down` | 1.25 | 5.3 | 20 |" in text
    assert "moved by rtn-3bit" in text
    assert text.count(f"What each role of `{LAST}` adds") == text.count("What each role of") == 1


def test_what_was_not_measured_is_a_dash_and_never_a_zero() -> None:
    text = why(diagnosed((replace(WEIGHT, kurtosis=None),)))
    assert "| `down` | - | 5.3 | 20 |" in text


def test_subjects_of_no_interest_stay_in_the_audit() -> None:
    assert why(diagnosed((replace(WEIGHT, subject="stage1-step500"),))) == ""


def test_the_card_says_who_went_without_and_names_cannot_break_it() -> None:
    gone = NotDiagnosed("<b>|`x`\n# y", "curvature", "no <room> | here")
    text = why(diagnosed((WEIGHT,), skipped=(gone,)))
    assert text.index("The weights of") < text.index("went without curvature")
    assert "<b>" not in text.replace("`<b>", "")
    assert "\n# y" not in text
    assert "<room>" not in text
