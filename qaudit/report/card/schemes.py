"""Every measurement, folded scheme by scheme, with the scheme in full and what is to be noted."""

from __future__ import annotations

from collections.abc import Sequence

from qaudit.report.format import NOT_MEASURED, percent, plural, spread
from qaudit.report.markdown import cell, code, folded, prose, table
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, MeasurementRow

HEADER = ["subject", "loss, nats", "added, nats", "added, %", "perplexity", "bits per byte", "seed"]


def schemes_section(view: View) -> str:
    """Return one folded table for each scheme, full precision first."""
    parts = [
        _scheme(view, scheme, [s for s in view.audit.measurements if s.scheme == scheme])
        for scheme in (FULL_PRECISION, *view.schemes)
    ]
    return "\n\n".join(filter(None, parts))


def _scheme(view: View, scheme: str, scores: Sequence[MeasurementRow]) -> str:
    if not scores:
        return ""
    header = HEADER if view.draws > 1 else HEADER[:-1]
    body = [table(header, [_row(score)[: len(header)] for score in scores])]
    if scheme != FULL_PRECISION:
        body.insert(0, f"In full: {code(scores[0].spec)}")
    notes = dict.fromkeys(note for score in scores for note in score.notes)
    body += ["\n".join(f"- {prose(note)}" for note in notes)] if notes else []
    many = plural(len(scores), "measurement")
    title = f"{scheme}: {_bits(scores)} bits per weight, {many}"
    return folded(title, "\n\n".join(body))


def _bits(scores: Sequence[MeasurementRow]) -> str:
    found = sorted({f"{score.bits_per_weight:.2f}" for score in scores}, key=float)
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _row(score: MeasurementRow) -> list[str]:
    change, error = score.absolute_change, score.relative_error
    return [
        cell(score.subject),
        spread(score.ce),
        NOT_MEASURED if change is None else spread(change),
        NOT_MEASURED if error is None else percent(error),
        f"{score.perplexity:.4g}",
        NOT_MEASURED if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}",
        str(score.calibration_seed),
    ]
