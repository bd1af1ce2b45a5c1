"""Tables of losses and of KL divergence: rows that matter, and scheme by scheme.

Of a long series the rows that a decision depends on are shown, wherever they are in it: what the
verdict names, the best of every column, the ends of stages. After them come checkpoints evenly
along the series, so that its course can be seen. The others are minor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress

from qaudit.core.mixture import Mixture
from qaudit.core.registry import parse_scheme
from qaudit.errors import SchemeError
from qaudit.report import document as doc
from qaudit.report.format import NOT_MEASURED, listing, loss, or_dash, percent, plural, size, spread
from qaudit.report.sections import divergence_floor
from qaudit.report.series import picture
from qaudit.report.verdict import NOT_A_RANK
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, NEAR_BASELINE, MeasurementRow, Subject, reference_in

MOST_ROWS = 16
MOST_LINEARS = 40  # of a mixture: with untied experts there are thousands
ADDED_CAPTION = "Added loss of every subject under every scheme, in %, with its interval"
ADDED_LEGEND = (
    "What quantization adds to the loss, in % of it, on all documents, each with its own interval; "
    f"`{NOT_MEASURED}` not measured, `0` no change at all."
)
ROWS_IN_WORDS = (
    "what the verdict names, the best of each column, ends of stages, and others evenly along "
    "the series"
)


def errors_section(view: View) -> tuple[doc.Block, ...]:
    return (
        (doc.paragraph(ADDED_LEGEND, *_all_at_once(view)), _added_table(view))
        if view.subjects
        else ()
    )


def _added_table(view: View) -> doc.TableBlock:
    schemes = (FULL_PRECISION, *view.schemes)
    shown = {subject.label for subject in shown_rows(view)}
    rows = tuple(
        doc.TableRow(
            (
                doc.name_cell(subject.label, value=k),
                *(_added_cell(view, subject.label, scheme) for scheme in schemes),
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
        ADDED_CAPTION,
        selected=ROWS_IN_WORDS,
        name="errors",
    )


def _added_cell(view: View, subject: str, scheme: str) -> doc.Cell:
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


def mixture_section(view: View) -> tuple[doc.Block, ...]:
    """Return which linears of a mixture have which bits; others are in audit.json."""
    row = view.mixture
    if row is None:
        return ()
    title = row.scheme
    with suppress(SchemeError):  # of a saved audit
        scheme = parse_scheme(row.spec)
        title = scheme.title if isinstance(scheme, Mixture) else title
    sentence = f"{title}, of `{row.subject}`: {row.bits_per_weight:.2f} bits per weight."
    names = list(row.mixture)[:MOST_LINEARS]
    rows = tuple(doc.row(*map(doc.name_cell, (name, row.mixture[name]))) for name in names)
    table = doc.TableBlock(doc.columns("linear", "bits, a digit for each block"), rows)
    shown = doc.fold("The table", table)
    return (doc.paragraph(sentence), *picture(view, "mixture"), shown)


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
        or_dash(change, spread),
        or_dash(error, percent),
        f"{row.perplexity:.4g}",
        or_dash(row.bits_per_byte, "{:.4f}".format),
        str(row.calibration_seed),
    ]
    return doc.TableRow((doc.name_cell(row.subject), *map(doc.cell, texts))[:width])


KL_COLUMNS = doc.columns(
    "scheme", "KL", "90 %", "99 %", "99.9 %", "largest", "agreement, %",
    "sure flips, %", "KL by confidence", "RMS change of p, %",
)  # fmt: skip
KL_LEGEND = (
    "KL divergence measures how far predictions move from those of full precision, in nats per "
    "token: its mean, then the values that 90, 99 and 99.9 % of tokens stay below, then the "
    "largest of all, which has no interval. "
    "Agreement: how often the likeliest token is the same. "
    "Sure flips: how often it is another, of the tokens to which full precision gives at least "
    "0.5: where the two likeliest are about as likely, a change says little. KL by confidence: "
    "the mean over tokens whose likeliest has up to 0.25, 0.5, 0.9 and more in full precision. "
    "RMS change of p: by how much the probability of the right token changes, root mean square."
)


def fidelity_section(view: View) -> tuple[doc.Block, ...]:
    rows = [score for subject in view.subjects for score in _scores_with_kl(view, subject)]
    if not rows or view.main is None:
        return ()
    ships = [score for score in rows if score.subject == view.main.subject]
    blocks: list[doc.Block] = [doc.paragraph(KL_LEGEND)]
    if ships:
        blocks.append(doc.paragraph(f"`{view.main.subject}` under every scheme:"))
        blocks.append(
            doc.TableBlock(KL_COLUMNS, tuple(_kl_row(view, score) for score in ships), name="tails")
        )
    near = [row.scheme for row in ships if row.kl and row.kl.estimate < NEAR_BASELINE]
    if near:
        blocks.append(doc.paragraph(f"{listing(near)}:", NOT_A_RANK))
    if floor := divergence_floor(view):
        blocks.append(doc.paragraph(floor))
    if len(view.subjects) > 1:
        blocks.append(
            doc.fold(f"KL divergence of all {len(view.subjects)} subjects", _kl_matrix(view))
        )
    return tuple(blocks)


def _scores_with_kl(view: View, subject: Subject) -> list[MeasurementRow]:
    scores = [view.score(subject.label, scheme) for scheme in view.schemes]
    return [score for score in scores if score is not None and score.kl is not None]


def _kl_row(view: View, score: MeasurementRow) -> doc.TableRow:
    assert view.main is not None
    divergences = (score.kl_p90, score.kl_p99, score.kl_p999)
    assert score.kl is not None
    cells = (
        doc.cell(score.scheme),
        doc.interval_cell(spread(score.kl)),
        *(doc.interval_cell(or_dash(divergence, spread)) for divergence in divergences),
        doc.cell(or_dash(score.kl_max, "{:.3g}".format)),
        doc.interval_cell(or_dash(score.top1_agreement, percent)),
        doc.interval_cell(or_dash(score.sure_flips, percent)),
        doc.cell(_by_confidence(score)),
        doc.interval_cell(or_dash(score.rms_dp, percent)),
    )
    return doc.TableRow(cells, chosen=score.scheme == view.main.scheme)


def _by_confidence(score: MeasurementRow) -> str:
    values = ("-" if kl is None else f"{kl:.2g}" for kl in score.confidence_kl)
    return " / ".join(values) or "-"


def _kl_matrix(view: View) -> doc.TableBlock:
    def kl(label: str, scheme: str) -> doc.Cell:
        score = view.score(label, scheme)
        return doc.interval_cell(or_dash(score.kl if score else None, spread))

    rows = tuple(
        doc.TableRow(
            (doc.name_cell(subject.label), *(kl(subject.label, scheme) for scheme in view.schemes))
        )
        for subject in view.subjects
    )
    return doc.TableBlock(doc.columns("subject", *view.schemes), rows)


REFERENCE_COLUMNS = doc.columns(
    "subject", "scheme", "KL to its own full precision", "KL to the reference",
    "agreement with the reference, %", "drop on tasks against the reference, points", "flips, %",
)  # fmt: skip


def reference_section(view: View) -> tuple[doc.Block, ...]:
    reference = reference_in(view.audit.plan.subjects, view.audit.plan.recipe.reference)
    if reference is None:
        return ()
    last_task = {(row.subject, row.scheme): row for row in view.audit.tasks}  # the mean, or only
    rows = []
    for subject in view.subjects:
        for scheme in (FULL_PRECISION, *view.schemes):
            score, task = view.score(subject.label, scheme), last_task.get((subject.label, scheme))
            if score is None or score.reference_kl is None:
                continue
            cells = (
                doc.name_cell(subject.label),
                doc.cell(scheme),
                doc.interval_cell(or_dash(score.kl, spread)),
                doc.interval_cell(or_dash(score.reference_kl, spread)),
                doc.interval_cell(or_dash(score.reference_top1_agreement, percent)),
                doc.interval_cell(or_dash(task.reference_drop if task else None, percent)),
                doc.cell(or_dash(task.reference_flips if task else None, "{:.1%}".format)),
            )
            rows.append(doc.TableRow(cells))
    if not rows:
        return ()
    legend = (
        f"`{reference.label}` in full precision is the reference. Predictions of every other "
        "subject are compared with it on the same documents, answers on the same items; its own "
        "schemes are compared with itself."
    )
    return doc.paragraph(legend), doc.TableBlock(REFERENCE_COLUMNS, tuple(rows), name="reference")
