"""A saved audit with its evidence: what every judgement after the fact is made from. No torch.

Evidence is believed only if its bytes are those whose hash stands in the audit, and if it says
itself that it is of the scheme and the draw that the audit names it for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from qaudit.errors import AuditError, SourceError, UsageError
from qaudit.saved.audits import read_audit
from qaudit.saved.results import read_measurement, sha256_of
from qaudit.types import Audit, Measurement, MeasurementRow

_AGAIN = "run the same scan again: what is missing is measured again"

_EDITED = "the audit may have been edited by hand: scan again, or restore it"


@dataclass(frozen=True, eq=False)
class SavedAudit:
    """An audit and the measurements it was made from."""

    audit: Audit
    measurements: tuple[Measurement, ...]


def read_saved(path: Path) -> SavedAudit:
    """Read an output folder, or the `audit.json` in one, with all of its evidence."""
    audit = read_audit(path)
    folder = path if path.is_dir() else path.parent
    return SavedAudit(audit, tuple(_measurement(score, folder) for score in audit.measurements))


def _measurement(score: MeasurementRow, folder: Path) -> Measurement:
    found = _read(score, folder)
    said = {"spec": score.spec, "calibration_seed": score.calibration_seed}
    said |= {"bits_per_weight": score.bits_per_weight}
    for name, value in said.items():
        if getattr(found, name) != value:
            raise AuditError(
                f"the evidence of `{score.subject}` under `{score.scheme}` is of `{name}` "
                f"{getattr(found, name)}, and the audit says {value}",
                hint=_EDITED,
            )
    # Two names of the same weights share one file: it says only one of them.
    return replace(found, subject=score.subject, scheme=score.scheme)


def _read(score: MeasurementRow, folder: Path) -> Measurement:
    path = folder / score.evidence
    # The file itself may be a link, as in the shared cache: its bytes are hashed below.
    if not path.parent.resolve().is_relative_to(folder.resolve()) or path.name in ("", ".."):
        raise SourceError(
            f"the evidence of `{score.subject}` under `{score.scheme}` lies outside the audit",
            hint=_EDITED,
        )
    try:
        if sha256_of(path) != score.evidence_sha256:
            raise SourceError(
                f"`{path}` is not the evidence that the audit was made from", hint=_AGAIN
            )
        found = read_measurement(path)
    except (OSError, ValueError) as error:
        raise SourceError(f"`{path}` cannot be read: {error}", hint=_AGAIN) from error
    return found


def combine(audits: Mapping[str, SavedAudit]) -> SavedAudit:
    """Join audits of the same text and precision; subjects of equal labels keep apart by name."""
    (first_name, first), *others = audits.items()
    for name, other in others:
        for what in ("dtype", "context"):
            a, b = getattr(first.audit.plan, what), getattr(other.audit.plan, what)
            if a != b:
                raise UsageError(
                    f"`{first_name}` was measured with {what} {a} and `{name}` with {b}",
                    hint="measure both alike; such numbers do not compare",
                )
    labels = Counter(s.label for saved in audits.values() for s in saved.audit.subjects)
    renamed = [
        _apart(name, saved, {label for label, times in labels.items() if times > 1})
        for name, saved in audits.items()
    ]
    joined = replace(
        first.audit,
        subjects=tuple(s for saved in renamed for s in saved.audit.subjects),
        measurements=tuple(s for saved in renamed for s in saved.audit.measurements),
        pooled=tuple(p for saved in renamed for p in saved.audit.pooled),
    )
    return SavedAudit(joined, tuple(m for saved in renamed for m in saved.measurements))


def _apart(name: str, saved: SavedAudit, twice: Collection[str]) -> SavedAudit:
    """Put the audit's name before labels that others use too."""

    def label(old: str) -> str:
        return f"{name}/{old}" if old in twice else old

    audit = replace(
        saved.audit,
        subjects=tuple(replace(s, label=label(s.label)) for s in saved.audit.subjects),
        measurements=tuple(replace(s, subject=label(s.subject)) for s in saved.audit.measurements),
        pooled=tuple(replace(p, subject=label(p.subject)) for p in saved.audit.pooled),
    )
    found = tuple(replace(m, subject=label(m.subject)) for m in saved.measurements)
    return SavedAudit(audit, found)
