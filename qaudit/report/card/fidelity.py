"""How far predictions move: KL divergence to full precision, its tail, and agreement."""

from __future__ import annotations

from qaudit.report import document as doc
from qaudit.report.card.noise import divergence_floor
from qaudit.report.format import listing, percent, shown, spread, typical_percent
from qaudit.report.verdict import NOT_A_RANK
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, NEAR_BASELINE, MeasurementRow, Subject, reference_in

COLUMNS = doc.columns(
    "scheme", "KL", "change, %", "90 %", "99 %", "99.9 %", "largest", "agreement, %",
    "sure flips, %", "KL by confidence", "RMS change of p, %",
)  # fmt: skip
LEGEND = (
    "KL divergence measures how far predictions move from those of full precision, in nats per "
    "token: its mean, by what part it typically changes the probability of a token (the root of "
    "twice the mean), then the values that 90, 99 and 99.9 % of tokens stay below, then the "
    "largest of all, which has no interval; those of the values are of one calibration draw and "
    "cover documents alone. Agreement: how often the likeliest token is the same. "
    "Sure flips: how often it is another, of the tokens to which full precision gives at least "
    "0.5: where the two likeliest are about as likely, a change says little. KL by confidence: "
    "the mean over tokens whose likeliest has up to 0.25, 0.5, 0.9 and more in full precision. "
    "RMS change of p: by how much the probability of the right token changes, root mean square."
)


def fidelity_section(view: View) -> tuple[doc.Block, ...]:
    rows = [score for subject in view.subjects for score in _scores(view, subject)]
    if not rows or view.main is None:
        return ()
    ships = [score for score in rows if score.subject == view.main.subject]
    blocks: list[doc.Block] = [doc.paragraph(LEGEND)]
    if ships:
        blocks.append(doc.paragraph(f"`{view.main.subject}` under every scheme:"))
        blocks.append(
            doc.TableBlock(COLUMNS, tuple(_row(view, score) for score in ships), name="tails")
        )
    near = [row.scheme for row in ships if row.kl and row.kl.estimate < NEAR_BASELINE]
    if near:
        blocks.append(doc.paragraph(f"{listing(near)}:", NOT_A_RANK))
    if floor := divergence_floor(view):
        blocks.append(doc.paragraph(floor))
    if len(view.subjects) > 1:
        blocks.append(
            doc.fold(f"KL divergence of all {len(view.subjects)} subjects", _matrix(view))
        )
    return tuple(blocks)


def _scores(view: View, subject: Subject) -> list[MeasurementRow]:
    scores = [view.score(subject.label, scheme) for scheme in view.schemes]
    return [score for score in scores if score is not None and score.kl is not None]


def _row(view: View, score: MeasurementRow) -> doc.TableRow:
    assert view.main is not None
    divergences = (score.kl_p90, score.kl_p99, score.kl_p999)
    assert score.kl is not None
    cells = (
        doc.cell(score.scheme),
        doc.interval_cell(spread(score.kl)),
        doc.cell(typical_percent(score.kl.estimate)),
        *(doc.interval_cell(shown(divergence, spread)) for divergence in divergences),
        doc.cell(shown(score.kl_max, "{:.3g}".format)),
        doc.interval_cell(shown(score.top1_agreement, percent)),
        doc.interval_cell(shown(score.sure_flips, percent)),
        doc.cell(_by_confidence(score)),
        doc.interval_cell(shown(score.rms_dp, percent)),
    )
    return doc.TableRow(cells, chosen=score.scheme == view.main.scheme)


def _by_confidence(score: MeasurementRow) -> str:
    values = ("-" if kl is None else f"{kl:.2g}" for kl in score.confidence_kl)
    return " / ".join(values) or "-"


def _matrix(view: View) -> doc.TableBlock:
    def kl(label: str, scheme: str) -> doc.Cell:
        score = view.score(label, scheme)
        return doc.interval_cell(shown(score.kl if score else None, spread))

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
                doc.interval_cell(shown(score.kl, spread)),
                doc.interval_cell(shown(score.reference_kl, spread)),
                doc.interval_cell(shown(score.reference_top1_agreement, percent)),
                doc.interval_cell(shown(task.reference_drop if task else None, percent)),
                doc.cell(shown(task.reference_flips if task else None, "{:.1%}".format)),
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
