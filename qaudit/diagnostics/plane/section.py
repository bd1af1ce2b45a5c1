"""Slices in the section `How sharp the loss is`: a sentence each, and the figure.

The loss of the quantized model is compared with the parabola through the subject and the points
beside it: above that, quantization leaves the region that the curvature describes.
"""

from __future__ import annotations

from dataclasses import dataclass

from qaudit.report import document as doc
from qaudit.report.format import digits, interval_text
from qaudit.report.series import picture
from qaudit.report.views import View
from qaudit.types import Interval, PlaneRow


def section(view: View) -> doc.Section:
    texts = [text for line in shown_lines(view) if (text := beyond_the_parabola(line))]
    blocks = (*map(doc.paragraph, texts), *picture(view, "plane"))
    return doc.Section("How sharp the loss is", blocks, 5)


@dataclass(frozen=True)
class Line:
    """The loss of a subject along the direction of quantization, from the subject on."""

    subject: str
    scheme: str
    points: tuple[tuple[float, Interval], ...]  # (b, change of the loss)

    @property
    def quantized(self) -> Interval | None:
        return next((change for b, change in self.points if b == 1.0), None)

    @property
    def parabola(self) -> float | None:
        """The change that a parabola through the middle and its neighbours predicts."""
        change_at = {b: change.estimate for b, change in self.points}
        step = min((b for b in change_at if b > 0), default=None)
        if step is None or step >= 1 or -step not in change_at:
            return None
        slope = (change_at[step] - change_at[-step]) / (2 * step)
        bend = (change_at[step] + change_at[-step]) / step**2
        return slope + bend / 2


def lines(view: View) -> dict[str, Line]:
    """Return the line of each subject that has one, in the order of the series."""
    rows_of: dict[str, list[PlaneRow]] = {}
    for row in view.audit.diagnostics.plane:
        if row.a == 0.0:
            rows_of.setdefault(row.subject, []).append(row)
    line_of = {
        label: Line(
            label,
            rows[0].scheme,
            tuple(
                sorted(((row.b, row.absolute_change) for row in rows), key=lambda place: place[0])
            ),
        )
        for label, rows in rows_of.items()
    }
    return {s.label: line_of[s.label] for s in view.subjects if s.label in line_of}


def shown_lines(view: View) -> list[Line]:
    """Return the lines of the end of a stage, the last checkpoint and the pick."""
    pick = view.audit.pick.subject if view.audit.pick else None
    labels = [view.stage_end and view.stage_end.label, view.last and view.last.label, pick]
    all_lines = lines(view)
    shown = [all_lines[label] for label in dict.fromkeys(labels) if label in all_lines]
    return shown or list(all_lines.values())[:3]


def grid(view: View) -> list[PlaneRow]:
    rows = [row for row in view.audit.diagnostics.plane if row.previous is not None]
    order = {subject.label: k for k, subject in enumerate(view.subjects)}
    last = max((row.subject for row in rows), key=lambda label: order.get(label, -1), default="")
    return [row for row in rows if row.subject == last]


def beyond_the_parabola(line: Line) -> str:
    quantized, expected = line.quantized, line.parabola
    if quantized is None:
        return ""
    text = f"From `{line.subject}` to its {line.scheme} version the loss rises by "
    text += f"{interval_text(quantized)} nats per token"
    if expected is None:
        return f"{text}."
    if quantized.low <= expected <= quantized.high:
        relation = "as much as"
    else:
        relation = "more than" if expected < quantized.low else "less than"
    return f"{text}, {relation} the curvature at its start predicts ({digits(expected)})."
