"""The names that parameters have in files, and those that linears of experts have in an export.

A release stores the experts of a layer one by one, or as one tensor. Files of quantized weights
have each linear of an expert under a name of its own; where the release has no such names, they
are those that `transformers` would join, by its own conversions or by those in `unfusing`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qaudit.errors import ModelError
from qaudit.model.experts import matrices_of
from qaudit.model.routes import Weights, converters_of
from qaudit.model.skeleton import Skeleton, build_skeleton

_OF_EXPERT = re.compile(r"(.*)\.(\d+)\.(gate|up|down)_proj\.weight")

_IN_ROWS = (".experts.mlp.w1", ".experts.mlp.v1", ".experts.mlp.w2")  # of DBRX, one below another

Names = Callable[[int, str], str]
"""Return the stored name of a parameter of a block, "" where it has none."""


_LAST: dict[object, Skeleton] = {}


def skeleton_of_names(folder: Path, weights: Weights) -> Skeleton:
    """Return a skeleton for the names in it: the last one, where checkpoints of a series agree."""
    shapes = tuple((name, tuple(weights.shape(name))) for name in weights.names())
    alike = ((folder / "config.json").read_bytes(), shapes)
    skeleton = _LAST.get(alike)
    if skeleton is None:
        skeleton = build_skeleton(folder, weights, torch.float32)
        _LAST.clear()
        _LAST[alike] = skeleton
    return skeleton


def names_of(skeleton: Skeleton) -> Names:
    """Return a function from a parameter of a block to its stored name."""
    return lambda block, name: stored_name(skeleton, f"{skeleton.blocks_name}.{block}.{name}")


def stored_name(skeleton: Skeleton, parameter: str) -> str:
    """Return the key of a parameter, or of a linear of an expert; nothing where it has none."""
    if parameter in skeleton.routes:
        return "" if parameter in skeleton.joined else skeleton.routes[parameter]
    match = _OF_EXPERT.fullmatch(parameter)
    if match is None:
        return ""
    experts, index, role = match[1], int(match[2]), match[3]
    for fused in (f"{experts}.{role}_proj", f"{experts}.gate_up_proj"):
        if fused in skeleton.joined and (fused.endswith(f".{role}_proj") or role != "down"):
            return _key_of_part(skeleton, fused, index, role)
    return ""


def _key_of_part(skeleton: Skeleton, fused: str, index: int, role: str) -> str:
    """Return the stored tensor that is an expert's part of a joined parameter, if one is."""
    joined = skeleton.joined[fused]
    origins = joined.origins(fused)
    if origins.dim() != 3 or index >= len(origins):
        return ""
    parts = [origins[index]]
    if fused.endswith("gate_up_proj"):  # transposed in some models
        parts = [origins[index].chunk(2, dim)[role == "up"] for dim in (0, 1)]
    for part in parts:
        places = set(part.flatten().tolist())
        if len(places) == 1:
            return joined.stored[int(places.pop())]
    return ""


@dataclass(frozen=True)
class _Part:
    """One linear of one expert in a tensor of all experts."""

    key: str  # of the tensor of all experts
    parameter: str
    index: int
    linear: str  # `gate_proj`, `up_proj` or `down_proj`
    shape: tuple[int, ...]


@dataclass(eq=False)
class Unfused:
    """Weights with a tensor for each linear of an expert, where files have one for all experts."""

    skeleton: Skeleton
    weights: Weights
    _parts: dict[str, _Part] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)  # parameter of a linear -> its name

    def __post_init__(self) -> None:
        for parameter, tensor in self.skeleton.model.named_parameters():
            key = self.skeleton.routes.get(parameter)
            ends = parameter.endswith(("gate_up_proj", "up_proj", "down_proj"))
            if key and parameter.endswith(_IN_ROWS):
                raise _without_names(self.skeleton.model, key)
            joined = self.skeleton.joined.get(parameter)
            if key and ends and tensor.dim() == 3 and (joined is None or len(joined.stored) == 1):
                self._split(parameter, key)

    def names(self) -> Sequence[str]:
        fused = {part.key for part in self._parts.values()}
        return [*(name for name in self.weights.names() if name not in fused), *self._parts]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._parts[name].shape if name in self._parts else self.weights.shape(name)

    def read(self, name: str) -> Tensor:
        if name not in self._parts:
            return self.weights.read(name)
        part = self._parts[name]
        experts, _, stored = part.parameter.rpartition(".")
        source = self.skeleton.model.get_submodule(experts)
        return matrices_of(source, {stored: self.weights.read(part.key)}, part.index)[part.linear]

    def stored_name(self, block: int, parameter: str) -> str:
        """Return the name of a parameter of a block."""
        name = f"{self.skeleton.blocks_name}.{block}.{parameter}"
        return self._names.get(name) or stored_name(self.skeleton, name)

    def _split(self, parameter: str, key: str) -> None:
        experts, _, stored = parameter.rpartition(".")
        source: Any = self.skeleton.model.get_submodule(experts)
        is_turned = parameter in self.skeleton.joined
        patterns = _names_of_parts(self.skeleton.model, parameter, key, is_turned=is_turned)
        for index in range(len(source._parameters[stored])):
            shapes = matrices_of(source, {stored: source._parameters[stored]}, index)
            for (linear, weight), pattern in zip(shapes.items(), patterns, strict=True):
                name = pattern.replace("*", str(index))
                self._parts[name] = _Part(key, parameter, index, linear, tuple(weight.shape))
                self._names[f"{experts}.{index}.{linear}.weight"] = name


def _names_of_parts(model: Any, parameter: str, key: str, *, is_turned: bool) -> list[str]:
    """Return the names of one expert's linears, with a `*` for its number."""
    # One stored tensor that the library turns (Qwen3-VL-MoE) is read in another order than ours.
    for converter in () if is_turned else converters_of(model):
        target = converter._original_target_patterns[0].lstrip(".")
        sources = [source.lstrip(".") for source in converter._original_source_patterns]
        if parameter.endswith(target) and key.endswith(target) and "*" in sources[0]:
            return [f"{key.removesuffix(target)}{source}" for source in sources]
    raise _without_names(model, key)


def _without_names(model: Any, key: str) -> ModelError:
    return ModelError(
        f"`{key}` holds all experts of a layer, and no runtime has names for the quantized linears "
        f"of one expert of a `{model.config.model_type}`",
        hint="the scan's numbers stand; no file of this model's experts can be written",
    )
