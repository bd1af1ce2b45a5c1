"""The table of five rows: what ships, its rival, and what it is compared with, at one scheme."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from qaudit.report.document import (
    Block,
    Column,
    Row,
    Table,
    cell,
    columns,
    interval_cell,
    name_cell,
)
from qaudit.report.format import loss, percent, shown, spread
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, ClassVerdict, MeasurementRow, Subject

MOST_ROWS = 5
STATUSES = {"ship": "ships", "hold": "held", "undecided": "undecided"}
COLUMNS = (
    *columns("subject", "scheme", "loss", "added, %", "KL"),
    Column("agreement, %", short="same, %"),
    Column("role"),
)
CAPTION = (
    "What ships beside its rivals: loss in nats per token, what quantization adds to it, KL "
    "divergence to full precision in nats per token, and how often the likeliest token is the same"
)


def candidates(view: View) -> tuple[Block, ...]:
    """Return the rows that matter at the scheme of the main class."""
    one = view.main
    if one is None or one.subject is None or one.scheme is None:
        return ()
    roles: dict[tuple[str, str], list[str]] = {}
    for role, place in _roles(view, one, one.subject, one.scheme):
        roles.setdefault(place, []).append(role)
    measured = [(score, names) for place, names in roles.items() if (score := view.score(*place))]
    rows = [_row(score, names, one) for score, names in measured[:MOST_ROWS]]
    return (Table(COLUMNS, tuple(rows), CAPTION, name="candidates"),) if rows else ()


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


def _row(score: MeasurementRow, roles: list[str], one: ClassVerdict) -> Row:
    error, agreement = score.relative_error, score.top1_agreement
    cells = (
        name_cell(score.subject),
        cell(score.scheme),
        cell(loss(score.ce), value=score.ce.estimate),
        interval_cell(shown(error, percent)),
        interval_cell(shown(score.kl, spread)),
        interval_cell(shown(agreement, percent)),
        cell(", ".join(roles[:1] + [role for role in roles[1:] if not role.startswith("best")])),
    )
    return Row(cells, chosen=(score.subject, score.scheme) == (one.subject, one.scheme))
