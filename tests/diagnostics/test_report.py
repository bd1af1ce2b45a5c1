"""What diagnostics found, in the audit and on the card."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from qaudit.errors import AuditError
from qaudit.saved.audits import from_json, to_json
from qaudit.saved.codec import encode
from qaudit.types import AuditRecord, Diagnostics, Interval, NotDiagnosed
from tests.support import sample
from tests.support.cards import section, whole
from tests.support.diagnosed import LAST, ROLE, WEIGHT, diagnosed, parts_of
from tests.support.schemas import SCHEMA, violations


def why(audit: AuditRecord) -> str:
    return section(whole(audit), "Why")


def test_rows_keep_the_schema_and_come_back_as_they_were() -> None:
    gone = NotDiagnosed(LAST, "curvature", "out of memory")
    text = to_json(diagnosed((WEIGHT,), parts_of(LAST), (gone,)))
    assert violations(json.loads(text)) == []
    assert from_json(text).diagnostics == Diagnostics(
        weights=(WEIGHT,), sensitivity=parts_of(LAST), skipped=(gone,)
    )


@pytest.mark.parametrize("row", [WEIGHT, ROLE, NotDiagnosed("a", "b", "c")])
def test_the_schema_has_every_column(row: object) -> None:
    assert set(SCHEMA["$defs"][type(row).__name__]["properties"]) == set(encode(row))


def test_an_audit_without_diagnostics_says_nothing_of_them() -> None:
    assert why(sample.audit()) == ""


def test_the_card_says_what_each_role_adds() -> None:
    text = why(diagnosed((WEIGHT,), parts_of(LAST)))
    assert "| `down` | 0.060 [0.050, 0.070] | 60.0 [52.0, 68.0] |" in text
    assert "| `down` | 1.25 | 5.3 | 20 |" in text
    assert "moved by rtn-3bit" in text


def test_what_was_not_measured_is_a_dash_and_never_a_zero() -> None:
    text = why(diagnosed((replace(WEIGHT, kurtosis=None),)))
    assert "| `down` | - | 5.3 | 20 |" in text


def test_subjects_of_no_interest_stay_in_the_audit() -> None:
    assert why(diagnosed((replace(WEIGHT, subject="stage1-step500"),))) == ""


def test_the_card_says_who_went_without_and_names_cannot_break_it() -> None:
    gone = NotDiagnosed("<b>|`x`\n# y", "curvature", "no <room> | here")
    text = why(diagnosed(skipped=(gone,)))
    assert "went without curvature" in text
    assert "<b>" not in text.replace("`<b>", "")
    assert "\n# y" not in text
    assert "<room>" not in text


def test_a_role_with_an_evil_name_stays_in_its_cell() -> None:
    text = why(diagnosed((replace(WEIGHT, name="a|b\n\n# c"),)))
    (row,) = [line for line in text.splitlines() if " c</code>" in line]
    assert row.count("|") == 5
    assert "\n# c" not in text


def test_a_damaged_row_is_refused_by_its_place() -> None:
    audit = diagnosed(parts=(replace(ROLE, share=Interval(0.5, 0.4, 0.6)),))
    document = json.loads(to_json(audit))
    document["diagnostics"]["sensitivity"][0]["bits"] = "three"
    with pytest.raises(AuditError, match=r"audit\.diagnostics\.sensitivity\[0\]\.bits"):
        from_json(json.dumps(document))
