"""What is said and drawn of curvature and of slices."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from qaudit.diagnostics.plane import beyond_the_parabola
from qaudit.report.folder import figures
from qaudit.report.format import digits, interval_text
from qaudit.types import AuditRecord, Interval
from tests.support import cards
from tests.support.curved import (
    HELD,
    LAST,
    ROLES,
    SERIES,
    around,
    audit_with,
    grid_of,
    model,
    slice_of,
)


def section(audit: AuditRecord) -> str:
    return cards.section(cards.whole(audit), "How sharp the loss is")


def test_a_surge_is_said_with_its_factor() -> None:
    text = section(audit_with(SERIES, []))
    assert f"At the last checkpoint `{LAST}` the trace of the Hessian is 3,000" in text
    assert "its largest eigenvalue 75.0" in text
    assert "The trace rose to 3 times what it was." in text
    assert "standard error 1.4 % of it after 30 probes" in text


def test_traces_that_overlap_are_not_called_a_rise() -> None:
    text = section(audit_with([model(HELD, 1000.0), model(LAST, 1150.0)], []))
    assert "within their scatter" in text
    assert "rose" not in text


def test_roles_of_the_last_checkpoint_come_sharpest_first() -> None:
    text = section(audit_with([*SERIES, *ROLES], []))
    assert text.index("`down`") < text.index("`q`")
    assert "| `down` | 2,000.0 [1,995.0, 2,005.0] | 67 | 20,000 |" in text


def told(*changes: float) -> str:
    places = (-0.5, 0.0, 0.5, 1.0)
    line = [(b, around(change, 0.01)) for b, change in zip(places, changes, strict=True)]
    return beyond_the_parabola("x", "gptq-3bit", line)


def test_a_loss_on_above_or_below_the_parabola_is_told() -> None:
    exact = told(0.05 - 0.02, 0.0, 0.05 + 0.02, 0.24)  # 0.2 b^2 + 0.04 b
    assert "as much as the curvature at its start predicts (0.240)" in exact
    assert "more than the curvature" in told(0.05, 0.0, 0.05, 0.5)
    assert "less than the curvature" in told(0.05, 0.0, 0.05, 0.1)
    straight = [(0.0, around(0.0, 0.0)), (1.0, around(0.2, 0.01))]
    text = beyond_the_parabola("x", "gptq-3bit", straight)
    assert text.endswith("0.200 [0.190, 0.210] nats per token.")


def drawn(audit: AuditRecord, name: str) -> list[str]:
    """Return the texts of a picture and the tips of its marks."""
    root = ElementTree.fromstring(figures(audit)[name])
    return [element.text for element in root.iter() if element.text]


def test_the_slice_names_its_three_models_and_the_lines_their_subjects() -> None:
    audit = audit_with(SERIES, [*slice_of(HELD), *grid_of(LAST), *slice_of("soup")])
    texts = drawn(audit, "plane")
    assert {"as it is", "gptq-3bit", HELD, f"Loss around {LAST}"} <= set(texts)
    assert f"{HELD}\n1 of the way to gptq-3bit\n0.2000 [0.1960, 0.2040] nats per token" in texts
    assert sum(" towards " in text and "\n" in text for text in texts) == len(grid_of(LAST))
    only_lines = drawn(audit_with([], slice_of(LAST)), "plane")
    assert not any("towards the quantized model" in text for text in only_lines)


def test_curvature_is_drawn_above_and_eigenvalues_below_where_there_are_any() -> None:
    both = drawn(audit_with(SERIES, []), "curvature")
    assert {"trace", "largest eigenvalue", "soup\nlargest eigenvalue 30.0"} <= set(both)
    assert f"{LAST}\ntrace 3,000 [2,900, 3,100]" in both
    assert any("star: soup" in text for text in both)
    bare = [replace(row, eigenvalues=(), residuals=()) for row in SERIES]
    alone = drawn(audit_with(bare, []), "curvature")
    assert "trace" in alone
    assert "largest eigenvalue" not in alone


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (around(41234.0, 1234.0), "41,200 [40,000, 42,500]"),
        (around(0.19901, 0.0171), "0.199 [0.182, 0.216]"),
        (around(0.0, 0.0), "0"),
        (Interval(5.0, -float("inf"), float("inf")), "5.00"),
        (None, "-"),
    ],
)
def test_intervals_have_the_digits_that_they_deserve(found: Interval | None, text: str) -> None:
    assert interval_text(found) == text


def test_numbers_of_any_size_have_three_digits() -> None:
    assert [digits(x) for x in (123456.0, 12.345, 0.0012345, -7.0, 0.0, None)] == [
        "123,000", "12.3", "0.00123", "-7.00", "0", "-",
    ]  # fmt: skip
