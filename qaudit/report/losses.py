"""Tables of losses and of KL divergence: rows that matter, and scheme by scheme.

Of a long series the rows that a decision depends on are shown, wherever they are in it: what the
verdict names, the best of every column, the ends of stages. After them come checkpoints evenly
along the series, so that its course can be seen. The others are minor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise, product

from qaudit.core.mixture import Mixture
from qaudit.core.registry import parse_scheme
from qaudit.errors import SchemeError
from qaudit.report import document as doc
from qaudit.report.format import NOT_MEASURED, listing, loss, or_dash, percent, plural, size, spread
from qaudit.report.sections import divergence_floor
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


def errors_section(view: View) -> tuple[doc.Block, ...]:
    if not view.subjects:
        return ()
    main = {subject.label for subject in shown_rows(view)}
    rows = []
    for k, subject in enumerate(view.subjects):
        full = view.score(subject.label)
        cells = [doc.interval_cell(full.ce if full else None, loss)]
        for scheme in view.schemes:
            score = view.score(subject.label, scheme)
            if score is not None and score.relative_error is None:  # an error has no meaning
                cells.append(doc.cell(f"loss {loss(score.ce)}"))
            else:
                cells.append(doc.interval_cell(score.relative_error if score else None, percent))
        chosen = view.main is not None and subject.label == view.main.subject
        name = doc.name_cell(subject.label, value=k)
        rows.append(doc.row(name, *cells, minor=subject.label not in main, chosen=chosen))
    names = ("subject", "loss, full precision", *view.schemes)
    table = doc.table(names, rows, ADDED_CAPTION, "errors")
    return doc.paragraph(ADDED_LEGEND, *_all_at_once(view)), table


def _all_at_once(view: View) -> list[str]:
    """Return how wide the intervals would be if all of them had to hold together."""
    from qaudit.core.statistics import MINIMUM_DOCUMENTS, widening  # loads scipy

    pairs = product(view.subjects, view.schemes)
    cells = sum(view.error(subject.label, scheme) is not None for subject, scheme in pairs)
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
    labels = {s.label for s in view.subjects}
    # What a decision depends on, most important first.
    wanted = [s for d in view.classes for s in (d.subject, d.runner_up) if s and s in labels]
    wanted += [s.label for s in (view.last, view.stage_end) if s is not None]
    wanted += filter(None, map(view.best, (*view.schemes, FULL_PRECISION)))
    wanted += [a.label for a, b in pairwise(view.checkpoints) if a.first.stage != b.first.stage]
    wanted += [s.label for s in view.checkpoints[:1]]
    wanted = list(dict.fromkeys(wanted))[:most]
    further = [s.label for s in view.checkpoints if s.label not in set(wanted)]
    room = min(most - len(wanted), len(further))
    evenly = (further[int((k + 0.5) * len(further) / room)] for k in range(room))
    shown = {*wanted, *evenly}
    return tuple(s for s in view.subjects if s.label in shown)


SCHEME_COLUMNS: doc.Columns[MeasurementRow] = {
    "subject": lambda row: doc.name_cell(row.subject),
    "loss, nats": lambda row: spread(row.ce),
    "added, nats": lambda row: or_dash(row.absolute_change, spread),
    "added, %": lambda row: or_dash(row.relative_error, percent),
    "perplexity": lambda row: f"{row.perplexity:.4g}",
    "bits per byte": lambda row: or_dash(row.bits_per_byte, "{:.4f}".format),
    "seed": lambda row: str(row.calibration_seed),
}


def schemes_section(view: View) -> tuple[doc.Block, ...]:
    """Return one folded table for each scheme, full precision first."""
    folds = []
    columns = {k: v for k, v in SCHEME_COLUMNS.items() if k != "seed" or view.draws > 1}
    for scheme in (FULL_PRECISION, *view.schemes):
        rows = [row for row in view.audit.measurements if row.scheme == scheme]
        if not rows:
            continue
        blocks: list[doc.Block] = [doc.table_of(rows, columns)]
        if scheme != FULL_PRECISION:
            blocks.insert(0, doc.paragraph("In full:", doc.code(rows[0].spec)))
        notes = dict.fromkeys(note for row in rows for note in row.notes)
        blocks += [doc.bullets(*notes)] if notes else []
        bits = f"{_range([row.bits_per_weight for row in rows])} bits per weight"
        # Of the whole model: what is not quantized counts as it is stored.
        whole = [row.bits_per_parameter for row in rows if row.bits_per_parameter is not None]
        nbytes = [row.nbytes for row in rows if row.nbytes is not None]
        if whole and nbytes:
            bits += f", {_range(whole)} per parameter with embeddings and head"
            bits += f" ({size(max(nbytes))})"
        folds.append(doc.fold(f"{scheme}: {bits}, {plural(len(rows), 'measurement')}", *blocks))
    return tuple(folds)


def _range(numbers: Sequence[float]) -> str:
    texts = sorted({f"{number:.2f}" for number in numbers}, key=float)
    return texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"


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
    rows = list(row.mixture.items())[:MOST_LINEARS]
    cells = (tuple(map(doc.name_cell, pair)) for pair in rows)
    table = doc.table(("linear", "bits, a digit for each block"), cells)
    return doc.paragraph(sentence), doc.fold("The table", table)


KL_COLUMNS = (
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
    if view.main is None or not any(s.kl for s in view.audit.measurements):
        return ()
    blocks: list[doc.Block] = [doc.paragraph(KL_LEGEND)]
    scores = [view.score(view.main.subject or "", scheme) for scheme in view.schemes]
    rows, near = [], []
    for s in scores:
        if s is None or s.kl is None:
            continue
        by_confidence = ("-" if kl is None else f"{kl:.2g}" for kl in s.confidence_kl)
        cells: doc.Cells = (
            s.scheme,
            *(doc.interval_cell(tail, spread) for tail in (s.kl, s.kl_p90, s.kl_p99, s.kl_p999)),
            or_dash(s.kl_max, "{:.3g}".format),
            doc.interval_cell(s.top1_agreement, percent),
            doc.interval_cell(s.sure_flips, percent),
            " / ".join(by_confidence) or "-",
            doc.interval_cell(s.rms_dp, percent),
        )
        rows.append(doc.row(*cells, chosen=s.scheme == view.main.scheme))
        near += [s.scheme] if s.kl.estimate < NEAR_BASELINE else []
    if rows:
        blocks.append(doc.paragraph(f"`{view.main.subject}` under every scheme:"))
        blocks.append(doc.table(KL_COLUMNS, rows, name="tails"))
    if near:
        blocks.append(doc.paragraph(f"{listing(near)}:", NOT_A_RANK))
    if floor := divergence_floor(view):
        blocks.append(doc.paragraph(floor))
    if len(view.subjects) > 1:
        title = f"KL divergence of all {len(view.subjects)} subjects"
        matrix = []
        for subject in view.subjects:
            row = (view.score(subject.label, scheme) for scheme in view.schemes)
            divergences = (doc.interval_cell(s.kl if s else None, spread) for s in row)
            matrix.append((doc.name_cell(subject.label), *divergences))
        blocks.append(doc.fold(title, doc.table(("subject", *view.schemes), matrix)))
    return tuple(blocks)


REFERENCE_COLUMNS = (
    "subject", "scheme", "KL to its own full precision", "KL to the reference",
    "agreement with the reference, %", "drop on tasks against the reference, points", "flips, %",
)  # fmt: skip


def reference_section(view: View) -> tuple[doc.Block, ...]:
    reference = reference_in(view.audit.plan.subjects, view.audit.plan.recipe.reference)
    if reference is None:
        return ()
    tasks = {row.cell: row for row in view.audit.tasks}  # the mean, or only
    rows = []
    for subject, scheme in product(view.subjects, (FULL_PRECISION, *view.schemes)):
        score, task = view.score(subject.label, scheme), tasks.get((subject.label, scheme))
        if score is None or score.reference_kl is None:
            continue
        cells = (
            doc.interval_cell(score.kl, spread),
            doc.interval_cell(score.reference_kl, spread),
            doc.interval_cell(score.reference_top1_agreement, percent),
            doc.interval_cell(task.reference_drop if task else None, percent),
            or_dash(task.reference_flips if task else None, "{:.1%}".format),
        )
        rows.append((doc.name_cell(subject.label), scheme, *cells))
    if not rows:
        return ()
    legend = (
        f"`{reference.label}` in full precision is the reference. Predictions of every other "
        "subject are compared with it on the same documents, answers on the same items; its own "
        "schemes are compared with itself."
    )
    return doc.paragraph(legend), doc.table(REFERENCE_COLUMNS, rows, name="reference")
