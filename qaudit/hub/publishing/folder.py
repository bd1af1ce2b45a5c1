"""An audit's folder as it is published: read once, and checked before anything is asked or sent.

Evidence is hashed as it is read, against the audit, and card and page are rendered anew, so that
what is published fits together. Nothing but these names is taken from the folder, and what is a
link there, and might lead anywhere on this machine, is not followed, unless it is evidence: that
is what its hash says, wherever it lies.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from qaudit import __version__
from qaudit.errors import AuditError, MachineError, SourceError
from qaudit.hub.publishing.published import FOLDER
from qaudit.judge.agreement import refuse_edited
from qaudit.judge.table import Table
from qaudit.report.card import PICTURES, render, render_page
from qaudit.report.figures import figures, svg_files
from qaudit.report.html import FILE as PAGE
from qaudit.report.series import pictures
from qaudit.report.views import View
from qaudit.saved.audits import read_saved
from qaudit.types import AuditRecord, MeasurementRow

_EVIDENCE = re.compile(r"evidence/[A-Za-z0-9._=-]+\.npz")


@dataclass(frozen=True, eq=False)
class Folder:
    """An audit's folder as it is published: read once, and checked."""

    audit: AuditRecord
    files: Mapping[str, bytes] = field(repr=False)  # by their path in the repository
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Identify the audit; its evidence is part of it, by hashes."""
        return hashlib.sha256(self.files[f"{FOLDER}/audit.json"]).hexdigest()


def read_for_publishing(path: Path) -> Folder:
    """Read an output folder with all of its evidence, and refuse what does not fit together."""
    folder = path if path.is_dir() else path.parent
    saved = read_saved(path)
    audit = saved.audit
    table = Table.of(audit.subjects, saved.measurements, audit.plan.recipe.confidence)
    refuse_edited(audit, table, version=__version__)
    if not audit.measurements:
        raise AuditError("the audit measured nothing", hint="there is nothing to publish")
    files = {f"{FOLDER}/audit.json": _bytes(folder / "audit.json")}
    for score in audit.measurements:
        files[f"{FOLDER}/{score.evidence}"] = _evidence(score, folder)
    drawn, notes = _pictures(folder / PICTURES, audit)
    files |= {f"{FOLDER}/{PICTURES}/{name}": data for name, data in drawn.items()}
    files[f"{FOLDER}/card.md"] = render(audit).encode()
    if _is_file(folder / PAGE):
        files[f"{FOLDER}/{PAGE}"] = render_page(audit).encode()
    return Folder(audit, files, (*notes, *_private(audit)))


def _evidence(score: MeasurementRow, folder: Path) -> bytes:
    """Read the evidence of a score; only the bytes that were hashed are handed on."""
    if not _EVIDENCE.fullmatch(score.evidence):
        raise SourceError(
            f"`{ascii(score.evidence)[1:-1]}` is no name that evidence has",
            hint="the audit may have been edited by hand: run the same scan again",
        )
    data = _bytes(folder / score.evidence)
    if hashlib.sha256(data).hexdigest() != score.evidence_sha256:
        raise SourceError(
            f"`{score.evidence}` is not the evidence that the audit was made from",
            hint="run the same scan again: what is missing is measured again",
        )
    return data


def _pictures(folder: Path, audit: AuditRecord) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return the pictures that the card shows; drawn anew if one of them is not there."""
    names = [f"{name}{kind}.svg" for name, _ in pictures(View(audit)) for kind in ("", "-dark")]
    missing = [name for name in names if not _is_file(folder / name)]
    if not missing:
        return {name: _bytes(folder / name) for name in names}, ()
    drawn = {name: svg.encode() for name, svg in svg_files(figures(audit)).items()}
    return drawn, (f"`{PICTURES}/{missing[0]}` is not there, so the pictures are drawn anew",)


def _private(audit: AuditRecord) -> Iterator[str]:
    """Say which places on this machine everybody will read of."""
    recipe = audit.plan.recipe
    named = [*recipe.targets, recipe.evaluation, recipe.calibration, recipe.choices]
    named += [checkpoint.ref.location for s in audit.subjects for checkpoint, _ in s.members]
    found = [place for place in named if place and PurePath(place).is_absolute()]
    if found:
        yield f"the audit names places on this machine, such as `{found[0]}`: all can read them"


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise MachineError(
            f"`{path}` cannot be read: {why}", hint="check who may read it"
        ) from error
