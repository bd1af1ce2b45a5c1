"""The tables of losses: rows that matter, every subject under every scheme, scheme by scheme.

Of a long series the rows that a decision depends on are shown, wherever they are in it: what the
verdict names, the best of every column, the ends of stages. After them come checkpoints evenly
along the series, so that its course can be seen. The others are minor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from qaudit.report import document as doc
from qaudit.report.format import NOT_MEASURED, loss, percent, plural, shown, size, spread
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, MeasurementRow, Subject

MOST_ROWS = 16
CAPTION = "Added loss of every subject under every scheme, in %, with its interval"
LEGEND = (
    "What quantization adds to the loss, in % of it, on all documents, each with its own interval; "
    f"`{NOT_MEASURED}` not measured, `0` no change at all."
)
SHOWN = (
    "what the verdict names, the best of each column, ends of stages, and others evenly along "
    "the series"
)


def errors_section(view: View) -> tuple[doc.Block, ...]:
    return (doc.paragraph(LEGEND, *_all_at_once(view)), _table(view)) if view.subjects else ()


def _table(view: View) -> doc.TableBlock:
    schemes = (FULL_PRECISION, *view.schemes)
    shown = {subject.label for subject in shown_rows(view)}
    rows = tuple(
        doc.TableRow(
            (
                doc.name_cell(subject.label, value=k),
                *(_cell(view, subject.label, scheme) for scheme in schemes),
            ),
            minor=subject.label not in shown,
            chosen=view.main is not None and subject.label == view.main.subject,
        )
        for k, subject in enumerate(view.subjects)
    )
    return doc.TableBlock(
        (
            doc.Column("subject"),
            doc.Column("loss, full precision", short=FULL_PRECISION),
            *doc.columns(*view.schemes),
        ),
        rows,
        CAPTION,
        shown=SHOWN,
        name="errors",
    )


def _cell(view: View, subject: str, scheme: str) -> doc.Cell:
    """Show an error over its interval; a loss where an error has no meaning."""
    score = view.score(subject, scheme)
    if score is None:
        return doc.cell(NOT_MEASURED)
    if scheme == FULL_PRECISION:
        return doc.cell(loss(score.ce), value=score.ce.estimate)
    if score.relative_error is None:
        return doc.cell(f"loss {loss(score.ce)}")
    value = score.relative_error.estimate
    return doc.interval_cell(
        percent(score.relative_error), value=value if math.isfinite(value) else None
    )


def _all_at_once(view: View) -> list[str]:
    """Return how wide the intervals would be if all of them had to hold together."""
    from qaudit.core.statistics import MINIMUM_DOCUMENTS, widening  # loads scipy

    cells = sum(
        view.error(subject.label, scheme) is not None
        for subject in view.subjects
        for scheme in view.schemes
    )
    if cells < 2 or view.documents < MINIMUM_DOCUMENTS:
        return []
    factor = widening(view.audit.plan.recipe.confidence, cells, view.documents)
    if not math.isfinite(factor):  # the level is next to 0 or 1
        return []
    return [
        f"Each interval holds by itself; for all {cells} to hold at once, read them "
        f"{factor:.1f} times as wide."
    ]


def shown_rows(view: View, most: int = MOST_ROWS) -> tuple[Subject, ...]:
    """Return at most so many subjects, in series order; all of them where they are few."""
    if len(view.subjects) <= most:
        return view.subjects
    wanted = list(dict.fromkeys(_wanted(view)))[:most]
    further = [s.label for s in view.checkpoints if s.label not in set(wanted)]
    shown = {*wanted, *_evenly(further, most - len(wanted))}
    return tuple(s for s in view.subjects if s.label in shown)


def _wanted(view: View) -> Iterator[str]:
    """Yield the labels of rows that a decision depends on, most important first."""
    labels = [s.label for s in view.subjects]
    for decision in view.verdict.classes if view.verdict else ():
        yield from (s for s in (decision.subject, decision.runner_up) if s in labels)
    yield from (s.label for s in (view.last, view.stage_end) if s is not None)
    for scheme in (*view.schemes, FULL_PRECISION):
        if (best := view.best(scheme)) is not None:
            yield best
    for subject, following in zip(view.checkpoints, view.checkpoints[1:], strict=False):
        if subject.first.stage != following.first.stage:
            yield subject.label
    if view.checkpoints:
        yield view.checkpoints[0].label


def _evenly(labels: list[str], count: int) -> list[str]:
    if count >= len(labels):
        return labels
    return [labels[int((k + 0.5) * len(labels) / count)] for k in range(count)]


SCHEME_COLUMNS = doc.columns(
    "subject", "loss, nats", "added, nats", "added, %", "perplexity", "bits per byte", "seed"
)


def schemes_section(view: View) -> tuple[doc.Block, ...]:
    """Return one folded table for each scheme, full precision first."""
    return tuple(
        _scheme(view, scheme, rows)
        for scheme in (FULL_PRECISION, *view.schemes)
        if (rows := [row for row in view.audit.measurements if row.scheme == scheme])
    )


def _scheme(view: View, scheme: str, rows: Sequence[MeasurementRow]) -> doc.Block:
    names = SCHEME_COLUMNS if view.draws > 1 else SCHEME_COLUMNS[:-1]
    blocks: list[doc.Block] = [
        doc.TableBlock(names, tuple(_scheme_row(row, len(names)) for row in rows))
    ]
    if scheme != FULL_PRECISION:
        blocks.insert(0, doc.paragraph("In full:", doc.code(rows[0].spec)))
    notes = dict.fromkeys(note for row in rows for note in row.notes)
    blocks += [doc.bullets(*notes)] if notes else []
    many = plural(len(rows), "measurement")
    bits = _range([row.bits_per_weight for row in rows])
    return doc.fold(f"{scheme}: {bits} bits per weight{_whole(rows)}, {many}", *blocks)


def _range(numbers: Sequence[float]) -> str:
    texts = sorted({f"{number:.2f}" for number in numbers}, key=float)
    return texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"


def _whole(rows: Sequence[MeasurementRow]) -> str:
    """Return the size of the whole model: what is not quantized counts as it is stored."""
    bits = [row.bits_per_parameter for row in rows if row.bits_per_parameter is not None]
    nbytes = [row.nbytes for row in rows if row.nbytes is not None]
    if not bits or not nbytes:
        return ""
    return f", {_range(bits)} per parameter with embeddings and head ({size(max(nbytes))})"


def _scheme_row(row: MeasurementRow, width: int) -> doc.TableRow:
    change, error = row.absolute_change, row.relative_error
    texts = [
        spread(row.ce),
        shown(change, spread),
        shown(error, percent),
        f"{row.perplexity:.4g}",
        shown(row.bits_per_byte, "{:.4f}".format),
        str(row.calibration_seed),
    ]
    return doc.TableRow((doc.name_cell(row.subject), *map(doc.cell, texts))[:width])
