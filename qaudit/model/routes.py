"""Between the keys in the files and the parameters of a model nothing may be left over.

Every parameter has a tensor of its shape, or is tied to one that has; every tensor has a
parameter, except buffers that models compute for themselves and old checkpoints still store.

A soup's tensors, merged one at a time as they are read.

The members are read side by side and never held as models: a soup costs the memory of one
tensor per member. A checkpoint is a soup of one and is read as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from qaudit.checkpoints.safetensors import headers
from qaudit.core.merge import Merge
from qaudit.errors import ModelError, SourceError
from qaudit.support.keys import first_of

# Buffers that old checkpoints store and every model computes for itself.
_COMPUTED = re.compile(
    r"(rotary_emb\.inv_freq|(^|\.)position_ids|attn\.(masked_)?bias|attention\.(masked_)?bias)$"
)
_LISTED = 5  # names in a message


class Weights(Protocol):
    """A source of tensors: one checkpoint, or several merged as they are read."""

    def names(self) -> Sequence[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Tensor:
        """Read a tensor on the CPU, in whatever dtype it is stored."""


def must_be_read(unread: Iterable[str], ignored: Sequence[re.Pattern[str]], folder: Path) -> None:
    """Refuse tensors no parameter reads, but for buffers that models compute."""
    remaining = [
        key
        for key in unread
        if not _COMPUTED.search(key) and not any(p.search(key) for p in ignored)
    ]
    if remaining:
        raise SourceError(
            f"the model of `{folder / 'config.json'}` has no place for {some(remaining)}",
            hint="the config and the weights do not belong together",
        )


def must_fit(
    routes: Mapping[str, str], weights: Weights, parameters: Mapping[str, Tensor], folder: Path
) -> None:
    """Refuse a tensor whose shape is not what its parameter has."""
    for target, key in routes.items():
        needed, stored = tuple(parameters[target].shape), tuple(weights.shape(key))
        if needed != stored:
            raise SourceError(
                f"tensor `{key}` in `{_file_of(folder, key)}` is {list(stored)} "
                f"where the config asks for {list(needed)}",
                hint="the config and the weights do not belong together",
            )


def must_be_floats(key: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Refuse whole numbers where the model has a parameter: relabelled bytes load as huge ones."""
    if dtype.is_floating_point and not tensor.is_floating_point():
        raise SourceError(
            f"tensor `{key}` is stored as `{str(tensor.dtype).removeprefix('torch.')}` and is a "
            "weight, which takes floating-point numbers",
            hint="its header is damaged, or it was quantized: audit it as bf16, fp16 or fp32",
        )
    if dtype.is_floating_point and tensor.itemsize == 1:
        raise SourceError(
            f"tensor `{key}` is stored as `{str(tensor.dtype).removeprefix('torch.')}` without the "
            "scale that 8-bit floats have",
            hint="a quantized checkpoint has a `quantization_config`: download it whole again",
        )


def _file_of(folder: Path, key: str) -> Path:
    try:
        return folder / headers(folder)[key].file
    except (SourceError, KeyError):  # pickled, or merged under another name
        return folder


def missing(
    tied: Mapping[str, str],
    routes: Mapping[str, str],
    parameters: Mapping[str, Tensor],
    folder: Path,
    blocks_name: str,
) -> frozenset[str]:
    """Return the names that are tied and not stored; refuse any other that is not stored."""
    if any(n.startswith(f"{blocks_name}.") for pair in tied.items() for n in pair):
        raise ModelError(
            f"the blocks of `{folder}` share weights with each other",
            hint="only models whose blocks are independent can be streamed",
        )
    absent = set(parameters) - set(routes)
    excused = {n for pair in tied.items() if not set(pair) <= absent for n in pair}
    if missing := sorted(absent - excused):
        raise SourceError(
            f"no tensor for {some(missing)} in `{folder}`",
            hint="the checkpoint is incomplete, or its config belongs to another model",
        )
    return frozenset(absent)


def some(names: Sequence[str]) -> str:
    """List the first few names of many."""
    return first_of(sorted(names), _LISTED)


class MergedWeights:
    """The weights of a soup, as one source of tensors."""

    def __init__(
        self,
        labels: Sequence[str],
        members: Sequence[Weights],
        shares: Sequence[float],
        merge: Merge,
    ) -> None:
        self._labels = list(labels)
        self._members, self._shares, self._merge = list(members), list(shares), merge
        for label, member in zip(labels[1:], members[1:], strict=True):
            must_agree(labels[0], members[0], label, member)

    def names(self) -> Sequence[str]:
        return self._members[0].names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._members[0].shape(name)

    def read(self, name: str) -> Tensor:
        tensors = [member.read(name) for member in self._members]
        if tensors[0].is_floating_point():
            return self._merge.merge(tensors, self._shares)
        for label, tensor in zip(self._labels[1:], tensors[1:], strict=True):
            must_be_equal(name, self._labels[0], tensors[0], label, tensor)
        return tensors[0]  # counts or masks have no mean


def must_agree(first: str, a: Weights, second: str, b: Weights) -> None:
    """Refuse two members whose tensors differ in name or shape, and name the first difference."""
    for name in sorted(set(a.names()) ^ set(b.names())):
        has, lacks = (first, second) if name in set(a.names()) else (second, first)
        raise SourceError(
            f"`{first}` and `{second}` cannot be merged: "
            f"`{name}` is in `{has}` and not in `{lacks}`",
            hint="a soup needs members of one architecture",
        )
    for name in a.names():
        if a.shape(name) != b.shape(name):
            raise SourceError(
                f"`{first}` and `{second}` cannot be merged: "
                f"`{name}` is {list(a.shape(name))} in one and {list(b.shape(name))} in the other",
                hint="a soup needs members of one architecture",
            )


def must_be_equal(name: str, first: str, a: Tensor, second: str, b: Tensor) -> None:
    """Refuse a tensor of whole numbers that is not the same in two members."""
    if a.dtype != b.dtype or not torch.equal(a, b):
        raise SourceError(
            f"`{name}` holds whole numbers that differ between `{first}` and `{second}`",
            hint="whole numbers cannot be merged: leave one of the members out",
        )
