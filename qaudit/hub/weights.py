"""The files of a checkpoint in a listing: its weights, and the small files that go with them.

Many repositories hold their weights more than once: as pickles beside safetensors, in the
trainer's own layout, or as shards of an earlier upload that was not removed. The choice is that
of transformers and of the reader of a local folder: the single safetensors file, else the shards
that the index names, and pickles only where there is nothing else. Shards beside a single file are
a doubt. The index is read only where names leave a choice: one complete set of shards `k of n`
needs no request.

Config, tokenizer and index are a few MB and stay when weights are evicted: the next run then
needs no network for them. A checkpoint in a sub-folder often has its tokenizer at the root.
Libraries look in one folder only, so what is missing there is linked from the nearest folder
above that has it: the config with its generation settings as one group, the tokenizer as another,
because a tokenizer put together from two is a third one. An index is only ever taken from the
folder itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

from qaudit.checkpoints.safetensors import ADAPTER, ADAPTER_WEIGHTS, shards_beside
from qaudit.checkpoints.stamps import LARGEST_SETTINGS_NBYTES, QUANTIZATION, TOKENIZER
from qaudit.core.doubts import NO_WEIGHTS
from qaudit.hub.names import HubFile
from qaudit.support.keys import first_of
from qaudit.types import Checkpoint, WeightFile

LONGEST_INDEX_NBYTES = 64_000_000
_CONFIG = ("config.json",)
_MODEL = ("config.json", "generation_config.json", "*processor_config.json")
_CODE = ("*.py",)

ReadFile = Callable[[HubFile], bytes]

PlacedFile = tuple[HubFile, str]
"""A file of the repository, and the path at which it is linked."""


@dataclass(frozen=True)
class HubWeights:
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


def choose_weights(
    files: Sequence[HubFile], subfolder: str | None, read: ReadFile | None
) -> HubWeights:
    """Return the weights of a folder of a revision, not of those below it.

    Where names leave a choice and nothing may be read, nothing is chosen and nothing noted.
    """
    names = {name: file for name, file in _inside(files, subfolder).items() if "/" not in name}

    def of(chosen: Iterable[str], doubt: str | None, *, pickled: bool) -> HubWeights:
        weights = (WeightFile(name, names[name].nbytes, names[name].identity) for name in chosen)
        return HubWeights(tuple(weights), (doubt,) if doubt else (), pickled)

    for layout in (_SAFETENSORS, _PICKLES):
        if layout.single in names:
            numbered = sorted(name for name in names if re.fullmatch(layout.shard, name))
            shards = numbered if layout.index in names else []
            doubt = shards_beside(layout.single, layout.index, shards)
            return of([layout.single], doubt, pickled=layout is _PICKLES)
        if layout.index in names:
            return of(*_sharded(names, layout, read), pickled=layout is _PICKLES)
    adapters = [name for name in ADAPTER_WEIGHTS if name in names]
    if adapters and ADAPTER in names:
        return of([ADAPTER, adapters[0]], None, pickled=adapters[0].endswith(".bin"))
    endings = (".safetensors", ".bin", ".pt", ".pth")
    if unread := sorted(name for name in names if name.endswith(endings)):
        doubt = f"{NO_WEIGHTS} under a name that is read; it has {first_of(unread, 1)}"
        return of([], doubt, pickled=False)
    return of([], NO_WEIGHTS, pickled=False)


def folders_with_weights(files: Sequence[HubFile]) -> tuple[str, ...]:
    """Return the folders, at most two deep, that hold weights; the root has no name."""
    names = {n for layout in (_SAFETENSORS, _PICKLES) for n in (layout.index, layout.single)}
    names |= {*ADAPTER_WEIGHTS}
    parts = [file.path.rpartition("/") for file in files]
    return tuple(sorted({at for at, _, name in parts if name in names and at.count("/") < 2}))


def _sharded(
    names: Mapping[str, HubFile], layout: _Layout, read: ReadFile | None
) -> tuple[Sequence[str], str]:
    """Return the names of the shards, and what is wrong where they are none."""
    sets: dict[tuple[str, int], dict[int, str]] = {}
    for name in names:
        if match := re.fullmatch(layout.shard, name):
            sets.setdefault((match[1], int(match[3])), {})[int(match[2])] = name
    if len(sets) == 1:
        (((_, total), numbered),) = sets.items()
        if len(numbered) == total and min(numbered) == 1 and max(numbered) == total:
            return [numbered[k] for k in sorted(numbered)], ""
    if read is None:
        return (), ""
    index, shards = names[layout.index], list[str]()
    if 0 < index.nbytes <= LONGEST_INDEX_NBYTES:
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            shards = sorted({str(name) for name in json.loads(read(index))["weight_map"].values()})
    if not shards:
        return (), f"`{layout.index}` is not an index of weights"
    if missing := [name for name in shards if name not in names]:
        return (), f"{first_of(missing, 1)} of `{layout.index}` is missing"
    return shards, ""


def weights_on_hub(checkpoint: Checkpoint) -> list[HubFile]:
    above = f"{checkpoint.ref.subfolder}/" if checkpoint.ref.subfolder else ""
    return [
        HubFile.identified(above + file.name, file.nbytes, file.sha256) for file in checkpoint.files
    ]


def settings_files(
    files: Sequence[HubFile], subfolder: str | None, *, code: bool = False
) -> tuple[PlacedFile, ...]:
    """Return the small files that a checkpoint needs in its folder."""
    small = [file for file in files if file.nbytes < LARGEST_SETTINGS_NBYTES]
    folders = [subfolder or ""]  # and those above it, up to the root
    while folders[-1]:
        folders.append(folders[-1].rpartition("/")[0])
    group = _matching(small, folders[0], (_SAFETENSORS.index, *QUANTIZATION, ADAPTER))
    group |= _nearest(small, folders, TOKENIZER, needs=TOKENIZER)
    group |= _nearest(small, folders, _MODEL, needs=_CONFIG)
    if code:
        for folder in reversed(folders):  # the nearest of a name wins
            group |= _matching(small, folder, _CODE)
    start = f"{subfolder}/" if subfolder else ""
    return tuple((file, f"{start}{name}") for name, file in sorted(group.items()))


def index_file(
    files: Sequence[HubFile], subfolder: str | None, names: Sequence[str]
) -> list[PlacedFile]:
    """Return the index of shards of these names, where the revision has one."""
    pickled = all(name.endswith(".bin") for name in names)
    name = (_PICKLES if pickled else _SAFETENSORS).index
    path = f"{subfolder}/{name}" if subfolder else name
    return [(file, path) for file in files if file.path == path]


def _inside(files: Sequence[HubFile], folder: str | None) -> dict[str, HubFile]:
    start = f"{folder}/" if folder else ""
    return {file.path[len(start) :]: file for file in files if file.path.startswith(start)}


def _matching(files: Sequence[HubFile], folder: str, patterns: Sequence[str]) -> dict[str, HubFile]:
    return {
        name: file
        for name, file in _inside(files, folder).items()
        # a star stays within one folder
        if any(name.count("/") == p.count("/") and fnmatchcase(name, p) for p in patterns)
    }


def _nearest(
    files: Sequence[HubFile], folders: Sequence[str], patterns: Sequence[str], needs: Sequence[str]
) -> dict[str, HubFile]:
    """Return a group of files from the nearest folder that has what the group needs."""
    for folder in folders:
        if _matching(files, folder, needs):
            return _matching(files, folder, patterns)
    return {}
