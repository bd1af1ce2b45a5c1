"""A soup's tensors, merged one at a time as they are read.

The members are read side by side and never held as models: a soup costs the memory of one
tensor per member. A checkpoint is a soup of one and is read as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qaudit.core.merge import Merge
from qaudit.errors import SourceError
from qaudit.model.routes import Weights


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
