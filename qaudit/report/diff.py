"""What changed between two audits, in text for a terminal, in Markdown and in JSON.

The headline counts the numbers that are worse; the tables list differences, worst first, and what
may cause them is beneath. Numbers that are equal to the bit are counted and not listed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

from qaudit.report import document as doc
from qaudit.report import markdown, terminal
from qaudit.report.format import listing, percent, plural, spread
from qaudit.saved.codec import encode, text_of
from qaudit.types import Changed, Delta, Difference, Interval, Pick, Reading, TaskDelta
from qaudit.version import __version__

SCHEMA = "1"
MOST_ROWS = 200
_WORDS: dict[Reading, str] = {  # the worst first
    "worse": "worse",
    "better": "better",
    "unclear": "inconclusive",
    "same": "unchanged",
}
_DIGEST = re.compile(r"[0-9a-f]{32,}")


def document(difference: Difference) -> doc.Page:
    before, now = map(_named, difference.picks)
    pick = f"The pick was {before} and is {now}."
    if difference.picks == (None, None):
        pick = "Neither audit picks a subject."
    elif not difference.pick_changed:
        pick = f"The pick stays {now}."
    blocks: list[doc.Block] = [
        doc.paragraph(
            f"b is `{difference.b}`, compared with a, `{difference.a}`.",
            pick,
            *(f"Note: {note}." for note in difference.notes),
        )
    ]
    shown: tuple[tuple[str, str, str, Callable[[Interval], str]], ...] = (
        ("loss", "Losses", difference.unit, spread),
        ("relative_error", "Added losses", "% points", percent),
        ("kl", "KL divergence to full precision", "nats per token", spread),
    )
    tables = [block for each in shown for block in _table(difference.deltas, *each)]
    tables += _tasks(difference.tasks)
    documents = "unpaired, on {:,} and {:,} documents".format(*difference.documents)
    if difference.paired:
        documents = f"paired on {plural(difference.shared_documents, 'document')}"
    basis = (
        f"Differences are b minus a, positive is worse in b: {documents}; all "
        f"{plural(difference.at_once, 'interval')} hold at once at "
        f"{100 * difference.confidence:g} %."
    )
    blocks += [doc.paragraph(basis), *tables] if tables else []
    causes = {
        "Other weights under the same label": [f"`{label}`" for label in difference.weights],
        "Schemes of the same name with other settings": _lines(difference.specs),
        "Another protocol": _lines(difference.protocol),
        "Versions and machine": _lines(difference.software),
        "Subjects in one audit only": _sides(difference.subjects),
        "Schemes in one audit only": _sides(difference.schemes),
    }
    blocks += (doc.fold(title, doc.bullets(*lines)) for title, lines in causes.items() if lines)
    headline = "There is nothing to compare: no subject and scheme is in both audits."
    if difference.deltas:
        losses = _counted([delta.loss_reading for delta in difference.deltas])
        errors = _counted([delta.relative_error_reading for delta in difference.deltas])
        headline = f"Losses: {losses}. Added losses: {errors}."
        divergences = [delta.kl_reading for delta in difference.deltas]
        headline += f" KL divergence: {_counted(divergences)}." if any(divergences) else ""
        answers = [delta.reading for delta in difference.tasks]
        headline += f" Tasks: {_counted(answers)}." if answers else ""
    return doc.Page("What changed", doc.prose(headline), tuple(blocks))


def _counted(readings: Sequence[Reading | None]) -> str:
    numbers = Counter(readings)
    parts = [f"{numbers[reading]} {word}" for reading, word in _WORDS.items() if numbers[reading]]
    return listing(parts) if parts else "not compared"


def _named(pick: Pick | None) -> str:
    return "nothing" if pick is None else f"`{pick.subject}` at `{pick.scheme}`"


def _lines(changes: Sequence[Changed]) -> list[str]:
    return [f"{_code(c.what)}: {_code(c.a)} in a, {_code(c.b)} in b" for c in changes]


def _sides(changes: Sequence[Changed]) -> list[str]:
    only = {
        "a": [_code(c.what) for c in changes if c.b is None],
        "b": [_code(c.what) for c in changes if c.a is None],
    }
    return [f"{side}: {listing(names)}" for side, names in only.items() if names]


def _code(text: str | None) -> str:
    """Show a name or a value, of a digest the first twelve digits."""
    if text is None:
        return "not recorded"
    short = f"{text[:12]}.." if _DIGEST.fullmatch(text) else text
    return "`" + short.replace("`", "'") + "`"


_Row = tuple[Reading | None, float, doc.Cells]
"""The reading of a row, by how much it is worse, and its cells."""


def _table(
    deltas: Sequence[Delta], name: str, title: str, unit: str, show: Callable[[Interval], str]
) -> list[doc.Block]:
    rows: list[_Row] = []
    for delta in deltas:
        interval, reading = getattr(delta, name), getattr(delta, f"{name}_reading")
        names = map(doc.name_cell, (delta.subject, delta.scheme))
        unknown = interval is None or math.isnan(interval.estimate)
        size = math.inf if unknown else interval.estimate
        cells: doc.Cells = [*names, _WORDS[reading or "same"], doc.interval_cell(interval, show)]
        rows.append((reading, size, cells))
    return _section(title, ("subject", "scheme", "reading", f"b - a, {unit}"), rows)


def _tasks(deltas: Sequence[TaskDelta]) -> list[doc.Block]:
    rows: list[_Row] = []
    for delta in deltas:
        names = map(doc.name_cell, (delta.subject, delta.scheme, delta.task))
        items = doc.cell(f"{delta.items}{', not paired' * (not delta.paired)}", value=delta.items)
        drop = doc.interval_cell(delta.drop, percent)
        cells: doc.Cells = [*names, _WORDS[delta.reading], drop, items]
        rows.append((delta.reading, delta.drop.estimate, cells))
    columns = ("subject", "scheme", "task", "reading", "a - b, points", "items")
    return _section("Accuracy on tasks", columns, rows)


def _section(title: str, columns: Sequence[str], rows: Sequence[_Row]) -> list[doc.Block]:
    """List rows that differ, the worst first."""
    order = list(_WORDS)
    differing = [
        (order.index(reading), -size, cells)
        for reading, size, cells in rows
        if reading is not None and reading != "same"
    ]
    if not differing:
        return []
    differing.sort(key=lambda each: each[:2])
    table = doc.table(columns, [cells for *_, cells in differing[:MOST_ROWS]], caption=title)
    return [doc.Section(title, (table, *doc.and_more(len(differing) - MOST_ROWS, "row")))]


def to_json(difference: Difference) -> str:
    head = {"schema": SCHEMA, "qaudit": __version__}
    return text_of({**head, **encode(difference), "pick_changed": difference.pick_changed})


FORMATS: dict[str, Callable[[Difference], str]] = {
    "terminal": lambda difference: terminal.render(document(difference)),
    "md": lambda difference: markdown.render(document(difference)),
    "json": to_json,
}
