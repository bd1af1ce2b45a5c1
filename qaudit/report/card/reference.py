"""Every subject and scheme against the subject that is the reference."""

from __future__ import annotations

from qaudit.report import document as doc
from qaudit.report.format import percent, shown, spread
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, reference_in

COLUMNS = doc.columns(
    "subject",
    "scheme",
    "KL to its own full precision",
    "KL to the reference",
    "agreement with the reference, %",
    "drop on tasks against the reference, points",
    "flips, %",
)


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
    return doc.paragraph(legend), doc.TableBlock(COLUMNS, tuple(rows), name="reference")
