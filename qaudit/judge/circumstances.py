"""What may be behind a difference of two audits: protocol, software, weights, what a name means.

Everything is compared as text and by name, so that what a later version records is named, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qaudit.types import AuditRecord, Changed, Measurement

_NOT_OF_THE_PROTOCOL = frozenset({"notes"})  # each says again what another key says


def protocols(a: AuditRecord, b: AuditRecord) -> tuple[Changed, ...]:
    """Return how the two were measured differently."""
    return _changed(_protocol(a), _protocol(b))


def software(a: AuditRecord, b: AuditRecord) -> tuple[Changed, ...]:
    """Return which versions differ, and which machine."""
    return _changed(_versions(a), _versions(b))


def specs(a: Sequence[Measurement], b: Sequence[Measurement]) -> tuple[Changed, ...]:
    """Return the schemes that have one name and two meanings."""
    left, right = ({m.scheme: m.spec for m in side} for side in (a, b))
    return tuple(c for c in _changed(left, right) if c.a is not None and c.b is not None)


def other_weights(a: AuditRecord, b: AuditRecord) -> Iterator[str]:
    """Yield the subjects that have one label and two contents."""
    contents = {subject.label: subject.content for subject in a.subjects}
    for subject in b.subjects:
        if contents.get(subject.label, subject.content) != subject.content:
            yield subject.label


def alone(a: Sequence[str], b: Sequence[str]) -> tuple[Changed, ...]:
    """Return the names that only one of the two has."""
    return _changed({name: name for name in a}, {name: name for name in b})


def _changed(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[Changed, ...]:
    keys = dict.fromkeys([*a, *b])
    return tuple(Changed(key, a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key))


def _protocol(audit: AuditRecord) -> dict[str, str]:
    found = dict(_flat(audit.protocol))
    found["dtype"], found["device"] = audit.plan.dtype, audit.plan.device
    found["confidence"] = f"{audit.plan.recipe.confidence:g}"
    return found


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        elif key not in _NOT_OF_THE_PROTOCOL:
            yield f"{before}{key}", str(value)


def _versions(audit: AuditRecord) -> dict[str, str]:
    known = audit.environment
    libraries = known.get("libraries")
    found = {k: str(v) for k, v in libraries.items()} if isinstance(libraries, dict) else {}
    machine = {key: str(known[key]) for key in ("python", "platform", "processor") if key in known}
    return {"qaudit": audit.qaudit, **found, **machine}
