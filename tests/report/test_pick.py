"""What every scheme takes and gives, as points and as a table."""

from __future__ import annotations

from dataclasses import replace

from qaudit.report.document import plain_text
from qaudit.report.verdict import pareto_table, points
from qaudit.report.views import View
from qaudit.types import Interval
from tests.support import sample


def with_losses(**losses: float) -> View:
    """Return an audit of one subject whose losses are known."""
    audit = sample.audit()
    scores = tuple(
        replace(s, ce=Interval(loss, loss - 0.1, loss + 0.1))
        for s in audit.measurements
        if s.subject == "soup" and (loss := losses.get(s.scheme.replace("-", "_"))) is not None
    )
    return View(replace(audit, measurements=scores))


def test_the_front_is_what_nothing_with_fewer_bits_beats() -> None:
    view = with_losses(fp=2.0, bnb_int8=2.05, gptq_4bit=2.03, awq_4bit=2.02, gptq_3bit=2.2)
    assert [(p.scheme, p.on_front) for p in points(view)] == [
        ("gptq-3bit", True),
        ("awq-4bit", True),
        ("gptq-4bit", False),
        ("bnb-int8", False),
        ("fp", True),
    ]


def test_a_broken_measurement_is_on_no_front() -> None:
    view = with_losses(fp=2.0, gptq_4bit=float("inf"))
    assert [p.scheme for p in points(view)] == ["fp"]


def test_the_table_marks_the_front_and_names_the_best_subject() -> None:
    table = pareto_table(with_losses(fp=2.0, bnb_int8=2.05))
    rows = [[plain_text(cell.runs) for cell in row.cells] for row in table.rows]
    assert [[row[k] for k in (0, 1, 4)] for row in rows] == [
        ["bnb-int8", "8.02", "soup"],
        ["fp", "16.00", "soup"],
    ]
    assert [row[2:4] for row in rows] == [["-", "-"]] * 2  # not measured
    assert [row[-1] for row in rows] == ["yes", "yes"]
