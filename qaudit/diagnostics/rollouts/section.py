"""Rollouts, scored by what ships; all other streams are in `audit.json`."""

from __future__ import annotations

from collections.abc import Sequence

from qaudit.diagnostics.strata.section import interval_of, shipped
from qaudit.report import document as doc
from qaudit.report.format import percent, shown, spread
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, Diagnostics, Interval, PositionRow, RoleRow, RolloutRow

TITLE = "Rollouts"
COLUMNS = doc.columns(
    "subject", "scheme", "KL of a sequence, nats", "tokens to divergence", "never diverges, %",
    "end of turn, %", "end of reasoning, %",
)  # fmt: skip
PARTS = doc.columns("part", "tokens", "KL, nats", "end of turn, %", "end of reasoning, %")
SCORES = doc.columns("subject", "scheme", "expected score", "change", "effective samples")


def section(view: View) -> doc.Section:
    rows = {(row.subject, row.scheme): row for row in view.audit.diagnostics.rollouts}
    cells = [
        (subject, name) for subject, scheme in shipped(view) for name in (FULL_PRECISION, scheme)
    ]
    table = tuple(_row(rows[cell]) for cell in dict.fromkeys(cells) if cell in rows)
    if not table:
        return doc.Section(TITLE, (), 6)
    first = next(iter(rows.values()))
    about = (
        f"{first.samples:,} rollouts of {first.prompts:,} prompts, {first.tokens:,} tokens; "
        "intervals are over prompts. Tokens to divergence: the median along greedy rollouts; "
        "ends: how much more probable than in full precision."
    )
    shown_rows = [rows[cell] for cell in dict.fromkeys(cells) if cell in rows]
    scores = _scores(shown_rows)
    parts = [_parts(cell, view.audit.diagnostics) for cell in shipped(view)]
    blocks = (doc.paragraph(about), doc.TableBlock(COLUMNS, table), *scores)
    return doc.Section(TITLE, (*blocks, *(fold for fold in parts if fold is not None)), 6)


def _parts(cell: tuple[str, str], diagnostics: Diagnostics) -> doc.Block | None:
    rows: list[tuple[str, RoleRow | PositionRow]] = [(r.role, r) for r in diagnostics.rollout_roles]
    rows += [(f"tokens {r.first:,} to {r.last:,}", r) for r in diagnostics.rollout_positions]
    table = tuple(
        doc.row(
            name,
            f"{row.tokens:,}",
            interval_of(row.kl, spread),
            interval_of(row.end_of_turn, percent),
            interval_of(row.end_of_reasoning, percent),
        )
        for name, row in rows
        if (row.subject, row.scheme) == cell
    )
    title = f"{cell[0]} at {cell[1]}, by role and by place in the answer"
    return doc.fold(title, doc.TableBlock(PARTS, table)) if table else None


def _scores(rows: Sequence[RolloutRow]) -> tuple[doc.Block, ...]:
    """Return the scores to expect, and why some are not said; nothing without marks."""
    marked = [row for row in rows if row.unweighed or row.expected_score]
    if not marked:
        return ()
    about = (
        "Expected scores are of answers that full precision wrote and something else marked, each "
        "weighted by how likely a scheme is to write it; nothing is generated again."
    )
    reasons = dict.fromkeys(f"{r.scheme}: {r.unweighed}." for r in marked if r.unweighed)
    table = tuple(
        doc.row(
            doc.name_cell(row.subject),
            row.scheme,
            interval_of(row.expected_score, spread),
            interval_of(row.expected_change, spread),
            shown(row.effective_samples, "{:.0f}".format),
        )
        for row in marked
    )
    return (doc.paragraph(about, *reasons), doc.TableBlock(SCORES, table))


def _row(row: RolloutRow) -> doc.TableRow:
    return doc.row(
        doc.name_cell(row.subject),
        row.scheme,
        interval_of(row.sequence_kl, spread),
        _tokens(row),
        interval_of(row.never_diverges, percent),
        interval_of(row.end_of_turn, percent),
        interval_of(row.end_of_reasoning, percent),
    )


def _tokens(row: RolloutRow) -> str:
    """Print a median with its bounds, the upper of which may be beyond the longest rollout."""
    median = row.tokens_to_divergence
    if median is None:
        return "-" if row.never_diverges is None else "most never diverge"
    return f"{median.estimate:,.0f} [{_place(median, 'low')}, {_place(median, 'high')}]"


def _place(median: Interval, name: str) -> str:
    bound: float = getattr(median, name)
    return "never" if bound == float("inf") else f"{bound:,.0f}"
