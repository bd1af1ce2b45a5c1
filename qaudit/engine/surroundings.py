"""What modules around groups of linears return: attention for q/k/v, the MLP for gate/up.

Toolchains of AWQ choose scales by these outputs. A module is run alone, on what its linears read of
each calibration batch and with the other arguments that the block gave it for that shape. Where it
makes something of its input before its linears read it, or is called with other arguments for
another batch of that shape, it cannot be, and nothing is returned for that group.

Shapes: B windows, T tokens of each, D hidden, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qaudit.core.linears import Around, Quantized
from qaudit.model.blocks import Block, Group
from qaudit.model.links import is_same_call
from qaudit.model.tape import Arguments, Shape, hidden_keyword

Batches = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""Yield what a group reads of each calibration batch, and which positions hold a token."""


class Surroundings:
    """How the modules around the groups of one block are called."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self._around = {
            group.name: name
            for group in block.groups
            if group.expert is None and (name := _common(group.linears))
        }
        self._latest: dict[str, Tensor] = {}  # the first argument of a module
        self._calls: dict[tuple[str, Shape], Arguments] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        names = set(self._around.values())
        handles = [
            self.block.module.get_submodule(name).register_forward_pre_hook(
                partial(self._called, name), with_kwargs=True
            )
            for name in names
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._latest.clear()

    def read(self, group: Group, x_BTC: Tensor) -> None:
        """Compare what a group reads with what the module around it was given."""
        name = self._around.get(group.name)
        if name is not None and self._latest.get(name) is not x_BTC:
            del self._around[group.name]

    def of(self, group: Group, batches: Batches) -> Around | None:
        """Return a comparison of a group's weights by the output of the module around it."""
        if group.name not in self._around:
            return None
        return partial(self._errors, self._around[group.name], batches)

    def _called(
        self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if args:
            x, called = args[0], Arguments(args[1:], kwargs)
        else:
            keyword = hidden_keyword(kwargs)
            rest = {key: value for key, value in kwargs.items() if key != keyword}
            x, called = kwargs[keyword], Arguments((), rest, keyword)
        self._latest[name] = x
        before = self._calls.setdefault((name, (x.shape[0], x.shape[1])), called)
        if not is_same_call(before, called):  # what earlier blocks left for a batch is in it
            self._around = {
                group: around for group, around in self._around.items() if around != name
            }

    def _errors(
        self, name: str, batches: Batches, candidates: Sequence[Callable[[], Mapping[str, Tensor]]]
    ) -> list[float]:
        block, module = self.block, self.block.module.get_submodule(name)
        inside = [
            linear
            for group in block.groups
            for linear in group.linears
            if linear.startswith(f"{name}.")
        ]
        original = {linear: block.weight(linear) for linear in inside}
        totals = [0.0] * len(candidates)
        for x_BTC, valid_BT in batches():
            windows, length = x_BTC.shape[:2]
            called = self._calls[name, (windows, length)]

            def run(weights: Mapping[str, Tensor]) -> Tensor:
                with block.as_if([Quantized({**original, **weights}, 0)]):
                    out_BTD = called.call(module, x_BTC)  # noqa: B023 - called at once
                return out_BTD[valid_BT].float()  # noqa: B023

            full_TD = run({})
            for k, candidate in enumerate(candidates):
                error_TD = run(candidate()).sub_(full_TD)
                totals[k] += float(error_TD.square_().sum(dtype=torch.float64))
        return totals


def _common(linears: Sequence[str]) -> str:
    """Return the module around several linears, with no name where that is the block."""
    if len(linears) == 1:
        return ""
    common: list[str] = []
    for parts in zip(*(linear.split(".")[:-1] for linear in linears), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)
