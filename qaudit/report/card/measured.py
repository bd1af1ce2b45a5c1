"""What is behind the card's table: every measurement, scores on tasks, the sources of noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from qaudit.judge.draw_noise import without_draws
from qaudit.report.document import (
    Block,
    Row,
    Table,
    bullets,
    cell,
    code,
    columns,
    fold,
    name_cell,
    paragraph,
    row,
)
from qaudit.report.format import NOT_MEASURED, percent, plural, points, size, spread
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, MeasurementRow, Noise, TaskRow

SCHEME_COLUMNS = columns(
    "subject", "loss, nats", "added, nats", "added, %", "perplexity", "bits per byte", "seed"
)
TASK_COLUMNS = columns("subject", "scheme", "accuracy, %", "drop / (1 - accuracy), %", "items")
NOISE_COLUMNS = columns("scheme", "relative error, %", "documents", "one draw", "rounding")


def schemes_section(view: View) -> tuple[Block, ...]:
    """Return one folded table for each scheme, full precision first."""
    return tuple(
        _scheme(view, scheme, rows)
        for scheme in (FULL_PRECISION, *view.schemes)
        if (rows := [row for row in view.audit.measurements if row.scheme == scheme])
    )


def _scheme(view: View, scheme: str, rows: Sequence[MeasurementRow]) -> Block:
    shown = SCHEME_COLUMNS if view.draws > 1 else SCHEME_COLUMNS[:-1]
    blocks: list[Block] = [Table(shown, tuple(_scheme_row(row, len(shown)) for row in rows))]
    if scheme != FULL_PRECISION:
        blocks.insert(0, paragraph("In full:", code(rows[0].spec)))
    notes = dict.fromkeys(note for row in rows for note in row.notes)
    blocks += [bullets(*notes)] if notes else []
    many = plural(len(rows), "measurement")
    bits = _range([row.bits_per_weight for row in rows])
    return fold(f"{scheme}: {bits} bits per weight{_whole(rows)}, {many}", *blocks)


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


def _scheme_row(row: MeasurementRow, width: int) -> Row:
    change, error = row.absolute_change, row.relative_error
    texts = [
        spread(row.ce),
        NOT_MEASURED if change is None else spread(change),
        NOT_MEASURED if error is None else percent(error),
        f"{row.perplexity:.4g}",
        NOT_MEASURED if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}",
        str(row.calibration_seed),
    ]
    return Row((name_cell(row.subject), *map(cell, texts))[:width])


def tasks_section(view: View) -> tuple[Block, ...]:
    """Return the folded table of accuracies, if choices were scored."""
    rows = tuple(map(_task_row, view.audit.tasks))
    return (fold(plural(len(rows), "score"), Table(TASK_COLUMNS, rows)),) if rows else ()


def _task_row(task: TaskRow) -> Row:
    drop = task.accuracy_drop
    return row(
        name_cell(task.subject),
        task.scheme,
        percent(task.accuracy),
        NOT_MEASURED if drop is None else percent(drop),
        str(task.items),
    )


def noise_section(view: View) -> tuple[Block, ...]:
    """Name the sources of noise and, where calibration was repeated, how much each makes."""
    if not view.audit.measurements:
        return ()
    intervals = bullets(*_intervals(view))
    rows = view.audit.diagnostics.noise
    shown = [row for row in rows if view.last and row.subject == view.last.label]
    drawn = [row for row in shown or rows if row.scheme != FULL_PRECISION]
    if not drawn:
        return (intervals,)
    label = drawn[0].subject
    drawn = [row for row in drawn if row.subject == label]
    full = [row for row in shown if row.scheme == FULL_PRECISION]
    budget = paragraph(_budget(label, drawn, full))
    return intervals, budget, Table(NOISE_COLUMNS, tuple(map(_noise_row, drawn)))


def _noise_row(row: Noise) -> Row:
    share = row.share_of_draw
    texts = [
        row.scheme,
        NOT_MEASURED if row.interval is None else percent(row.interval),
        _part(row.documents, None if share is None else 1 - share),
        _part(row.draw, share),
        _part(row.numerical, None),
    ]
    return Row(tuple(map(cell, texts)))


def _part(part: float | None, share: float | None) -> str:
    """Print a part of a relative error in percentage points, and its share of the width."""
    if part is None:
        return NOT_MEASURED
    return points(part) + ("" if share is None else f" ({100 * share:.0f} %)")


def _intervals(view: View) -> list[str]:
    """Name what the intervals include: documents, calibration draws, arithmetic."""
    level = f"{100 * view.audit.plan.recipe.confidence:g} %"
    return [
        f"Documents: intervals are at {level}, paired on the same "
        f"{plural(view.documents, view.unit)}.",
        *_draws(view),
        *_arithmetic(view),
    ]


def _draws(view: View) -> Iterator[str]:
    """Yield which intervals include another draw of calibration text."""
    pooled = view.audit.pooled
    own = [row for row in pooled if row.draws > 1]
    widened = [row for row in pooled if row.draw_noise is not None]
    left_out = without_draws(view.audit)
    if own:
        yield (
            f"Calibration draws: {plural(len(own), 'measurement')} drawn {view.draws} times, and "
            "the intervals include how they differ."
        )
    for source, count in Counter(one.draw_noise for one in widened).items():
        yield f"{plural(count, 'interval')} of one draw widened by the draws of {source}."
    if left_out:
        yield (
            f"{plural(len(left_out), 'measurement')} of one draw: the interval leaves out what "
            f"another draw would change (`{NOT_MEASURED}`). `--repeats` measures it."
        )


def _arithmetic(view: View) -> Iterator[str]:
    floors = [row for row in view.audit.diagnostics.noise if row.numerical is not None]
    if not floors:
        yield f"Arithmetic: `{NOT_MEASURED}`, not measured and in no interval."
        return
    worst = max(floors, key=lambda row: row.numerical or 0.0)
    yield (
        f"Arithmetic: in no interval. It moved the relative error by at most "
        f"{points(worst.numerical or 0.0)} points (`{worst.subject}` at {worst.scheme})."
    )


def _budget(label: str, drawn: Sequence[Noise], full: Sequence[Noise]) -> str:
    """Explain the columns of the noise budget, and what rounding does by itself."""
    text = (
        f"What makes the relative errors of `{label}` uncertain, in percentage points: the "
        f"standard error over documents, the standard deviation of one calibration draw "
        f"({drawn[0].draws} were made), and the change when the same sums are added in another "
        "order. In brackets: their shares of the squared width of the interval."
    )
    moved = [row.numerical for row in full if row.numerical is not None]
    if not moved:
        return text
    return f"{text} Full precision in another order moved by {points(moved[0])}."
