"""What is worth measuring next, for the terminal and as JSON."""

from __future__ import annotations

from tabulate import tabulate

from qaudit.report.format import count, listing, percent, printable, spread
from qaudit.saved.codec import encode, text_of
from qaudit.types.suggested import Suggestion, Worth

SHOWN = 12
HEADER = ["checkpoint", "at", "relative error, %", "quantized loss, nats", "better", "gain, nats"]


def suggestion_to_json(found: Suggestion) -> str:
    """Write a suggestion as JSON."""
    return text_of(encode(found))


def render_suggestion(found: Suggestion) -> str:
    """Say which checkpoints are worth measuring, what is predicted, and what that is worth."""
    if found.error is None or found.loss is None or found.best_loss is None:
        return f"What to measure next at {printable(found.scheme)} is not said: {found.reason}.\n"
    shown = found.prospects[:SHOWN]
    rows = [
        [
            printable(row.label) + (" *" if row.beyond else ""),
            count(round(row.position)),
            percent(row.error),
            spread(row.loss),
            f"{100 * row.better:.0f} %",
            f"{row.gain:.4f}",
        ]
        for row in shown
    ]
    body = tabulate(rows, HEADER, tablefmt="plain", disable_numparse=True)
    more = len(found.prospects) - len(shown)
    said = [
        f"Worth measuring next at {printable(found.scheme)}, by {found.measured} measured"
        f" checkpoints of which {printable(found.best)} has the lowest quantized loss, "
        f"{found.best_loss:.4f} nats:",
        body,
        *([f"{more} more promise less."] if more > 0 else []),
        *(["* beyond what is measured: further off than its interval."] if _any(found) else []),
        _worth("relative error", found.error, 100, "points", found),
        _worth("quantized loss", found.loss, 1, "nats", found),
        "Predictions choose what to measure; they are in no audit.",
    ]
    return "\n".join(said) + "\n"


def _any(found: Suggestion) -> bool:
    return any(row.beyond for row in found.prospects[:SHOWN])


def _worth(what: str, worth: Worth, scale: float, unit: str, found: Suggestion) -> str:
    """Say what the ways of predicting err by where a checkpoint is left out, and which is used."""
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
