"""The table of five rows: what ships, its rival, and what it is compared with, at one scheme."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from qaudit.report import document as doc
from qaudit.report.format import loss, percent, shown, spread
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, ClassVerdict, MeasurementRow, Subject

MOST_ROWS = 5
STATUSES = {"ship": "ships", "hold": "held", "undecided": "undecided"}
COLUMNS = (
    *doc.columns("subject", "scheme", "loss", "added, %", "KL"),
    doc.Column("agreement, %", short="same, %"),
    doc.Column("role"),
)
CAPTION = (
    "What ships beside its rivals: loss in nats per token, what quantization adds to it, KL "
    "divergence to full precision in nats per token, and how often the likeliest token is the same"
)


def candidates(view: View) -> tuple[doc.Block, ...]:
    """Return the rows that matter at the scheme of the main class."""
    one = view.main
    if one is None or one.subject is None or one.scheme is None:
        return ()
    roles: dict[tuple[str, str], list[str]] = {}
    for role, place in _roles(view, one, one.subject, one.scheme):
        roles.setdefault(place, []).append(role)
    measured = [(score, names) for place, names in roles.items() if (score := view.score(*place))]
    rows = [_row(score, names, one) for score, names in measured[:MOST_ROWS]]
    return (doc.Table(COLUMNS, tuple(rows), CAPTION, name="candidates"),) if rows else ()


def _roles(
    view: View, one: ClassVerdict, subject: str, scheme: str
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield roles, the most important first, each with its subject and scheme."""
    yield STATUSES[one.status], (subject, scheme)
    if one.runner_up is not None:
        yield "runner-up", (one.runner_up, one.runner_up_scheme or scheme)
    if view.last is not None:
        yield "last checkpoint", (view.last.label, scheme)
    yield "full precision", (subject, FULL_PRECISION)
    for role, kind in (("best checkpoint", view.checkpoints), ("best soup", view.soups)):
        if (best := view.best(scheme, _labels(kind))) is not None:
            yield role, (best, scheme)


def _labels(subjects: Iterable[Subject]) -> list[str]:
    return [subject.label for subject in subjects]


def _row(score: MeasurementRow, roles: list[str], one: ClassVerdict) -> doc.Row:
    error, agreement = score.relative_error, score.top1_agreement
    cells = (
        doc.name_cell(score.subject),
        doc.cell(score.scheme),
        doc.cell(loss(score.ce), value=score.ce.estimate),
        doc.interval_cell(shown(error, percent)),
        doc.interval_cell(shown(score.kl, spread)),
        doc.interval_cell(shown(agreement, percent)),
        doc.cell(
            ", ".join(roles[:1] + [role for role in roles[1:] if not role.startswith("best")])
        ),
    )
    return doc.Row(cells, chosen=(score.subject, score.scheme) == (one.subject, one.scheme))
