"""Plans as documents, in `audit.json` and in `plan.json`, and back.

A checkpoint is written once, in `plan.checkpoints`; members point there by index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from qaudit.errors import AuditError
from qaudit.saved.codec import EDITED, encode, text_of
from qaudit.saved.documents import MemberDocument, PlanDocument, SubjectDocument
from qaudit.types import Checkpoint, Plan, Subject

FILE = "audit.json"
LARGEST_NBYTES = 256 * 2**20
"""Of an audit: a thousand subjects under eight schemes take about ten megabytes."""


def plan_to_json(plan: Plan) -> str:
    checkpoints = checkpoints_of((*plan.subjects, *plan.releases))
    return text_of(encode(PlanDocument(**plan_fields(plan, checkpoints))))


def checkpoints_of(subjects: Sequence[Subject]) -> tuple[Checkpoint, ...]:
    return tuple(dict.fromkeys(c for subject in subjects for c, _ in subject.members))


def pointers(subject: Subject, checkpoints: Sequence[Checkpoint]) -> SubjectDocument:
    """Return a subject whose members point into a list of checkpoints."""
    places = {checkpoint: place for place, checkpoint in enumerate(checkpoints)}
    members = tuple(MemberDocument(c.label, weight, places[c]) for c, weight in subject.members)
    return SubjectDocument(subject.label, subject.merge, members)


def plan_fields(plan: Plan, checkpoints: tuple[Checkpoint, ...]) -> dict[str, Any]:
    return {
        **{field.name: getattr(plan, field.name) for field in fields(Plan)},
        "passes": (),
        "subjects": tuple(pointers(subject, checkpoints) for subject in plan.subjects),
        "releases": tuple(pointers(release, checkpoints) for release in plan.releases),
        "checkpoints": checkpoints,
    }


def subjects_in(
    documents: Sequence[SubjectDocument], checkpoints: Sequence[Checkpoint], where: str
) -> tuple[Subject, ...]:
    """Return subjects with the checkpoints that their members point to."""
    return tuple(
        _subject(document, checkpoints, f"{where}[{place}].members")
        for place, document in enumerate(documents)
    )


def _subject(document: SubjectDocument, checkpoints: Sequence[Checkpoint], where: str) -> Subject:
    if not document.members:
        raise AuditError(f"`{where}` is empty", hint=EDITED)
    for place, member in enumerate(document.members):
        if not 0 <= member.checkpoint < len(checkpoints):
            raise AuditError(f"`{where}[{place}].checkpoint` points to no checkpoint", hint=EDITED)
    members = tuple((checkpoints[m.checkpoint], m.weight) for m in document.members)
    return Subject(document.label, members, document.merge)


def plan_of(document: PlanDocument) -> Plan:
    """Return a plan as it was written; its passes are not among that."""
    if not 0 < document.recipe.confidence < 1:
        raise AuditError("`audit.plan.recipe.confidence` is not between 0 and 1", hint=EDITED)
    values = {field.name: getattr(document, field.name) for field in fields(Plan)}
    for name in ("subjects", "releases"):
        values[name] = subjects_in(values[name], document.checkpoints, f"audit.plan.{name}")
    return Plan(**values)
