"""What changed between two audits, in text for a terminal, in Markdown and in JSON.

The first sentences say how many numbers are worse and whether the pick is another; the table has
what is shown to differ first, and what may be behind it stands beneath. What is the same to the
bit is counted and not listed.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace

from qaudit import __version__
from qaudit.errors import UsageError
from qaudit.report.format import (
    NOT_MEASURED,
    listing,
    percent,
    plural,
    printable,
    shortened,
    spread,
)
from qaudit.report.markdown import cell, folded, prose
from qaudit.saved.codec import encode, text_of
from qaudit.types import Interval, Pick
from qaudit.types.differences import Changed, Delta, Difference, Reading

SCHEMA = "1"
WIDTH = 80
MOST_ROWS = 200
_ORDER: dict[Reading | None, int] = {"worse": 0, "better": 1, "unclear": 2, "same": 3, None: 4}
_HEAD = ("loss", "error", "subject", "scheme", "loss, b - a", "error, b - a")
LONGEST_SCHEME = 14
_DIGEST = re.compile(r"[0-9a-f]{32,}")


def render(difference: Difference, form: str) -> str:
    """Render a difference in one of the formats."""
    if form not in FORMATS:
        raise UsageError(f"there is no format `{form}`", hint=f"one of {', '.join(FORMATS)}")
    return FORMATS[form](difference)


# --------------------------------------------------------------------- sentences


def _said(found: Difference) -> Iterator[str]:
    """Yield what is said first: what the numbers do, and the pick."""
    yield f"b is `{found.b}`, held against a, `{found.a}`."
    if not found.deltas:
        yield "They have no subject and scheme in common: there is nothing to compare."
    else:
        losses = _counted([delta.loss_reading for delta in found.deltas])
        errors = _counted([delta.error_reading for delta in found.deltas])
        yield f"Losses: {losses}. Relative errors: {errors}."
    yield _pick_said(*found.picks, changed=found.pick_changed)


def _counted(readings: Sequence[Reading | None]) -> str:
    numbers = Counter(readings)
    words = {"worse": "worse", "better": "better", "unclear": "unclear", "same": "same to the bit"}
    parts = [f"{numbers[r]} {words[r]}" for r in words if numbers[r]]  # type: ignore[index]
    return listing(parts) if parts else "not compared"


def _pick_said(before: Pick | None, now: Pick | None, *, changed: bool) -> str:
    if before is None and now is None:
        return "Neither picks anything."
    if not changed:
        return f"The pick stays {_named(now)}."
    return f"The pick was {_named(before)} and is {_named(now)}."


def _named(pick: Pick | None) -> str:
    return "nothing" if pick is None else f"`{pick.subject}` at `{pick.scheme}`"


def _how(found: Difference) -> str:
    """Say what the numbers of the table are."""
    basis = (
        f"paired on {plural(found.shared_documents, 'document')}"
        if found.paired
        else f"unpaired, on {found.documents[0]:,} and {found.documents[1]:,} documents"
    )
    return (
        f"Losses in {found.unit}, relative errors in percentage points; {basis}; all "
        f"{plural(found.at_once, 'interval')} hold at once at {100 * found.confidence:g} %. "
        f"Positive is worse in b."
    )


def _causes(found: Difference) -> Iterator[tuple[str, list[str]]]:
    """Yield what may be behind it, each kind with its lines."""
    yield "Other weights under the same label", [f"`{label}`" for label in found.weights]
    yield "Schemes of the same name that mean another thing", _lines(found.specs)
    yield "Measured differently", _lines(found.protocol)
    yield "Versions and machine", _lines(found.software)
    yield "Subjects that only one of them has", _sides(found.subjects)
    yield "Schemes that only one of them has", _sides(found.schemes)


def _lines(changes: Sequence[Changed]) -> list[str]:
    return [f"{_code(c.what)}: {_code(c.a)} in a, {_code(c.b)} in b" for c in changes]


def _sides(changes: Sequence[Changed]) -> list[str]:
    only = {
        "a": [_code(c.what) for c in changes if c.b is None],
        "b": [_code(c.what) for c in changes if c.a is None],
    }
    return [f"{side}: {listing(names)}" for side, names in only.items() if names]


def _code(text: str | None) -> str:
    """Show a name or a value; of a digest, as much as tells it from others."""
    if text is None:
        return "not recorded"
    shown = f"{text[:12]}.." if _DIGEST.fullmatch(text) else text
    return "`" + shown.replace("`", "'") + "`"


# --------------------------------------------------------------------- the table


def _rows(found: Difference) -> tuple[list[Delta], int]:
    """Return what is listed, the worst first, and how much more there is."""
    differing = [d for d in found.deltas if {d.loss_reading, d.error_reading} - {"same", None}]
    differing.sort(key=_badness)
    return differing[:MOST_ROWS], max(0, len(differing) - MOST_ROWS)


def _badness(delta: Delta) -> tuple[int, int, float]:
    interval = delta.loss or delta.relative_error
    size = math.inf if interval is None or math.isnan(interval.estimate) else interval.estimate
    return (
        min(_ORDER[delta.loss_reading], _ORDER[delta.error_reading]),
        _ORDER[delta.loss_reading],
        -size,
    )


def _cells(delta: Delta) -> tuple[str, ...]:
    return (
        delta.loss_reading or NOT_MEASURED,
        delta.error_reading or NOT_MEASURED,
        delta.subject,
        delta.scheme,
        _shown(delta.loss, spread),
        _shown(delta.relative_error, percent),
    )


def _shown(found: Interval | None, show: Callable[[Interval], str]) -> str:
    return NOT_MEASURED if found is None else show(found)


# --------------------------------------------------------------------- formats


def render_terminal(found: Difference) -> str:
    """Render a difference in 80 columns."""
    rows, more = _rows(found)
    parts = [_filled(" ".join(_said(found)))]
    parts += [_filled(f"Note: {note}.") for note in found.notes]
    if rows:
        parts += [_filled(_how(found)), _columns(rows)]
    if more:
        parts.append(f"and {plural(more, 'row')} more")
    for title, lines in _causes(found):
        if lines:
            parts.append("\n".join([f"{title}:", *map(_item, lines)]))
    return "\n\n".join(parts) + "\n"


def _filled(text: str) -> str:
    return textwrap.fill(printable(text.replace("`", "")), WIDTH)


def _item(text: str) -> str:
    plain = printable(text.replace("`", ""))
    return textwrap.fill(plain, WIDTH, initial_indent="- ", subsequent_indent="  ")


def _columns(rows: Sequence[Delta]) -> str:
    """Set the rows of each subject beneath its name; who has the worst row stands first."""
    head = tuple(name for name in _HEAD if name != "subject")
    lines = [head, *(_without_subject(delta) for delta in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ["  " + "  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    under: dict[str, list[str]] = {}
    for delta, text in zip(rows, texts[1:], strict=True):
        under.setdefault(shortened(printable(delta.subject), WIDTH), []).append(text)
    return "\n".join([texts[0], *(line for name in under for line in (name, *under[name]))])


def _without_subject(delta: Delta) -> tuple[str, ...]:
    loss, error, _, scheme, *numbers = _cells(delta)
    return (loss, error, shortened(printable(scheme), LONGEST_SCHEME), *numbers)


def render_markdown(found: Difference) -> str:
    """Render a difference for a pull request or a page."""
    rows, more = _rows(found)
    parts = [prose(" ".join(_said(found)))]
    parts += [prose(f"Note: {note}.") for note in found.notes]
    if rows:
        parts += [prose(_how(found)), _table(rows)]
    if more:
        parts.append(f"and {plural(more, 'row')} more")
    for title, lines in _causes(found):
        if lines:
            parts.append(folded(title, "\n".join(f"- {prose(line)}" for line in lines)))
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Delta]) -> str:
    lines = [f"| {' | '.join(_HEAD)} |", "| --- " * len(_HEAD) + "|"]
    for delta in rows:
        loss, error, subject, scheme, *numbers = _cells(delta)
        lines.append(f"| {' | '.join([loss, error, cell(subject), cell(scheme), *numbers])} |")
    return "\n".join(lines)


def render_json(found: Difference) -> str:
    """Write a difference, every row and everything that changed."""
    flat = replace(found, deltas=(), picks=(None, None))
    document = {
        "schema": SCHEMA,
        "qaudit": __version__,
        **asdict(flat),
        "deltas": [_delta_row(delta) for delta in found.deltas],
        "pick_changed": found.pick_changed,
        "picks": [pick and encode(pick) for pick in found.picks],
    }
    return text_of(document)


def _delta_row(delta: Delta) -> dict[str, object]:
    row: dict[str, object] = {"subject": delta.subject, "scheme": delta.scheme}
    for name, interval, reading in (
        ("loss", delta.loss, delta.loss_reading),
        ("relative_error", delta.relative_error, delta.error_reading),
    ):
        row[name] = interval and interval.estimate
        row[f"{name}_low"] = interval and interval.low
        row[f"{name}_high"] = interval and interval.high
        row[f"{name}_reading"] = reading
    return {**row, "documents": delta.documents}


FORMATS: dict[str, Callable[[Difference], str]] = {
    "terminal": render_terminal,
    "md": render_markdown,
    "json": render_json,
}
