"""What publishing an audit writes into a repository, file by file, before a byte is sent.

    README.md                the card's block and its metadata; every other byte as it was
    qaudit/audit.json        the audit, as it is
    qaudit/card.md           its card, rendered anew: it says what the audit says
    qaudit/evidence/*.npz    per-document sums, each checked against its hash in the audit
    qaudit/plots/*.svg       the pictures that the card shows
    qaudit/report.html       rendered anew, if there was one

What an older audit left there and this one does not write is removed: its evidence, its
pictures, its page. Nothing else of the repository is touched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from qaudit.errors import HubError, UsageError
from qaudit.hub.change import Addition
from qaudit.hub.entries import HubFile
from qaudit.hub.publishing.folder import Folder
from qaudit.hub.publishing.front_matter import with_metadata
from qaudit.hub.publishing.metadata import Repository, metadata_of
from qaudit.hub.publishing.published import FOLDER
from qaudit.report.block import put_block
from qaudit.report.card import PICTURES, render

README = "README.md"
_STALE = re.compile(rf"{FOLDER}/(evidence/[^/]+\.npz|plots/[^/]+\.svg|report\.html)")

State = Literal["new", "changed", "unchanged"]


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
        """What has to be sent: that which is not there already."""
        return tuple(addition for addition, state in self.files if state != "unchanged")

    @property
    def is_done(self) -> bool:
        """Say whether the repository holds all of it already."""
        return not self.additions and not self.removed


def plan_of(
    folder: Folder,
    repository: Repository,
    commit: str,
    listed: Mapping[str, HubFile],
    readme: str,
    subject: str | None = None,
) -> PublishPlan:
    """Return what publishing writes upon a commit that has these files and this README."""
    wanted, notes = metadata_of(folder.audit, repository, subject)
    with_data, said = with_metadata(readme, wanted, repository.name)
    try:
        after = put_block(with_data, render(folder.audit, pictures_at=f"{FOLDER}/{PICTURES}"))
    except UsageError as error:
        raise HubError(
            f"in `README.md` of `{repository.name}`, {error.message}", hint=error.hint
        ) from error
    additions = [Addition(README, after.encode())]
    additions += [Addition(path, data) for path, data in sorted(folder.files.items())]
    kept = {addition.path for addition in additions}
    return PublishPlan(
        repo=repository.name,
        commit=commit,
        files=tuple((addition, _state(addition, listed)) for addition in additions),
        removed=tuple(sorted(p for p in listed if _STALE.fullmatch(p) and p not in kept)),
        readme=(readme, after),
        notes=(*folder.notes, *notes, *said),
    )


def _state(addition: Addition, listed: Mapping[str, HubFile]) -> State:
    if addition.path not in listed:
        return "new"
    return "unchanged" if addition.is_there(listed) else "changed"
