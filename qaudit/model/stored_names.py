"""The names that parameters have in files, and those that linears of experts have in an export.

A release stores the experts of a layer one by one, or as one tensor. Files of quantized weights
have each linear of an expert under a name of its own; where the release has no such names, they
are those that `transformers` would join, by its own conversions or by those in `unfusing`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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


def stored_name(skeleton: Skeleton, block: int, name: str) -> str:
    """Return the key of a block's parameter or of a linear of an expert; nothing if it has none."""
    parameter = f"{skeleton.blocks_name}.{block}.{name}"
    if parameter in skeleton.routes:
        return "" if parameter in skeleton.joined else skeleton.routes[parameter]
    match = _OF_EXPERT.fullmatch(parameter)
    if match is None:
        return ""
    experts, index, role = match[1], int(match[2]), match[3]
    fused = f"{experts}.{role}_proj"
    if fused not in skeleton.joined and role != "down":
        fused = f"{experts}.gate_up_proj"
    joined = skeleton.joined.get(fused)
    if joined is None:
        return ""
    # The stored tensor that is an expert's part of a joined parameter, if one is.
    origins = joined.origins(fused)
    if origins.dim() != 3 or index >= len(origins):
        return ""
    parts = [origins[index]]
    if fused.endswith("gate_up_proj"):  # transposed in some models
        parts = [origins[index].chunk(2, dim)[role == "up"] for dim in (0, 1)]
    places = [set(part.flatten().tolist()) for part in parts]
    return next((joined.stored[int(place.pop())] for place in places if len(place) == 1), "")


class Unfused:
    """Weights with a tensor for each linear of an expert, where files have one for all experts."""

    def __init__(self, skeleton: Skeleton, weights: Weights) -> None:
        self.skeleton, self._weights = skeleton, weights
        # By name of a linear of one expert: the key and the parameter of the tensor of all
        # experts, the expert, `gate_proj`, `up_proj` or `down_proj`, and its shape.
        self._parts: dict[str, tuple[str, str, int, str, tuple[int, ...]]] = {}
        self._names: dict[str, str] = {}  # parameter of a linear -> its name
        for parameter, tensor in skeleton.model.named_parameters():
            key, joined = skeleton.routes.get(parameter), skeleton.joined.get(parameter)
            is_fused = parameter.endswith(("gate_up_proj", "up_proj", "down_proj"))
            is_fused &= tensor.dim() == 3 and (joined is None or len(joined.stored) == 1)
            if key and (is_fused or parameter.endswith(_IN_ROWS)):
                self._split(parameter, key)

    def names(self) -> Sequence[str]:
        fused = {key for key, *_ in self._parts.values()}
        return [*(name for name in self._weights.names() if name not in fused), *self._parts]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._parts[name][-1] if name in self._parts else self._weights.shape(name)

    def read(self, name: str) -> Tensor:
        if name not in self._parts:
            return self._weights.read(name)
        key, parameter, index, linear, _ = self._parts[name]
        experts, _, stored = parameter.rpartition(".")
        source = self.skeleton.model.get_submodule(experts)
        return matrices_of(source, {stored: self._weights.read(key)}, index)[linear]

    def stored_name(self, block: int, parameter: str) -> str:
        """Return the name of a parameter of a block."""
        key = self._names.get(f"{self.skeleton.blocks_name}.{block}.{parameter}")
        return key or stored_name(self.skeleton, block, parameter)

    def _split(self, parameter: str, key: str) -> None:
        model = self.skeleton.model
        experts, _, stored = parameter.rpartition(".")
        source: Any = model.get_submodule(experts)
        patterns: list[str] = []  # names of one expert's linears, with a `*` for its number
        # One stored tensor that the library turns (Qwen3-VL-MoE) is read in another order than
        # ours; DBRX has experts one below another.
        refused = parameter in self.skeleton.joined or parameter.endswith(_IN_ROWS)
        for converter in () if refused else converters_of(model):
            target = converter._original_target_patterns[0].lstrip(".")
            sources = [source.lstrip(".") for source in converter._original_source_patterns]
            if parameter.endswith(target) and key.endswith(target) and "*" in sources[0]:
                patterns = patterns or [f"{key.removesuffix(target)}{name}" for name in sources]
        if not patterns:
            raise ModelError(
                f"`{key}` holds all experts of a layer, and no runtime has names for the quantized "
                f"linears of one expert of a `{model.config.model_type}`",
                hint="the scan's numbers stand; no file of this model's experts can be written",
            )
        for index in range(len(source._parameters[stored])):
            shapes = matrices_of(source, {stored: source._parameters[stored]}, index)
            for (linear, weight), pattern in zip(shapes.items(), patterns, strict=True):
                name = pattern.replace("*", str(index))
                self._parts[name] = key, parameter, index, linear, tuple(weight.shape)
                self._names[f"{experts}.{index}.{linear}.weight"] = name
