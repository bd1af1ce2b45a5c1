"""A saved audit with its evidence: what every judgement after the fact is made from. No torch.

Evidence is believed only if its bytes are those whose hash stands in the audit.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

from qaudit.engine.results import read_evidence, sha256_of
from qaudit.errors import SourceError
from qaudit.report.folder import read_folder
from qaudit.types import Audit, Evidence, Measurement, Score

_AGAIN = "run the same scan again: what is missing is measured again"


@dataclass(frozen=True, eq=False)
class SavedAudit:
    """An audit and the measurements it was made from."""

    audit: Audit
    measurements: tuple[Measurement, ...]


def read_saved(path: Path) -> SavedAudit:
    """Read an output folder, or the `audit.json` in one, with all of its evidence."""
    audit = read_folder(path)
    folder = path if path.is_dir() else path.parent
    return SavedAudit(audit, tuple(_measurement(score, folder) for score in audit.scores))


def _measurement(score: Score, folder: Path) -> Measurement:
    return Measurement(
        subject=score.subject,
        scheme=score.scheme,
        spec=score.spec,
        evidence=_evidence(score, folder),
        bits_per_weight=score.bits_per_weight,
        seconds=score.seconds,
        calibration_seed=score.calibration_seed,
        notes=score.notes,
    )


def _evidence(score: Score, folder: Path) -> Evidence:
    path = folder / score.evidence
    if not path.resolve().is_relative_to(folder.resolve()):
        raise SourceError(
            f"the evidence of `{score.subject}` under `{score.scheme}` lies outside the audit",
            hint="the audit may have been edited by hand",
        )
    try:
        if sha256_of(path) != score.evidence_sha256:
            raise SourceError(
                f"`{path}` is not the evidence that the audit was made from", hint=_AGAIN
            )
        return read_evidence(path)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise SourceError(f"`{path}` cannot be read: {error}", hint=_AGAIN) from error
