"""The pick on its own, and what fewer bits cost: the best subject of every scheme."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qaudit.report import document as doc
from qaudit.report import terminal
from qaudit.report.format import listing, loss, or_dash, size, spread
from qaudit.report.series import picture
from qaudit.report.verdict import evidence, headline, what
from qaudit.report.views import View
from qaudit.saved.codec import encode, text_of
from qaudit.types import FULL_PRECISION, AuditRecord, Interval, Pick, Row


@dataclass(frozen=True)
class Point(Row):
    """The best subject under a scheme."""

    subject: str
    scheme: str
    bits_per_weight: float
    ce: Interval
    on_front: bool = False
    bits_per_parameter: float | None = None  # embeddings and head included
    nbytes: int | None = None


def points(view: View) -> tuple[Point, ...]:
    best_points = []
    for scheme in (*view.schemes, FULL_PRECISION):
        best = view.best(scheme)
        score = view.score(best, scheme) if best else None
        if best and score:
            best_points.append(
                Point(
                    best,
                    scheme,
                    score.bits_per_weight,
                    score.ce,
                    bits_per_parameter=score.bits_per_parameter,
                    nbytes=score.nbytes,
                )
            )
    best_points.sort(key=lambda point: (point.bits_per_weight, point.ce.estimate))
    marked, lowest = [], float("inf")
    for point in best_points:
        marked.append(replace(point, on_front=point.ce.estimate < lowest))
        lowest = min(lowest, point.ce.estimate)
    return tuple(marked)


def pareto_table(view: View) -> doc.TableBlock:
    """Return the points as a table, fewest bits first."""
    names = (
        "scheme", "bits per weight", "bits per parameter", "size", "best subject", "loss", "front",
    )  # fmt: skip
    rows = (
        doc.row(
            point.scheme,
            f"{point.bits_per_weight:.2f}",
            or_dash(point.bits_per_parameter, "{:.2f}".format),
            or_dash(point.nbytes, size),
            doc.name_cell(point.subject),
            spread(point.ce),
            "yes" if point.on_front else "",
        )
        for point in points(view)
    )
    return doc.TableBlock(doc.columns(*names), tuple(rows))


def pareto_section(view: View) -> tuple[doc.Block, ...]:
    """Name the front, show it, and fold the numbers."""
    if len(view.schemes) < 2:
        return ()
    every = points(view)
    front = [p for p in every if p.on_front]
    sentence = (
        "Fewest bits first, each better by estimate than all with fewer: "
        + listing([f"{p.scheme} ({p.bits_per_weight:.2f} bits, {loss(p.ce)})" for p in front])
        + ". The loss, in nats per token, is that of the best subject under each scheme. Bits per "
        + "weight count the quantized linears with their scales; bits per parameter and the size "
        + "count the whole model, embeddings and head as they are stored."
    )
    table = doc.fold(f"All {len(every)} schemes", pareto_table(view))
    return (doc.paragraph(sentence), *picture(view, "pareto"), table)


def render_pick(audit: AuditRecord, pick: Pick | None) -> str:
    view = View(audit if audit.pick == pick else replace(audit, pick=pick, verdict=None))
    if view.verdict is None:
        nothing = doc.prose("Nothing is picked: no measurement meets the objective.")
        return terminal.render(doc.Page("", nothing, (pareto_table(view),)))
    blocks: list[doc.Block] = [*evidence(view), pareto_table(view)]
    if audit.pick != pick:  # by another objective than that of the verdict
        return terminal.render(
            doc.Page("", doc.prose(f"{what(view.verdict.classes[0])}."), tuple(blocks))
        )
    return terminal.render(doc.Page("", doc.prose(headline(view)), tuple(blocks)))


def render_pareto(audit: AuditRecord) -> str:
    headline = "On the front: nothing with fewer bits is better. Intervals are for each loss alone."
    return terminal.render(doc.Page("", doc.prose(headline), (pareto_table(View(audit)),)))


def pick_to_json(audit: AuditRecord, pick: Pick | None) -> str:
    rows = [encode(point) for point in points(View(audit))]
    verdict = None if audit.verdict is None or pick is None else encode(audit.verdict)
    chosen = None if pick is None else encode(pick)
    return text_of({"pick": chosen, "verdict": verdict, "pareto": rows})
