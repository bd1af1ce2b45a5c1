"""What is worth measuring next, for the terminal and as JSON."""

from __future__ import annotations

from qaudit.report import document as doc
from qaudit.report import terminal
from qaudit.report.format import count, listing, percent, spread
from qaudit.saved.codec import encode, text_of
from qaudit.types import Suggestion, Worth

SHOWN = 12
WIDTH = 120
HEADER = ("checkpoint", "at", "added loss, %", "quantized loss, nats", "better", "gain, nats")


def suggestion_to_json(suggestion: Suggestion) -> str:
    return text_of(encode(suggestion))


def render_suggestion(suggestion: Suggestion) -> str:
    if suggestion.error is None or suggestion.loss is None or suggestion.best_loss is None:
        reason = (
            f"No suggestion of what to measure next at {suggestion.scheme}: {suggestion.reason}."
        )
        return terminal.render(doc.Page("", doc.prose(reason), ()))
    shown = suggestion.prospects[:SHOWN]
    rows = (
        doc.row(
            doc.name_cell(each.label + " *" * each.beyond),
            count(round(each.position)),
            percent(each.error),
            spread(each.loss),
            f"{100 * each.better:.0f} %",
            f"{each.gain:.4f}",
        )
        for each in shown
    )
    headline = (
        f"Worth measuring next at {suggestion.scheme}, by {suggestion.measured} measured "
        f"checkpoints of which `{suggestion.best}` has the lowest quantized loss, "
        f"{suggestion.best_loss:.4f} nats:"
    )
    more = len(suggestion.prospects) - len(shown)
    blocks: list[doc.Block] = [doc.TableBlock(doc.columns(*HEADER), tuple(rows))]
    blocks += [doc.paragraph(f"{more} more promise less.")] if more > 0 else []
    if any(each.beyond for each in shown):
        blocks += [doc.paragraph("* beyond what is measured: further off than its interval.")]
    blocks += [
        doc.paragraph(_worth("added loss", suggestion.error, 100, "points", suggestion)),
        doc.paragraph(_worth("quantized loss", suggestion.loss, 1, "nats", suggestion)),
        doc.paragraph("Predictions choose what to measure; they are in no audit."),
    ]
    return terminal.render(doc.Page("", doc.prose(headline), tuple(blocks)), WIDTH)


def _worth(what: str, worth: Worth, scale: float, unit: str, suggestion: Suggestion) -> str:
    errors = (
        f"signals ({listing(list(suggestion.signals))}) {scale * worth.signals:.3g}, neighbours "
        f"{scale * worth.neighbours:.3g}, mean {scale * worth.mean:.3g} {unit}"
    )
    used = {
        "signals": "the signals are used",
        "neighbours": "the signals are no better, and neighbours are used",
        "mean": "the signals are no better, and the mean is used",
    }[worth.method]
    return f"Error at checkpoints left out, {what}: {errors}; {used}."
