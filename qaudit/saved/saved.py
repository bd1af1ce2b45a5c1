"""A saved audit with its evidence: what every later judgement is made from. No torch.

Evidence counts only if its bytes have the hash that is in the audit, and if the file itself names
the scheme and the draw that the audit has it for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qaudit.errors import AuditError, SourceError, UsageError
from qaudit.saved.audits import read_audit
from qaudit.saved.results import OtherContentError, read_measurement
from qaudit.types import AuditRecord, Measurement, MeasurementRow

_AGAIN = "run the same scan again: what is missing is measured again"

_EDITED = "the audit may have been edited by hand: scan again, or restore it"


@dataclass(frozen=True, eq=False)
class SavedAudit:
    """An audit and the measurements it was made from."""

    audit: AuditRecord
    measurements: tuple[Measurement, ...]


def read_saved(path: Path) -> SavedAudit:
    """Read an output folder, or the `audit.json` in one, with all of its evidence."""
    audit = read_audit(path)
    folder = path if path.is_dir() else path.parent
    return SavedAudit(audit, tuple(_measurement(row, folder) for row in audit.measurements))


def _measurement(row: MeasurementRow, folder: Path) -> Measurement:
    measurement = _read(row, folder)
    for name in ("spec", "calibration_seed", "bits_per_weight"):
        if getattr(measurement, name) != getattr(row, name):
            raise AuditError(
                f"the evidence of `{row.subject}` under `{row.scheme}` is of `{name}` "
                f"{getattr(measurement, name)}, and the audit says {getattr(row, name)}",
                hint=_EDITED,
            )
    # Two names of the same weights share one file, which has one of them.
    return replace(measurement, subject=row.subject, scheme=row.scheme)


def _read(row: MeasurementRow, folder: Path) -> Measurement:
    path = folder / row.evidence
    try:
        # The file itself may be a link, as in the shared cache: its bytes are hashed.
        inside = path.parent.resolve().is_relative_to(folder.resolve())
        if not inside or path.name in ("", ".."):
            raise SourceError(
                f"the evidence of `{row.subject}` under `{row.scheme}` is outside the audit",
                hint=_EDITED,
            )
        return read_measurement(path, row.evidence_sha256)
    except OtherContentError as error:
        raise SourceError(
            f"`{path}` is not the evidence that the audit was made from", hint=_AGAIN
        ) from error
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a link to itself
        raise SourceError(f"`{path}` cannot be read: {error}", hint=_AGAIN) from error


def combine(audits: Mapping[str, SavedAudit]) -> SavedAudit:
    """Join audits of the same text and precision; equal labels get the names of their audits."""
    (first_name, first), *others = audits.items()
    for name, other in others:
        for setting in ("dtype", "context"):
            a, b = getattr(first.audit.plan, setting), getattr(other.audit.plan, setting)
            if a != b:
                raise UsageError(
                    f"`{first_name}` was measured with {setting} {a} and `{name}` with {b}",
                    hint="measure both alike; such numbers do not compare",
                )
    times = Counter(s.label for saved in audits.values() for s in saved.audit.subjects)

    def label(name: str, old: str) -> str:
        return f"{name}/{old}" if times[old] > 1 else old

    def joined(rows: Callable[[SavedAudit], Iterable[Any]]) -> tuple[Any, ...]:
        return tuple(
            replace(row, subject=label(name, row.subject))
            for name, saved in audits.items()
            for row in rows(saved)
        )

    subjects = tuple(
        replace(subject, label=label(name, subject.label))
        for name, saved in audits.items()
        for subject in saved.audit.subjects
    )
    audit = replace(
        first.audit,
        subjects=subjects,
        measurements=joined(lambda saved: saved.audit.measurements),
        pooled=joined(lambda saved: saved.audit.pooled),
    )
    return SavedAudit(audit, joined(lambda saved: saved.measurements))
