"""What publishing an audit writes into a repository, file by file, before a byte is sent.

    README.md                the verdict, a link to the card, metadata; every other byte as it was
    qaudit/audit.json        the audit, as it is
    qaudit/card.md           its card, rendered anew from the audit
    qaudit/evidence/*.npz    per-document sums, each checked against its hash in the audit
    qaudit/plots/*.svg       the pictures that the card shows
    qaudit/report.html       rendered anew, if there was one

The audit's folder is read once. Nothing but these names is taken from it, and a link there, which
might lead anywhere on this machine, is not followed, unless it is evidence, which has a hash. What
an older audit left in the repository and this one does not write is removed: its evidence, its
pictures, its page. Nothing else of the repository is touched.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Literal

from qaudit.errors import AuditError, HubError, MachineError, SourceError, UsageError
from qaudit.hub.answers import HubFile
from qaudit.hub.publishing.front_matter import with_metadata
from qaudit.hub.publishing.metadata import Repository, metadata_of
from qaudit.hub.publishing.published import FOLDER
from qaudit.hub.publishing.upload import Addition
from qaudit.report.block import put_block
from qaudit.report.card import PICTURES, render, render_block, render_page
from qaudit.report.figures import figures, svg_files
from qaudit.report.html import FILE as PAGE
from qaudit.report.series import pictures
from qaudit.report.views import View
from qaudit.saved.evidence import read_saved
from qaudit.types import AuditRecord, MeasurementRow, TaskRow

README = "README.md"
_EVIDENCE = re.compile(r"evidence/(tasks/[A-Za-z0-9_=-][A-Za-z0-9._=-]*/)?[A-Za-z0-9._=-]+\.npz")
_STALE = re.compile(rf"{FOLDER}/(evidence/(tasks/[^/]+/)?[^/]+\.npz|plots/[^/]+\.svg|report\.html)")

State = Literal["new", "changed", "unchanged"]


@dataclass(frozen=True, eq=False)
class Folder:
    """An audit's folder as it is published."""

    audit: AuditRecord
    files: Mapping[str, bytes] = field(repr=False)  # by their path in the repository
    notes: tuple[str, ...] = ()

    @property
    def has_page(self) -> bool:
        return f"{FOLDER}/{PAGE}" in self.files

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.files[f"{FOLDER}/audit.json"]).hexdigest()


@dataclass(frozen=True, eq=False)
class PublishPlan:
    """What is written into a repository at one commit, and what is removed from it."""

    repo: str
    commit: str  # what the files were compared with
    files: tuple[tuple[Addition, State], ...]
    removed: tuple[str, ...]
    readme: tuple[str, str] = field(repr=False)  # before and after
    notes: tuple[str, ...]

    @property
    def additions(self) -> tuple[Addition, ...]:
        return tuple(addition for addition, state in self.files if state != "unchanged")

    @property
    def is_done(self) -> bool:
        return not self.additions and not self.removed


def plan_of(
    folder: Folder,
    repository: Repository,
    commit: str,
    listed: Mapping[str, HubFile],
    readme: str,
    subject: str | None = None,
) -> PublishPlan:
    metadata, notes = metadata_of(folder.audit, repository, subject)
    with_data, edit_notes = with_metadata(readme, metadata, repository.name)
    try:
        after = put_block(with_data, render_block(folder.audit, FOLDER, has_page=folder.has_page))
    except UsageError as error:
        raise HubError(
            f"in `README.md` of `{repository.name}`, {error.message}", hint=error.hint
        ) from error
    additions = [Addition(README, after.encode())]
    additions += [Addition(path, data) for path, data in sorted(folder.files.items())]
    paths = {addition.path for addition in additions}
    return PublishPlan(
        repo=repository.name,
        commit=commit,
        files=tuple((addition, state_of(addition, listed)) for addition in additions),
        removed=tuple(sorted(p for p in listed if _STALE.fullmatch(p) and p not in paths)),
        readme=(readme, after),
        notes=(*folder.notes, *notes, *edit_notes),
    )


def state_of(addition: Addition, listed: Mapping[str, HubFile]) -> State:
    """Return whether a file is new, changed or the same in a commit with these files."""
    if addition.path not in listed:
        return "new"
    return "unchanged" if addition.is_in(listed) else "changed"


def read_for_publishing(path: Path) -> Folder:
    """Read an output folder with all of its evidence, and refuse what does not fit together."""
    folder = path if path.is_dir() else path.parent
    audit = read_saved(path).checked().audit
    if not audit.measurements:
        raise AuditError("the audit measured nothing", hint="there is nothing to publish")
    files = {f"{FOLDER}/audit.json": _bytes(folder / "audit.json")}
    for row in audit.measurements:
        files[f"{FOLDER}/{row.evidence}"] = _evidence(row, folder)
    for task in (row for row in audit.tasks if row.evidence):
        files[f"{FOLDER}/{task.evidence}"] = _evidence(task, folder)
    drawings, notes = _pictures(folder / PICTURES, audit)
    files |= {f"{FOLDER}/{PICTURES}/{name}": data for name, data in drawings.items()}
    files[f"{FOLDER}/card.md"] = render(audit).encode()
    if _is_file(folder / PAGE):
        files[f"{FOLDER}/{PAGE}"] = render_page(audit).encode()
    return Folder(audit, files, (*notes, *_private(audit)))


def _evidence(row: MeasurementRow | TaskRow, folder: Path) -> bytes:
    if not _EVIDENCE.fullmatch(row.evidence):
        raise SourceError(
            f"`{ascii(row.evidence)[1:-1]}` is no name that evidence has",
            hint="the audit may have been edited by hand: run the same scan again",
        )
    data = _bytes(folder / row.evidence)
    if hashlib.sha256(data).hexdigest() != row.evidence_sha256:
        raise SourceError(
            f"`{row.evidence}` is not the evidence that the audit was made from",
            hint="run the same scan again: what is missing is measured again",
        )
    return data


def _pictures(folder: Path, audit: AuditRecord) -> tuple[dict[str, bytes], tuple[str, ...]]:
    names = [f"{name}{kind}.svg" for name, _ in pictures(View(audit)) for kind in ("", "-dark")]
    missing = [name for name in names if not _is_file(folder / name)]
    if not missing:
        return {name: _bytes(folder / name) for name in names}, ()
    drawings = {name: svg.encode() for name, svg in svg_files(figures(audit)).items()}
    return drawings, (f"`{PICTURES}/{missing[0]}` is not there, so the pictures are drawn anew",)


def _private(audit: AuditRecord) -> Iterator[str]:
    recipe = audit.plan.recipe
    sources = [*recipe.targets, recipe.evaluation, recipe.calibration, recipe.choices]
    sources += [checkpoint.ref.location for s in audit.subjects for checkpoint, _ in s.members]
    places = [source for source in sources if source and PurePath(source).is_absolute()]
    if places:
        yield f"the audit names places on this machine, such as `{places[0]}`: all can read them"


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise MachineError(
            f"`{path}` cannot be read: {why}", hint="check its permissions"
        ) from error
