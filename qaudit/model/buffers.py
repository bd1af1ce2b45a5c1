"""Buffers that no file stores, such as rotary frequencies, made as the library makes them.

The library's initializers are run, the innermost model's first, on buffers that hold what no
initializer writes: NaN, or 77 where they are whole numbers. A buffer that still holds it behind the
outermost model's initializer was computed by none of them, and the model is refused: memory
that is not initialized would be part of the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization

from qaudit.errors import ModelError
from qaudit.model.routes import some

_UNWRITTEN = 77  # no mask, index or count is all of this


def compute_buffers(
    model: Any,
    module: nn.Module,
    prefix: str,
    device: torch.device,
    idle: frozenset[str],
    computed: Mapping[str, Tensor],
) -> None:
    """Make the buffers of a module that are not stored, those that are `computed` left out.

    The library's initializers also write parameters, unless they are marked as loaded.
    """
    waiting: dict[str, tuple[nn.Module, str]] = {}
    for name, part in module.named_modules():
        unstored = part._non_persistent_buffers_set & set(dict(part.named_buffers(recurse=False)))
        if not unstored or prefix + name in idle:
            continue
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            tensor._is_hf_initialized = True
        for buffer in unstored:
            full_name = ".".join(filter(None, [prefix.rstrip("."), name, buffer]))
            if full_name in computed:
                part._buffers[buffer] = computed[full_name].to(device)
                continue
            part._buffers[buffer] = _unwritten(part.get_buffer(buffer))
            waiting[full_name] = part, buffer
        with initialization.guard_torch_init_functions():
            models_around(model, prefix + name)[0]._init_weights(part)
    _compute_by_outer_models(model, module, waiting)
    for part, buffer in waiting.values():
        part._buffers[buffer] = part.get_buffer(buffer).to(device)


def _compute_by_outer_models(
    model: Any, module: nn.Module, buffers: dict[str, tuple[nn.Module, str]]
) -> None:
    """Let the models around write what the initializer of a module left as it was."""
    waiting = [n for n, (part, b) in buffers.items() if _is_unwritten(part.get_buffer(b))]
    if not waiting:
        return
    written = {id(buffers[name][0].get_buffer(buffers[name][1])) for name in waiting}
    for tensor in (*model.parameters(), *model.buffers(), *module.parameters(), *module.buffers()):
        if id(tensor) not in written:
            tensor._is_hf_initialized = True
    for outer in models_around(model, waiting[0]):
        with initialization.guard_torch_init_functions():
            outer._init_weights(outer)
    waiting = [n for n in waiting if _is_unwritten(buffers[n][0].get_buffer(buffers[n][1]))]
    if waiting:
        raise ModelError(
            f"nothing computes {some(waiting)} of a `{model.config.model_type}` where its blocks "
            "are loaded one at a time",
            hint="only models that run block by block can be audited",
        )


def _unwritten(like: Tensor) -> Tensor:
    value: float | int = _UNWRITTEN
    if like.is_floating_point():
        value = float("nan")
    return torch.full(tuple(like.shape), value, dtype=like.dtype, device="cpu")


def _is_unwritten(buffer: Tensor) -> bool:
    if buffer.is_floating_point():
        return bool(buffer.isnan().any())
    return buffer.dtype != torch.bool and buffer.numel() > 0 and bool((buffer == _UNWRITTEN).all())


def models_around(model: Any, name: str) -> list[Any]:
    """Return the models around a module, which know how to initialize it, the innermost first."""
    inner = [n for n, m in model.named_modules() if n and isinstance(m, PreTrainedModel)]
    around = [n for n in inner if name == n or name.startswith(f"{n}.")]
    return [*map(model.get_submodule, sorted(around, key=len, reverse=True)), model]
