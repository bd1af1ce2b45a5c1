"""A listing of files -> which of them are the weights, and what about them is odd.

Many repositories hold their weights more than once: as pickles beside safetensors, in the
trainer's own layout, or as shards of an earlier upload that was not removed. What is taken here
is what the reader of weights takes from a folder: the shards that the safetensors index names,
else the single file, and pickles only where there is nothing else. A single file beside an
index is named as odd, because `transformers` loads that one and not the shards.

The index itself is read only where names leave a choice: shards are numbered `k of n`, so that
one complete set beside an index needs no request to be known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qaudit.core.doubts import NO_WEIGHTS
from qaudit.hub.entries import HubFile
from qaudit.types import Checkpoint, WeightFile

LONGEST_INDEX_NBYTES = 64_000_000

ReadText = Callable[[HubFile], bytes]
"""Fetch a small file whole."""


@dataclass(frozen=True)
class Chosen:
    """The weights of one folder of one revision."""

    files: tuple[WeightFile, ...]
    suspect: tuple[str, ...] = ()
    pickled: bool = False


@dataclass(frozen=True)
class _Layout:
    index: str
    single: str
    shard: str  # how shards are numbered


_SAFETENSORS = _Layout(
    "model.safetensors.index.json",
    "model.safetensors",
    r"(.+)-([0-9]{1,9})-of-([0-9]{1,9})\.safetensors",
)
_PICKLES = _Layout(
    "pytorch_model.bin.index.json", "pytorch_model.bin", r"(.+)-([0-9]{1,9})-of-([0-9]{1,9})\.bin"
)


def choose(files: Sequence[HubFile], subfolder: str | None, read: ReadText | None) -> Chosen:
    """Return the weights of a folder of a revision, not of those below it.

    Where names leave a choice and nothing may be read, nothing is chosen and nothing said.
    """
    here = _directly_in(files, subfolder)
    for layout in (_SAFETENSORS, _PICKLES):
        if layout.index in here:
            return _sharded(here, layout, read)
        if layout.single in here:
            return Chosen((_weight(here[layout.single]),), pickled=layout is _PICKLES)
    unread = sorted(name for name in here if name.endswith((".safetensors", ".bin", ".pt", ".pth")))
    why = (
        f"{NO_WEIGHTS} under a name that is read; it has {_some(unread)}" if unread else NO_WEIGHTS
    )
    return Chosen((), (why,))


def folders_with_weights(files: Sequence[HubFile]) -> tuple[str, ...]:
    """Return the folders, at most two deep, that hold weights; the root has no name."""
    names = {n for layout in (_SAFETENSORS, _PICKLES) for n in (layout.index, layout.single)}
    parts = [file.path.rpartition("/") for file in files]
    found = {folder for folder, _, name in parts if name in names and folder.count("/") < 2}
    return tuple(sorted(found))


def _directly_in(files: Sequence[HubFile], subfolder: str | None) -> dict[str, HubFile]:
    start = f"{subfolder}/" if subfolder else ""
    return {
        name: file
        for file in files
        if file.path.startswith(start) and (name := file.path[len(start) :]) and "/" not in name
    }


def _sharded(here: Mapping[str, HubFile], layout: _Layout, read: ReadText | None) -> Chosen:
    pickled = layout is _PICKLES
    names = _only_set(here, layout)
    if names is None:
        if read is None:
            return Chosen((), (), pickled)
        index = here[layout.index]
        readable = 0 < index.nbytes <= LONGEST_INDEX_NBYTES
        names = _named_in(read(index)) if readable else None
    if names is None:
        return Chosen((), (f"`{layout.index}` is not an index of weights",), pickled)
    missing = [name for name in names if name not in here]
    if missing:
        return Chosen((), (f"{_some(missing)} of `{layout.index}` is missing",), pickled)
    odd = (
        f"`{layout.single}` is beside the shards that `{layout.index}` names: the shards "
        "are taken, and transformers would load the other"
    )
    suspect = (odd,) if layout.single in here else ()
    return Chosen(tuple(_weight(here[name]) for name in names), suspect, pickled)


def _only_set(here: Mapping[str, HubFile], layout: _Layout) -> list[str] | None:
    """Return the shards if they can only be one complete set, or nothing."""
    sets: dict[tuple[str, int], dict[int, str]] = {}
    for name in here:
        if match := re.fullmatch(layout.shard, name):
            sets.setdefault((match[1], int(match[3])), {})[int(match[2])] = name
    if len(sets) != 1:
        return None
    (((_, total), shards),) = sets.items()
    complete = len(shards) == total and min(shards) == 1 and max(shards) == total
    return [shards[k] for k in sorted(shards)] if complete else None


def _named_in(index: bytes) -> list[str] | None:
    """Return the files that an index names, or nothing if it is not one."""
    try:
        names = sorted({str(name) for name in json.loads(index)["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return names or None


def _weight(file: HubFile) -> WeightFile:
    return WeightFile(file.path.rpartition("/")[2], file.nbytes, file.identity)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"`{names[0]}`{more}"


def files_on_hub(checkpoint: Checkpoint) -> list[HubFile]:
    """Return the files of weights as the Hub names them."""
    above = f"{checkpoint.ref.subfolder}/" if checkpoint.ref.subfolder else ""
    found = []
    for file in checkpoint.files:
        by_git = file.sha256.startswith("git:")
        git_id = file.sha256.removeprefix("git:") if by_git else ""
        sha256 = None if by_git else file.sha256
        found.append(HubFile(above + file.name, file.nbytes, git_id, sha256))
    return found
