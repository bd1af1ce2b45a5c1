"""The files of the checkpoints of a series: one tree for each commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from qaudit.checkpoints.series import Candidate, CheckpointGroup, Knowledge, as_series, tell_apart
from qaudit.core.keys import nearest
from qaudit.errors import HubError
from qaudit.families import Family, find, load
from qaudit.hub.answers import HubFile
from qaudit.hub.series import spread
from qaudit.hub.weights import choose_weights, folders_with_weights, pinned_settings
from qaudit.types import Checkpoint

if TYPE_CHECKING:  # a local audit calls `is_hub` and never opens a Hub
    from qaudit.hub.listing import Listing


def with_files(
    listing: Listing,
    checkpoints: Iterable[Checkpoint],
    *,
    known_only: bool = False,
    keep_all: bool = False,
) -> tuple[Checkpoint, ...]:
    """Read one tree for each commit: files, what they require, what is odd about them.

    A revision that holds no weights but sub-folders with some becomes several checkpoints.
    With `known_only` no request is sent, and what is not known yet has no files. Checkpoints in
    folders of this machine are left as they are. Offline, what is not in the cache has no files
    either and is marked suspect; if that is all there is, it is an error, unless `keep_all`.
    """
    reader = _SeriesReader(listing, known_only)
    parts = tell_apart([part for c in checkpoints for part in reader.parts(c)])
    if reader.refusals and not keep_all and not any(c.files or c.commit is None for c in parts):
        raise reader.refusals[0]
    return parts


class _SeriesReader:
    def __init__(self, listing: Listing, known_only: bool) -> None:
        self.listing, self.known_only = listing, known_only
        self.refusals: list[HubError] = []

    def parts(self, checkpoint: Checkpoint) -> Sequence[Checkpoint]:
        if checkpoint.commit is None:
            return [checkpoint]
        tree = self.listing.known_files if self.known_only else self.listing.files
        try:
            files = tree(checkpoint.ref.location, checkpoint.commit)
        except HubError as error:
            return [self._refused(checkpoint, error)]
        return [checkpoint] if files is None else self._of_tree(checkpoint, files)

    def _of_tree(self, checkpoint: Checkpoint, files: tuple[HubFile, ...]) -> Sequence[Checkpoint]:
        inside = folders_with_weights(files)
        parts: tuple[Checkpoint, ...] = (checkpoint,)
        if checkpoint.ref.subfolder is None and inside and "" not in inside:
            known, ref, commit = Knowledge(_family(checkpoint)), checkpoint.ref, checkpoint.commit
            whole = Candidate(ref, checkpoint.label, (ref.revision or "main",), known, commit)
            parts = as_series(
                [CheckpointGroup(tuple(spread(whole, lambda *_: files)), alone=False)]
            )
        checkpoints = []
        for part in parts:
            try:
                checkpoints.append(self._with_weights(part, files))
            except HubError as error:
                checkpoints.append(self._refused(part, error))
        return checkpoints

    def _with_weights(self, checkpoint: Checkpoint, files: tuple[HubFile, ...]) -> Checkpoint:
        repo, commit = checkpoint.ref.location, str(checkpoint.commit)

        def read(file: HubFile) -> bytes:
            return self.listing.read(repo, commit, file, 0, file.nbytes)

        if checkpoint.ref.subfolder and not any(
            file.path.startswith(f"{checkpoint.ref.subfolder}/") for file in files
        ):
            folders = {file.path.rpartition("/")[0] for file in files} - {""}
            raise HubError(
                f"there is no folder `{checkpoint.ref.subfolder}` in `{repo}`",
                hint=nearest(checkpoint.ref.subfolder, sorted(folders)),
            )
        chosen = choose_weights(files, checkpoint.ref.subfolder, None if self.known_only else read)
        if chosen.suspect and not chosen.files and self.listing.is_partial(repo, commit):
            raise HubError(
                f"the weights of `{checkpoint.ref}` are not whole on this machine, and "
                f"`HF_HUB_OFFLINE` keeps it from asking: {chosen.suspect[0]}",
                hint=f"fetch the rest while online: `hf download {repo} --revision {commit}`",
            )
        requires: list[Literal["pickle", "remote_code"]] = ["pickle"] if chosen.pickled else []
        family = _family(checkpoint)
        if family is not None and "remote_code" in family.requires:
            requires.append("remote_code")
        return replace(
            checkpoint,
            files=chosen.files,
            settings=pinned_settings(files, checkpoint.ref.subfolder),
            requires=tuple(requires),
            suspect=tuple(dict.fromkeys((*checkpoint.suspect, *chosen.suspect))),
        )

    def _refused(self, checkpoint: Checkpoint, error: HubError) -> Checkpoint:
        if not self.listing.client.offline:
            raise error
        self.refusals.append(error)
        return replace(checkpoint, suspect=(*checkpoint.suspect, error.message))


def _family(checkpoint: Checkpoint) -> Family | None:
    if checkpoint.family is None:
        return None
    family = find(checkpoint.ref.location)
    return family if family and family.family == checkpoint.family else load(checkpoint.family)
