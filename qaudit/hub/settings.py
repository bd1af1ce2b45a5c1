"""Which small files go with a checkpoint, and where its folder needs them.

What makes weights a model - its config, its tokenizer, the index of its shards - is a few MB
and is kept when weights are evicted: the next run then needs no network for it.

A checkpoint in a sub-folder often keeps weights and config there and its tokenizer at the root.
Libraries look in one folder only, so what is missing there is linked from the nearest folder
above that has it: the config with its generation settings and code as one group, and everything
of the tokenizer as another, because a tokenizer put together from two is a third one. Such a
link is a name in the cache which the repository itself does not have; it is the price for
reading a local folder and nothing else. An index is only ever taken from the folder itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

from qaudit.hub.entries import HubFile

LARGEST_NBYTES = 100_000_000
"""What is larger is no setting, whatever it is called."""

INDEX, PICKLE_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"

_MODEL = ("config.json", "generation_config.json")
_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",  # sentencepiece
    "chat_template*",
    "additional_chat_templates/*.jinja",
)
_CODE = ("*.py",)

Placed = tuple[HubFile, str]
"""A file of the repository, and the path at which it is linked."""


def settings_of(
    files: Sequence[HubFile], subfolder: str | None, *, code: bool = False
) -> tuple[Placed, ...]:
    """Return the small files that a checkpoint needs in its folder."""
    small = [file for file in files if file.nbytes < LARGEST_NBYTES]
    folders = list(_upwards(subfolder or ""))
    model = _nearest(small, folders, _any_of(_MODEL), needs=_any_of(("config.json",)))
    tokenizer = _nearest(small, folders, _any_of(_TOKENIZER), needs=_any_of(_TOKENIZER))
    index = _nearest(small, folders[:1], _any_of((INDEX,)), needs=_any_of((INDEX,)))
    found = {**index, **tokenizer, **model}
    if code:
        for folder in reversed(folders):  # the nearest of a name wins
            found |= _in(small, folder, _any_of(_CODE))
    start = f"{folders[0]}/" if folders[0] else ""
    return tuple((file, f"{start}{name}") for name, file in sorted(found.items()))


def index_of(
    files: Sequence[HubFile], subfolder: str | None, *, pickled: bool
) -> tuple[Placed, ...]:
    """Return the index that tells which shards belong together, if there is one."""
    name = PICKLE_INDEX if pickled else INDEX
    path = f"{subfolder}/{name}" if subfolder else name
    return tuple((file, path) for file in files if file.path == path)


def _upwards(folder: str) -> Iterator[str]:
    """Yield a folder and those above it; the root has no name."""
    while folder:
        yield folder
        folder = folder.rpartition("/")[0]
    yield ""


def _any_of(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return whether a name matches; a star stays within one folder."""
    return lambda name: any(
        name.count("/") == pattern.count("/") and fnmatchcase(name, pattern) for pattern in patterns
    )


def _in(files: Sequence[HubFile], folder: str, fits: Callable[[str], bool]) -> dict[str, HubFile]:
    start = f"{folder}/" if folder else ""
    inside = {file.path[len(start) :]: file for file in files if file.path.startswith(start)}
    return {name: file for name, file in inside.items() if fits(name)}


def _nearest(
    files: Sequence[HubFile],
    folders: Sequence[str],
    fits: Callable[[str], bool],
    *,
    needs: Callable[[str], bool],
) -> dict[str, HubFile]:
    """Return a group of files from the nearest folder that has what the group needs."""
    for folder in folders:
        if _in(files, folder, needs):
            return _in(files, folder, fits)
    return {}
