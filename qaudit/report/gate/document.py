"""The gate as a document: the answer, a table of the checks, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from qaudit.errors import QauditError
from qaudit.judge.gate import verdict_of
from qaudit.report import document as doc
from qaudit.report import markdown
from qaudit.report.format import NOT_MEASURED, plural
from qaudit.report.gate.standing import (
    NO_ANSWER,
    counted,
    held_together,
    margin,
    sentence,
    standing,
    troubles,
    value,
    with_hint,
    word,
    worst_first,
)
from qaudit.report.verdict import answer, next_blocks
from qaudit.types import Check, Gate

TITLE = "qaudit gate"
LEFT_OUT = "Left out for length, see `qaudit gate --format json`"
COMMENT_NBYTES = 60_000
"""A pull request comment takes 65,536 characters, and a bot adds some of its own."""

MOST_ROWS, MOST_PASSING = 200, 30
COLUMNS = (
    doc.Column("subject"),
    doc.Column("scheme"),
    doc.Column("outcome"),
    doc.Column("rule"),
    doc.Column("value", "right"),
    doc.Column("margin", "right"),
)


def document(gate: Gate, most: int = MOST_ROWS) -> doc.Page:
    """Return the answer, at most so many rows of each kind, and what to do about them."""
    policy = f"Policy: `{gate.policy.name}`."
    baseline = f"Baseline: `{gate.baseline}`." if gate.baseline else ""
    bad = troubles(gate)
    passing = [check for check in worst_first(gate) if standing(check) == "pass"]
    to_do = [sentence(check) for check in bad[:most]]
    to_do += [f"Warning: {with_hint(w.message, w.hint)}" for w in gate.warnings]
    checks = f"Checks: {counted(gate)}."
    sections: list[doc.Block] = [doc.paragraph(policy, baseline, checks, held_together(gate))]
    if bad:
        sections.append(doc.Section("Checks that did not pass", _table(bad, most), expendable=1))
    if to_do:
        items = (doc.bullets(*dict.fromkeys(to_do)), *_more(bad, most, "line"))
        sections.append(doc.Section("What to do", items, expendable=2))
    if passing:
        inner = _table(passing, min(most, MOST_PASSING))
        folded = doc.fold(plural(len(passing), "check"), *inner)
        sections.append(doc.Section("Checks that passed", (folded,), expendable=3))
    verdict = verdict_of(gate, "loss")
    lead = next_blocks(verdict.next_step)
    return doc.Page(TITLE, doc.prose(answer(verdict)), (*lead, *sections))


def headline(gate: Gate) -> str:
    return answer(verdict_of(gate, "loss")).replace("`", "")


def failure(error: QauditError) -> doc.Page:
    text = with_hint(error.message, error.hint)
    return doc.Page(TITLE, doc.prose(f"{NO_ANSWER.upper()}: {text}"), ())


def within(gate: Gate, nbytes: int) -> str:
    """Render Markdown of at most so many bytes: fewer rows, then without whole sections."""
    for most in (MOST_ROWS, 50, 10):
        text = markdown.render(document(gate, most))
        if len(text.encode()) <= nbytes:
            return text
    return markdown.render(document(gate, 10), limit_nbytes=nbytes, left_out_as=LEFT_OUT)


def _table(checks: Sequence[Check], most: int) -> tuple[doc.Block, ...]:
    table = doc.TableBlock(COLUMNS, tuple(map(_row, checks[:most])))
    return (table, *_more(checks, most, "check"))


def _row(check: Check) -> doc.TableRow:
    return doc.row(
        doc.name_cell(check.subject),
        doc.name_cell(check.scheme) if check.scheme else NOT_MEASURED,
        word(check),
        check.name,
        doc.interval_cell(value(check)),
        margin(check),
    )


def _more(shown: Sequence[object], most: int, noun: str) -> tuple[doc.Block, ...]:
    more = len(shown) - most
    return (doc.paragraph(f"and {plural(more, noun)} more"),) if more > 0 else ()
