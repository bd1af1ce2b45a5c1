"""What is worth measuring next, for the terminal and as JSON."""

from __future__ import annotations

from qaudit.report import terminal
from qaudit.report.document import (
    Block,
    Document,
    Table,
    columns,
    name_cell,
    paragraph,
    prose,
    row,
)
from qaudit.report.format import count, listing, percent, spread
from qaudit.saved.codec import encode, text_of
from qaudit.types import Suggestion, Worth

SHOWN = 12
WIDTH = 120
HEADER = ("checkpoint", "at", "relative error, %", "quantized loss, nats", "better", "gain, nats")


def suggestion_to_json(found: Suggestion) -> str:
    """Write a suggestion as JSON."""
    return text_of(encode(found))


def render_suggestion(found: Suggestion) -> str:
    """Return the checkpoints worth measuring, the predictions, and the errors of predictions."""
    if found.error is None or found.loss is None or found.best_loss is None:
        reason = f"No suggestion of what to measure next at {found.scheme}: {found.reason}."
        return terminal.render(Document("", prose(reason), ()))
    shown = found.prospects[:SHOWN]
    rows = (
        row(
            name_cell(each.label + " *" * each.beyond),
            count(round(each.position)),
            percent(each.error),
            spread(each.loss),
            f"{100 * each.better:.0f} %",
            f"{each.gain:.4f}",
        )
        for each in shown
    )
    headline = (
        f"Worth measuring next at {found.scheme}, by {found.measured} measured checkpoints of "
        f"which `{found.best}` has the lowest quantized loss, {found.best_loss:.4f} nats:"
    )
    more = len(found.prospects) - len(shown)
    blocks: list[Block] = [Table(columns(*HEADER), tuple(rows))]
    blocks += [paragraph(f"{more} more promise less.")] if more > 0 else []
    if any(each.beyond for each in shown):
        blocks += [paragraph("* beyond what is measured: further off than its interval.")]
    blocks += [
        paragraph(_worth("relative error", found.error, 100, "points", found)),
        paragraph(_worth("quantized loss", found.loss, 1, "nats", found)),
        paragraph("Predictions choose what to measure; they are in no audit."),
    ]
    return terminal.render(Document("", prose(headline), tuple(blocks)), WIDTH)


def _worth(what: str, worth: Worth, scale: float, unit: str, found: Suggestion) -> str:
    """Return the errors of predictions where a checkpoint is left out, and which are used."""
    errors = (
        f"signals ({listing(list(found.signals))}) {scale * worth.signals:.3g}, neighbours "
        f"{scale * worth.neighbours:.3g}, mean {scale * worth.mean:.3g} {unit}"
    )
    used = {
        "signals": "the signals are used",
        "neighbours": "the signals are no better, and neighbours are used",
        "mean": "the signals are no better, and the mean is used",
    }[worth.method]
    return f"Error at checkpoints left out, {what}: {errors}; {used}."
