"""What may have caused a difference of two audits: protocol, versions, weights.

Everything is compared as text and by name, so that what a later version records is named, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qaudit.types import AuditRecord, Changed


def changed(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[Changed, ...]:
    keys = dict.fromkeys([*a, *b])
    return tuple(Changed(key, a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key))


def other_weights(a: AuditRecord, b: AuditRecord) -> Iterator[str]:
    """Yield the subjects that have one label and two contents."""
    contents = {subject.label: subject.content for subject in a.subjects}
    for subject in b.subjects:
        if contents.get(subject.label, subject.content) != subject.content:
            yield subject.label


def protocol_of(audit: AuditRecord) -> dict[str, str]:
    plan = audit.plan
    confidence = f"{plan.recipe.confidence:g}"
    machine = {"dtype": plan.dtype, "device": plan.device, "confidence": confidence}
    return dict(_flat(audit.protocol)) | machine


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        elif key not in ("notes", "has_chat_template"):  # they repeat others, or change nothing
            yield f"{before}{key}", str(value)


def versions_of(audit: AuditRecord) -> dict[str, str]:
    environment = audit.environment
    libraries = environment.get("libraries")
    versions = {k: str(v) for k, v in libraries.items()} if isinstance(libraries, dict) else {}
    for key in ("python", "platform", "processor"):
        if key in environment:
            versions[key] = str(environment[key])
    return {"qaudit": audit.qaudit, **versions}
