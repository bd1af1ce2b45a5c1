"""The sources of noise: what intervals include, what they leave out, and how much each makes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from qaudit.report import document as doc
from qaudit.report.format import NOT_MEASURED, listing, percent, plural, points, shown
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, ClassVerdict, Noise

COLUMNS = doc.columns(
    "subject", "scheme", "draws", "added loss, %", "documents", "one draw", "arithmetic"
)


def noise_section(view: View) -> tuple[doc.Block, ...]:
    if not view.audit.measurements:
        return ()
    rows = [row for row in view.audit.diagnostics.noise if row.subject in _shown(view)]
    blocks: list[doc.Block] = [doc.bullets(*_sources(view))]
    quantized = [row for row in rows if row.scheme != FULL_PRECISION]
    if quantized:
        blocks.append(doc.paragraph(_budget(view)))
        blocks.append(doc.TableBlock(COLUMNS, tuple(map(_row, quantized))))
    return tuple(blocks)


def _shown(view: View) -> set[str]:
    """Return the last checkpoint and what decides."""
    classes = view.audit.verdict.classes if view.audit.verdict else ()
    labels = {
        label for decision in classes for label in (decision.subject, decision.runner_up) if label
    }
    return labels | ({view.last.label} if view.last else set())


def _row(noise: Noise) -> doc.TableRow:
    cells = [
        doc.name_cell(noise.subject),
        *map(
            doc.cell,
            (
                noise.scheme,
                str(noise.draws),
                shown(noise.interval, percent),
                shown(noise.documents, points),
                shown(noise.draw, points),
                shown(noise.numerical, points),
            ),
        ),
    ]
    return doc.TableRow(tuple(cells))


def _sources(view: View) -> list[str]:
    level = f"{100 * view.audit.plan.recipe.confidence:g} %"
    return [
        f"Documents: intervals are at {level}, paired on the same "
        f"{plural(view.documents, view.unit)}.",
        *_power(view),
        *_another_calibration(view),
        *_arithmetic(view),
    ]


def _power(view: View) -> Iterator[str]:
    for decision in view.verdict.classes if view.verdict else ():
        yield from _documents_needed(view, decision)
    smallest = view.audit.plan.detectable_relative_error
    if smallest is not None:
        yield (
            f"In four of five cases these documents detect an added loss of "
            f"{100 * smallest:.2g} %; half of it needs about four times as many documents."
        )


def _documents_needed(view: View, one: ClassVerdict) -> Iterator[str]:
    """Yield how many documents make the intervals of what ships narrow, of each measure."""
    score = view.score(one.subject, one.scheme) if one.subject and one.scheme else None
    if score is None:
        return
    needed = {"added loss": score.documents_for_loss, "KL divergence": score.documents_for_kl}
    parts = [f"{count:,} for its {name}" for name, count in needed.items() if count is not None]
    if parts:
        yield (
            f"Documents that narrow the interval of `{one.subject}` at {one.scheme} to 10 % either "
            f"way: {listing(parts)}; {score.documents:,} were measured."
        )


def _another_calibration(view: View) -> Iterator[str]:
    yield "Calibration: in no interval. Another calibration would write another file."
    classes = view.verdict.classes if view.verdict else ()
    cells = dict.fromkeys((decision.subject, decision.scheme) for decision in classes)
    rows = {(row.subject, row.scheme): row for row in view.audit.diagnostics.noise}
    for row in (rows[cell] for cell in cells if cell in rows):
        if row.draw is not None:
            yield (
                f"It would move the added loss of `{row.subject}` at {row.scheme} by "
                f"{points(row.draw)} points (the standard deviation of {row.draws} draws)."
            )


def _arithmetic(view: View) -> Iterator[str]:
    """Yield how far arithmetic alone moves losses, which no interval covers."""
    moved = list(_moved(view, "numerical"))
    if not moved:
        yield f"Arithmetic: `{NOT_MEASURED}`, not measured and in no interval."
        return
    yield (
        "Arithmetic: in no interval. What enters each block moved as far as rounding in one block "
        "moves it, and other batches, changed the added loss, in percentage points (the most, "
        f"and the root mean square): {listing(moved)}."
    )


def _moved(view: View, name: str) -> Iterator[str]:
    for scheme, parts in _by_scheme(view, name).items():
        called = "full precision" if scheme == FULL_PRECISION else scheme
        yield (
            f"{called} {points(max(parts))} and {points(_root_mean_square(parts))} "
            f"({plural(len(parts), 'subject')})"
        )


def divergence_floor(view: View) -> str:
    """Return by how much arithmetic alone moves KL divergence; nothing if it was not measured."""
    floors, agreement = _by_scheme(view, "kl_floor"), _by_scheme(view, "top1_floor")
    if FULL_PRECISION not in floors or FULL_PRECISION not in agreement:
        return ""
    own, lost = max(floors.pop(FULL_PRECISION)), max(agreement[FULL_PRECISION])
    text = (
        "Arithmetic alone, measured as the noise section describes: full precision diverges from "
        f"itself by at most {own:.1e} nats per token, and {points(lost)} % of its likeliest "
        "tokens change."
    )
    shifts = [f"{scheme} by {max(parts):.1e}" for scheme, parts in floors.items()]
    if shifts:
        text += f" KL divergence of schemes changed by at most: {listing(shifts)}."
    return text


def _by_scheme(view: View, name: str) -> dict[str, list[float]]:
    parts: dict[str, list[float]] = {}
    for row in view.audit.diagnostics.noise:
        value = getattr(row, name)
        if value is not None:
            parts.setdefault(row.scheme, []).append(float(value))
    return parts


def _root_mean_square(parts: Sequence[float]) -> float:
    return math.hypot(*parts) / math.sqrt(len(parts))


def _budget(view: View) -> str:
    return (
        "What makes added losses uncertain, in percentage points: the standard error over "
        f"{view.unit}s, the standard deviation over calibration draws, and the change by "
        "arithmetic alone."
    )
