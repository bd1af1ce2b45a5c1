"""What is said and drawn of diagnostics: roles, strata, positions, curvature and slices."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from qaudit.audit import Audit
from qaudit.diagnostics.plane import beyond_the_parabola
from qaudit.report.folder import figures
from qaudit.report.format import digits, interval_text
from qaudit.types import Diagnostics, Interval, NotDiagnosed, PositionRow, StratumRow
from tests.support import sample
from tests.support.cards import section, whole
from tests.support.diagnosed import (
    HELD,
    LAST,
    ROLES,
    SERIES,
    WEIGHT,
    around,
    audit_with,
    diagnosed,
    grid_of,
    model,
    parts_of,
    slice_of,
)


def why(audit):
    return section(whole(audit), "Why")


def test_the_card_says_what_each_role_adds_who_went_without_and_names_cannot_break_it():
    text = why(diagnosed((WEIGHT,), parts_of(LAST)))
    assert "| `down` | 0.060 [0.050, 0.070] | 60.0 [52.0, 68.0] |" in text
    assert "| `down` | 1.25 | 5.3 | 20 |" in text
    assert "moved by rtn-3bit" in text
    assert "| `down` | - | 5.3 | 20 |" in why(diagnosed((replace(WEIGHT, kurtosis=None),)))
    assert why(diagnosed((replace(WEIGHT, subject="stage1-step500"),))) == ""  # of no interest
    assert text.count(f"What each role of `{LAST}` adds") == text.count("What each role of") == 1
    gone = NotDiagnosed("<b>|`x`\n# y", "curvature", "no <room> | here")
    text = why(diagnosed((WEIGHT,), skipped=(gone,)))
    assert text.index("The weights of") < text.index("went without curvature")
    assert "<b>" not in text.replace("`<b>", "")
    assert "\n# y" not in text
    assert "<room>" not in text


PICK = sample.audit().pick
ERRORS = {
    "subject": PICK.subject, "scheme": PICK.scheme, "spec": "spec", "tokens": 4000,
    "ce": around(3.0, 0.01), "relative_error": around(0.02, 0.01),
    "absolute_change": around(0.06, 0.01),
}  # fmt: skip
EARLY = PositionRow(first=0, last=255, **ERRORS, documents=64)
LATE = replace(EARLY, first=256, last=1023, documents=20, relative_error=around(0.09, 0.01))


def shown(*rows, positions=()):
    return replace(sample.audit(), diagnostics=Diagnostics(strata=rows, positions=positions))


def test_the_card_names_the_worst_stratum_first_and_positions_if_several(tmp_path):
    web = StratumRow(stratum="web", **ERRORS, documents=40)
    worse = around(0.05, 0.01)
    code = replace(web, stratum="code", relative_error=worse, kl=worse, is_worst=True)
    alone = Interval(0.03, -float("inf"), float("inf"))
    mail = replace(web, stratum="mail", documents=1, relative_error=alone)
    text = section(whole(shown(web, code, mail)), "Where the error is")
    # Code is the largest of three by its estimate, and mail has no upper bound.
    said = f"{PICK.subject} at {PICK.scheme}: most is added on code, 5.000 %"
    assert f"{said} (3 strata, intervals overlap)" in text
    assert text.index("`code`") < text.index("`mail`") < text.index("`web`")
    assert "| `mail` | 1 | 3.0000 [2.9900, 3.0100] | 3.000 | - |" in text
    bounded = whole(shown(web, code))
    assert "most is added on code, 5.0 [4.0, 6.0] % (2 strata)" in bounded
    records = Audit(shown(web, code), tmp_path).strata.to_records()
    assert records[1]["relative_error_high"] == pytest.approx(0.06)
    audit = shown(positions=(EARLY, LATE))
    text = whole(audit)
    assert f"{PICK.subject} at {PICK.scheme}, by position in the window" in text
    assert "| 256 to 1,023 | 20 | 3.0000 [2.9900, 3.0100] | 9.0 [8.0, 10.0] | - |" in text
    assert "Where the error is" not in whole(shown(positions=(EARLY,)))
    assert Audit(audit, tmp_path).positions.to_records()[1]["first"] == 256


# --------------------------------------------------------------------- curvature and slices


def test_the_trace_is_said_with_its_factor_and_a_loss_beside_its_parabola_is_told():
    sharp = "How sharp the loss is"
    text = section(whole(audit_with([*SERIES, *ROLES], [])), sharp)
    assert f"At the last checkpoint `{LAST}` the trace of the Hessian is 3,000" in text
    assert "its largest eigenvalue 75.0" in text
    assert "The trace rose to 3 times what it was." in text
    assert "standard error 1.4 % of it after 30 probes" in text
    assert text.index("`down`") < text.index("`q`")
    assert "| `down` | 2,000.0 [1,995.0, 2,005.0] | 67 | 20,000 |" in text
    text = section(whole(audit_with([model(HELD, 1000.0), model(LAST, 1150.0)], [])), sharp)
    assert "within their scatter" in text and "rose" not in text

    def told(*changes):
        places = (-0.5, 0.0, 0.5, 1.0)
        line = [(b, around(change, 0.01)) for b, change in zip(places, changes, strict=True)]
        return beyond_the_parabola("x", "gptq-3bit", line)

    exact = told(0.05 - 0.02, 0.0, 0.05 + 0.02, 0.24)  # 0.2 b^2 + 0.04 b
    assert "as much as the curvature at its start predicts (0.240)" in exact
    assert "more than the curvature" in told(0.05, 0.0, 0.05, 0.5)
    assert "less than the curvature" in told(0.05, 0.0, 0.05, 0.1)
    straight = [(0.0, around(0.0, 0.0)), (1.0, around(0.2, 0.01))]
    text = beyond_the_parabola("x", "gptq-3bit", straight)
    assert text.endswith("0.200 [0.190, 0.210] nats per token.")


def texts_of(svg):
    """Return the texts of a picture and the tips of its marks."""
    return [element.text for element in ElementTree.fromstring(svg).iter() if element.text]


def test_pictures_of_slices_name_models_and_subjects():
    audit = audit_with(SERIES, [*slice_of(HELD), *grid_of(LAST), *slice_of("soup")])
    texts = texts_of(figures(audit)["plane"])
    assert {"as it is", "gptq-3bit", HELD, f"Loss around {LAST}"} <= set(texts)
    assert f"{HELD}\n1 of the way to gptq-3bit\n0.2000 [0.1960, 0.2040] nats per token" in texts
    assert sum(" towards " in text and "\n" in text for text in texts) == len(grid_of(LAST))
    only_lines = texts_of(figures(audit_with([], slice_of(LAST)))["plane"])
    assert not any("towards the quantized model" in text for text in only_lines)


def test_numbers_and_intervals_have_the_digits_that_they_deserve():
    for found, text in (
        (around(41234.0, 1234.0), "41,200 [40,000, 42,500]"),
        (around(0.19901, 0.0171), "0.199 [0.182, 0.216]"),
        (around(0.0, 0.0), "0"),
        (Interval(5.0, -float("inf"), float("inf")), "5.00"),
        (None, "-"),
    ):
        assert interval_text(found) == text
    numbers = (123456.0, 12.345, 0.0012345, -7.0, 0.0, None)
    assert [digits(x) for x in numbers] == ["123,000", "12.3", "0.00123", "-7.00", "0", "-"]
