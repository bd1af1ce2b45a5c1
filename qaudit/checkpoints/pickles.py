"""Weights kept as pickles, read by a loader that takes nothing but tensors.

A pickle is a program, and opening it with Python's own loader runs it. `weights_only=True` runs
none of it: whatever is not a tensor, a plain container or a number is refused. Old checkpoints
keep masks as bytes and weights as halves among them, which are tensors like any other. Files
of the zip format are mapped and not read; those of the format before it cannot be, and take
their size in memory.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from qaudit.errors import SourceError
from qaudit.support.lazy import Tensor, torch

_NOT_TENSORS = (
    pickle.UnpicklingError, RuntimeError, OSError, ValueError, EOFError, AttributeError,
    TypeError, LookupError, ImportError, zipfile.BadZipFile,
)  # fmt: skip
"""What opening a pickle of anything else raises."""


def load_pickles(folder: Path, files: Sequence[str]) -> Mapping[str, tuple[Tensor, str]]:
    tensors: dict[str, tuple[Tensor, str]] = {}
    for file in files:
        for name, tensor in _load(folder / file).items():
            if name in tensors:
                raise SourceError(
                    f"tensor `{name}` is in both `{tensors[name][1]}` and `{file}`",
                    hint="keep the shards of one checkpoint only in the folder",
                )
            tensors[name] = tensor, file
    return tensors


def _load(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise SourceError(
            f"shard `{path.name}` is named in an index and not in `{path.parent}`",
            hint="download the missing shard",
        )
    try:
        mapped = zipfile.is_zipfile(path)
        with warnings.catch_warnings(action="ignore"):  # of pickles newer than torch writes
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        if not all(isinstance(tensor, torch.Tensor) for tensor in loaded.values()):
            raise ValueError("something in it is no tensor")
        return {str(name): tensor.detach() for name, tensor in loaded.items()}
    except _NOT_TENSORS as error:
        raise SourceError(
            f"`{path}` cannot be read as pickled tensors",
            hint="convert it to safetensors where it was made",
        ) from error
