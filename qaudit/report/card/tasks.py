"""Accuracy on tasks: a table for what ships of each bit class, and one row for everything else."""

from __future__ import annotations

from collections.abc import Sequence

from qaudit.report import document as doc
from qaudit.report.format import percent, plural, shown
from qaudit.report.series import picture
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, Interval, TaskRow

MEAN = "mean"
_SHIPS = doc.columns(
    "task", "full precision, %", "quantized, %", "drop, points", "drop / (1 - accuracy), %",
    "flips, %", "right to wrong", "wrong to right", "p", "margins, times", "items",
)  # fmt: skip
_ALL = doc.columns("subject", "scheme", "task", "accuracy, %", "drop / (1 - accuracy), %", "items")
_ACCURACIES = doc.columns(
    "subject", "scheme", "task", "full precision, %", "quantized, %", "drop, points", "items"
)
_MOST_CELLS = 6
_IMPORTED = "imported"
_ABOUT = (
    "Drops are paired: the same items under both. A flip is an answer that went from right to "
    "wrong or back; p is McNemar's test. Margins are the median factor by which the lead of full "
    "precision's answer changes: 1 is no change, below 0 another answer."
)


def tasks_section(view: View) -> tuple[doc.Block, ...]:
    rows = view.audit.tasks
    if not rows:
        return ()
    by_cell: dict[tuple[str, str], list[TaskRow]] = {}
    for row in rows:
        by_cell.setdefault((row.subject, row.scheme), []).append(row)
    tables = [
        block
        for subject, scheme in _shipping(view, by_cell)
        if (block := _table(by_cell[subject, scheme], by_cell.get((subject, FULL_PRECISION), [])))
    ]
    whole = [some[-1] for some in by_cell.values()]  # the mean, or the only task
    every = doc.TableBlock(_ALL, tuple(map(_whole_row, whole)))
    about = (doc.paragraph(_ABOUT),) if tables else ()
    return (
        *tables,
        *about,
        *_imported(rows),
        *picture(view, "accuracy"),
        doc.fold(f"{plural(len(whole), 'score')}, of every subject", every),
    )


def _imported(rows: Sequence[TaskRow]) -> tuple[doc.Block, ...]:
    sources = dict.fromkeys((row.task, row.imported) for row in rows if row.imported)
    if not sources:
        return ()
    names = ", ".join(f"`{task}` ({source})" for task, source in sources)
    return (
        doc.paragraph(
            f"Imported: {names}. Another tool generated and marked these answers, by weights that "
            "qaudit did not see; items are paired by a hash of each item and its prompt."
        ),
    )


def _name(row: TaskRow) -> str:
    return f"{row.task}, {_IMPORTED}" if row.imported else row.task


def accuracies_section(view: View) -> tuple[doc.Block, ...]:
    by_cell: dict[tuple[str, str], list[TaskRow]] = {}
    for row in view.audit.tasks:
        by_cell.setdefault((row.subject, row.scheme), []).append(row)
    cells = _shipping(view, by_cell) or list(by_cell)
    rows = []
    for subject, scheme in cells[:_MOST_CELLS]:
        full = {row.task: row.accuracy for row in by_cell.get((subject, FULL_PRECISION), [])}
        for one in by_cell[subject, scheme]:
            percents = (_percent(part) for part in (full.get(one.task), one.accuracy, one.drop))
            texts = (one.scheme, _name(one))
            rows.append(doc.row(doc.name_cell(subject), *texts, *percents, str(one.items)))
    return (doc.TableBlock(_ACCURACIES, tuple(rows)),) if rows else ()


def _shipping(view: View, known: dict[tuple[str, str], list[TaskRow]]) -> list[tuple[str, str]]:
    """Return the cells that ship, or the pick, if tasks were scored."""
    cells = [
        (decision.subject, decision.scheme)
        for decision in (view.verdict.classes if view.verdict else ())
    ]
    if not cells and view.audit.pick is not None:
        cells = [(view.audit.pick.subject, view.audit.pick.scheme)]
    return [
        (str(subject), str(scheme))
        for subject, scheme in dict.fromkeys(cells)
        if (subject, scheme) in known and scheme != FULL_PRECISION
    ]


def _table(rows: Sequence[TaskRow], full: Sequence[TaskRow]) -> doc.Block | None:
    before = {row.task: row.accuracy for row in full}
    compared = [row for row in rows if row.drop is not None]
    if not compared:
        return None
    last = compared[-1]
    drop = "" if last.drop is None else f", {percent(last.drop)} points lost"
    what = f"{last.subject} at {last.scheme}{drop}"
    return doc.fold(
        what, doc.TableBlock(_SHIPS, tuple(_row(row, before.get(row.task)) for row in compared))
    )


def _row(one: TaskRow, before: Interval | None) -> doc.TableRow:
    return doc.row(
        doc.name_cell(_name(one)),
        *(_percent(part) for part in (before, one.accuracy, one.drop, one.accuracy_drop)),
        shown(one.flips, lambda part: f"{100 * part:.1f}"),
        shown(one.right_to_wrong, str),
        shown(one.wrong_to_right, str),
        shown(one.p_value, "{:.2g}".format),
        doc.interval_cell(shown(one.margin_factor, _factor)),
        str(one.items),
    )


def _whole_row(one: TaskRow) -> doc.TableRow:
    texts = (one.scheme, _name(one), percent(one.accuracy), shown(one.accuracy_drop, percent))
    return doc.TableRow(
        (doc.name_cell(one.subject), *map(doc.cell, texts), doc.cell(str(one.items)))
    )


def _percent(interval: Interval | None) -> doc.Cell:
    value = interval.estimate if interval else None
    return doc.interval_cell(shown(interval, percent), value=value)


def _factor(interval: Interval) -> str:
    return f"{interval.estimate:.2f} [{interval.low:.2f}, {interval.high:.2f}]"
