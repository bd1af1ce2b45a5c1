"""The first screen of an audit: what ships of each class, by how much, and one next command.

The same table on the terminal and at the top of card and page. Every number is in `verdict` of
audit.json too.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Sequence

from qaudit.report import document as doc
from qaudit.report.format import listing, plural, shortened, size
from qaudit.report.verdict import default_folder, label
from qaudit.report.views import View
from qaudit.types import CODES, ClassVerdict, Interval, Verdict

LONGEST = 22  # columns of what ships: with the others the table fits into 80
MOST_NAMES = 4
_RULE = re.compile(r"\(rule `([^`]+)`\)$")


def measured(view: View) -> str:
    """Return what was measured, on how much text."""
    audit = view.audit
    targets = listing(list(audit.plan.recipe.targets) or ["nothing"])
    if not audit.measurements:
        return "Nothing was measured."
    parts = [plural(len(view.checkpoints), "checkpoint")] * bool(view.checkpoints)
    parts += [plural(len(view.soups), "soup")] * bool(view.soups)
    parts += [plural(len(view.schemes), "scheme")]
    tokens = max(score.tokens for score in audit.measurements)
    text = f"{plural(view.documents, view.unit)} ({tokens:,} tokens)"
    return f"{shortened(targets, 40)}: {', '.join([*parts, text])}"


def screen(view: View, folder: str | None = None) -> tuple[doc.Block, ...]:
    """Return the table, what it leaves out, and the next command; `folder` has the audit."""
    verdict = view.audit.verdict
    if verdict is None or not verdict.classes:
        nothing = "No quantized loss was measured: no verdict."
        return (doc.paragraph(nothing),) if view.audit.measurements else ()
    place = folder or default_folder(view.audit)
    sentences = [*_reasons(verdict), *_beside(view), *_warnings(view, verdict)]
    return (
        table(verdict.classes),
        *([doc.lines(*sentences)] if sentences else []),
        *_commands(view, verdict, place),
    )


def table(classes: Sequence[ClassVerdict]) -> doc.TableBlock:
    """Return one row for each bit class: what ships, what it adds, its margin and its status."""
    rows = (
        (
            label(one),
            _ships(one),
            "" if one.bits_per_weight is None else f"{one.bits_per_weight:.2f}",
            "" if one.nbytes is None else size(one.nbytes),
            _adds(one),
            f"{100 * one.margin:g} %" if one.margin is not None and _bounds_loss(one) else "-",
            _status(one),
        )
        for one in classes
    )
    return doc.table(
        ("", "ships", "bits", "size", "adds to loss", "margin", ""), rows, name="ships"
    )


def _ships(one: ClassVerdict) -> str:
    if one.subject is None or one.scheme is None:
        return "not measured"
    room = max(6, LONGEST - len(one.scheme) - 1)
    return f"{shortened(one.subject, room)} {one.scheme}"


def _status(one: ClassVerdict) -> str:
    text = doc.status_in_words(one.status).upper()
    return f"{text} (warns)" if one.level == "warn" and one.status != "ship" else text


def _bounds_loss(one: ClassVerdict) -> bool:
    return one.metric in (None, "relative_error")


def _adds(one: ClassVerdict) -> str:
    """Print an added loss; its ends are on the side of the margin where they are."""
    if one.relative_error is None:
        return "-"
    margin = one.margin if _bounds_loss(one) else None
    return added(one.relative_error, None if margin is None else 100 * margin)


def added(error: Interval, margin: float | None = None) -> str:
    """Print a fraction in percent with the digits that its width deserves: `1.4 % [1.2, 1.7]`."""
    values = [100 * end for end in (error.estimate, error.low, error.high)]
    half = (values[2] - values[1]) / 2
    if half == 0:
        return f"{values[0]:.2g} %"
    if not all(map(math.isfinite, values)):
        return f"{values[0]:.2g} % [{values[1]:.2g}, {values[2]:.2g}]"
    digits = min(6, max(1 if half < 10 else 0, -math.floor(math.log10(half))))
    while margin is not None and digits < 6 and _crosses(values, margin, digits):
        digits += 1
    estimate, low, high = (f"{round(value, digits) + 0.0:.{digits}f}" for value in values)  # no -0
    return f"{estimate} % [{low}, {high}]"


def _crosses(values: list[float], margin: float, digits: int) -> bool:
    """Return whether rounding puts an end on the other side of a margin."""
    return any((round(end, digits) <= margin) != (end <= margin) for end in values[1:])


def _reasons(verdict: Verdict) -> Iterator[str]:
    """Yield why a class does not ship, where the table does not show it."""
    for row in verdict.classes:
        if row.status in ("undecided", "incomplete") and row.needs:
            yield f"{label(row)}: {row.needs[0]}."
        elif row.status == "hold" and row.metric != "relative_error" and row.breaches:
            yield f"{label(row)}: {row.breaches[0]}."
    yield from (f"{other}." for other in verdict.others[:MOST_NAMES])
    step = verdict.next_step
    if step is not None and step.available is not None and step.available < step.documents:
        documents = plural(step.available, "document")
        yield f"The text has {documents}: name a longer one with `--evaluation`."


def _beside(view: View) -> Iterator[str]:
    main = view.main
    last = view.last
    if main and last and main.subject not in (None, last.label) and main.scheme:
        ships, end = (view.score(name, main.scheme) for name in (main.subject or "", last.label))
        if ships is not None and end is not None and math.isfinite(end.ce.estimate):
            apart = ships.ce.estimate - end.ce.estimate
            more = "lower" if apart < 0 else "higher"
            is_soup = main.subject == "soup"
            name = "The soup's loss" if is_soup else f"The loss of `{main.subject}`"
            yield (
                f"{name} at {label(main)} is {abs(apart):.2g} nats {more} than the last "
                "checkpoint's."
            )
    for search in view.audit.diagnostics.greedy:
        if search.counted and len(search.members) > 1:
            yield (
                f"The search for `{search.label}` chose on the {search.documents} documents that "
                f"judge it: its {plural(search.counted, 'mean')} count."
            )
    if view.documents:
        rarest = 1 - 0.05 ** (1 / view.documents)
        yield f"Not covered: kinds of text rarer than 1 in {max(1, int(1 / rarest))}."


def _warnings(view: View, verdict: Verdict) -> Iterator[str]:
    """Name rules that warn and findings about what ships."""
    cells = {(row.subject, row.scheme) for row in verdict.classes}
    names = [m[1] for row in verdict.classes for text in row.warnings if (m := _RULE.search(text))]
    names += [
        finding.rule
        for finding in view.audit.findings
        if finding.level != "info"
        and (finding.subject, finding.scheme) in cells
        and finding.rule in ABOUT_NUMBERS
    ]
    names = list(dict.fromkeys(names))
    if names:
        more = len(names) - MOST_NAMES
        shown = names[:MOST_NAMES] + ([f"{more} more"] if more > 0 else [])
        yield f"{plural(len(names), 'warning')}: {listing(shown)} (`qaudit explain {names[0]}`)."
    if missing := len(view.audit.skipped):
        yield f"Planned and not measured: {missing}."


ABOUT_NUMBERS = frozenset(code for code in CODES if code in ("QA028", "QA029", "QA043", "QA046"))
"""Findings that say that the numbers of what ships are not what they seem."""


def _commands(view: View, verdict: Verdict, place: str) -> Iterator[doc.Block]:
    step, here = verdict.next_step, shlex.quote(place)
    lines = []
    if step is not None:
        lines.append(f"next  {step.command}")
    elif verdict.status == "ship" and view.main is not None:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", place.rstrip("/").rpartition("/")[2]) or "audit"
        bits = view.main.bit_class
        out = f"{name}-{bits if not bits.isdecimal() else f'w{bits}'}"
        lines.append(f"next  qaudit export {here} --bits {bits} --out {out}")
    lines.append(f"why   qaudit pick {here}")
    lines.append(f"page  {place.rstrip('/')}/report.html")
    yield doc.CodeBlock("\n".join(lines))
