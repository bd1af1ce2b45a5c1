"""One file of a repository, by its path: `org/name@revision//folder/file.gguf`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qaudit.checkpoints.gguf import GgufHeader, header_by, is_gguf
from qaudit.checkpoints.places import folder_of, weights_of
from qaudit.core.keys import nearest
from qaudit.errors import HubError
from qaudit.hub.series import parse, revisions_of
from qaudit.hub.weights import weights_on_hub
from qaudit.types import Checkpoint, Ref, WeightFile

if TYPE_CHECKING:
    from qaudit.hub.listing import Listing


def find_file(listing: Listing, target: str) -> Checkpoint:
    """Return the one file that a target names, as a checkpoint."""
    ref = parse(target)
    path = ref.subfolder or ""
    revision = revisions_of(listing, Ref(ref.location, ref.revision, path))[0]
    files = {file.path: file for file in listing.files(ref.location, revision.commit)}
    if path not in files:
        near = nearest(path, sorted(name for name in files if is_gguf(name)) or sorted(files))
        raise HubError(f"there is no file `{path or target}` in `{ref.location}`", hint=near)
    folder, _, name = path.rpartition("/")
    return Checkpoint(
        Ref(ref.location, revision.name, folder or None),
        name,
        (WeightFile(name, files[path].nbytes, files[path].identity),),
        revision.commit,
    )


def header_on_hub(listing: Listing, checkpoint: Checkpoint) -> GgufHeader:
    """Read the header of a file of the Hub, and no more of it."""
    (file,) = weights_on_hub(checkpoint)
    place = weights_of(checkpoint, folder_of(checkpoint))
    repo, commit = checkpoint.ref.location, str(checkpoint.commit)

    def first(count: int) -> bytes:
        return listing.read(repo, commit, file, 0, count)

    return header_by(place, file.nbytes, first)
