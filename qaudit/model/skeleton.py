"""A decoder model without weights: built on the meta device, filled from any source of tensors.

`transformers` knows how a family is built, how its files' keys map to its parameters, which
parameters stay in fp32, how embeddings are tied and how buffers that are not stored are made.
All of that is asked of the library here and nothing is kept per family, so that a model run
block by block has exactly the parameters `from_pretrained` would have given it.

What must hold before a single block is read: every parameter has a tensor of the right shape
in the files (or is tied to one that has), and every tensor in the files has a place in the
model, except buffers the library itself ignores because it computes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, initialization
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils.logging import disable_progress_bar

from qaudit.checkpoints.configuration import must_be_held, read_configuration, unreadable
from qaudit.errors import ModelError, SourceError
from qaudit.model.config import read_config
from qaudit.model.remote import foreign, is_remote, load_remote, model_class
from qaudit.model.routes import Weights, missing, must_be_floats, must_be_read, must_fit, some


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A model on the meta device, and where each of its tensors comes from."""

    model: Any  # a PreTrainedModel; the library's own types hide most of what is used here
    blocks_name: str
    routes: Mapping[str, str]  # parameter or stored buffer -> key in the files
    dtypes: Mapping[str, torch.dtype]
    missing: frozenset[str]  # not stored: tied to something that is

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.get_submodule(self.blocks_name))

    def names_under(self, prefix: str) -> list[str]:
        """Return the stored parameters and buffers whose names start with `prefix`."""
        return [name for name in self.routes if name.startswith(prefix)]

    def front_and_head(self) -> list[str]:
        """Return everything stored that is not in a block."""
        return [n for n in self.routes if not n.startswith(f"{self.blocks_name}.")]

    def read(self, weights: Weights, name: str, device: torch.device) -> Tensor:
        """Read one parameter as the model wants it."""
        tensor = weights.read(self.routes[name])
        must_be_floats(self.routes[name], tensor, self.dtypes[name])
        if device.type == "cuda":  # pinned, so that the copy can overlap with computing
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True).to(self.dtypes[name])


def build_skeleton(
    folder: Path, weights: Weights, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> Skeleton:
    """Build the model that `folder` describes without memory, and route the weights to it."""
    config = read_config(folder, trust_remote_code=trust_remote_code)
    must_be_held(config.to_dict(), len(weights.names()), f"`{folder}`")
    model = _build_on_meta(config, folder, dtype)
    blocks_name = find_blocks(model, folder)
    parameters = dict(model.state_dict())
    routes = _route(model, weights, parameters, folder)
    must_fit(routes, weights, parameters, folder)
    absent = missing(model.all_tied_weights_keys, routes, parameters, folder, blocks_name)
    dtypes = _dtypes(model, parameters, dtype)
    return Skeleton(model, blocks_name, routes, dtypes, absent)


def _build_on_meta(config: PreTrainedConfig, folder: Path, dtype: torch.dtype) -> Any:
    with (
        unreadable(_unbuilt(folder), "only decoder language models can be audited", ModelError),
        torch.device("meta"),
        initialization.no_init_weights(),
    ):
        if is_remote(folder):  # there is a config, so it may be run
            with foreign(folder, "to be built without memory"):
                model = model_class(folder)._from_config(config, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    model.eval()
    model.requires_grad_(False)
    return model


def _unbuilt(folder: Path) -> str:
    return f"`{folder / 'config.json'}` cannot be built as a causal language model"


def find_blocks(model: nn.Module, folder: Path) -> str:
    """Return the name of the outermost list of modules that holds most parameters."""
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in sizes)
        if isinstance(module, nn.ModuleList) and len(module) and not inside:
            sizes[name] = sum(p.numel() for p in module.parameters())
    if not sizes or not max(sizes.values()):
        raise ModelError(
            f"the model in `{folder}` has no list of blocks",
            hint="only models made of a list of transformer blocks can be streamed",
        )
    return max(sizes, key=lambda name: sizes[name])


def _route(
    model: Any, weights: Weights, parameters: Mapping[str, Tensor], folder: Path
) -> dict[str, str]:
    """Give every key in the files its place in the model, as `from_pretrained` would."""
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    routes: dict[str, str] = {}
    unread: list[str] = []
    prefix = model.base_model_prefix
    for key in weights.names():
        target, converted = rename_source_key(key, renamings, converters, prefix, dict(parameters))
        if target not in parameters and key in parameters:
            target, converted = key, None
        if converted is not None:
            raise ModelError(
                f"tensor `{key}` in `{folder}` must be joined with others to become a parameter",
                hint="mixture-of-experts models with fused experts cannot be audited yet",
            )
        if target not in parameters:
            unread.append(key)
        elif target in routes:
            raise SourceError(
                f"tensors `{routes[target]}` and `{key}` in `{folder}` are both `{target}`",
                hint="keep one of them",
            )
        else:
            routes[target] = key
    ignored = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]
    must_be_read(unread, ignored, folder)
    return routes


def _dtypes(
    model: Any, parameters: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """Return each parameter's dtype: what the model was built with, fp32 where the family says."""
    plan: Mapping[str, torch.dtype] = model._get_dtype_plan(dtype)
    dtypes = {name: tensor.dtype for name, tensor in parameters.items()}
    for pattern, planned in plan.items():
        matching = re.compile(pattern.replace("*", ".*"))
        dtypes |= {name: planned for name in parameters if matching.search(name)}
    return dtypes


def load_whole(
    folder: Path, weights: Weights, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> Any:
    """Let the library load the same tensors in its own way, as a whole model on the CPU."""
    config = read_config(folder, trust_remote_code=trust_remote_code)
    if is_remote(folder):
        return load_remote(config, folder, weights, dtype)
    must_be_held(config.to_dict(), len(weights.names()), f"`{folder}`")
    if "quantization_config" in read_configuration(folder):
        raise ModelError(
            f"the weights in `{folder}` are quantized already, so they are not loaded whole",
            hint="audit the checkpoint before it was quantized: bf16, fp16 or fp32",
        )
    tensors = {name: weights.read(name) for name in weights.names()}
    disable_progress_bar()  # on stderr, terminal or not
    with unreadable(_unbuilt(folder)):
        kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
        model = kind.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype).eval()
    for name, parameter in model.state_dict().items():
        if name in tensors:
            must_be_floats(name, tensors[name], parameter.dtype)
    return model


def empty(module: nn.Module) -> None:
    """Take a module's memory away and leave its shape."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            hollow = torch.empty_like(parameter, device="meta")
            part.register_parameter(name, nn.Parameter(hollow, requires_grad=False))
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = torch.empty_like(buffer, device="meta")


def compute_buffers(model: Any, module: nn.Module, prefix: str, device: torch.device) -> None:
    """Make the buffers that are not stored, such as rotary frequencies, as the library does.

    The library's initializer also writes parameters, unless they are marked as loaded.
    """
    for name, part in module.named_modules():
        unstored = part._non_persistent_buffers_set & set(dict(part.named_buffers(recurse=False)))
        if not unstored:
            continue
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            tensor._is_hf_initialized = True
        for buffer in unstored:
            part._buffers[buffer] = torch.empty_like(part.get_buffer(buffer), device="cpu")
        with initialization.guard_torch_init_functions():
            _owner(model, prefix + name)._init_weights(part)
        for buffer in unstored:
            part._buffers[buffer] = part.get_buffer(buffer).to(device)


def _owner(model: Any, name: str) -> Any:
    """Return the innermost model around a module: it knows how to initialize it."""
    owners = [n for n, m in model.named_modules() if n and isinstance(m, PreTrainedModel)]
    around = [n for n in owners if name == n or name.startswith(f"{n}.")]
    return model.get_submodule(max(around, key=len)) if around else model


def must_be_filled(module: nn.Module, where: str) -> None:
    """Refuse a module with a parameter or buffer that nothing filled."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    if left := [name for name, tensor in tensors if tensor.is_meta]:
        raise ModelError(
            f"{where} has no values for {some(left)}", hint="please report this model family"
        )


def fill(skeleton: Skeleton, module: nn.Module, prefix: str, tensors: Mapping[str, Tensor]) -> None:
    """Give a module of the skeleton its weights, and the buffers that go with them."""
    device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
    compute_buffers(skeleton.model, module, prefix, device)
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    module.load_state_dict(own, strict=False, assign=True)
    module.requires_grad_(False)
