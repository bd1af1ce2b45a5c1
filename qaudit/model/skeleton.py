"""A decoder model without weights: built on the meta device, filled from any source of tensors.

`transformers` knows how a family is built, how its files' keys map to its parameters, which
parameters stay in fp32, how embeddings are tied and how buffers that are not stored are made.
All of that is asked of the library here and nothing is kept per family, so that a model run
block by block has exactly the parameters `from_pretrained` would have given it.

What must hold before a single block is read: every parameter has a tensor of the right shape
in the files (or is tied to one that has), and every tensor in the files has a place in the
model, except buffers the library itself ignores because it computes them.

Buffers that no file stores, such as rotary frequencies, made as the library makes them.

The library's initializers are run, the innermost model's first, on buffers that hold what no
initializer writes: NaN, or 77 where they are whole numbers. A buffer that still holds it behind the
outermost model's initializer was computed by none of them, and the model is refused: memory
that is not initialized would be part of the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, initialization
from transformers.utils.logging import disable_progress_bar

from qaudit.checkpoints.configuration import must_be_held, unreadable
from qaudit.errors import ModelError
from qaudit.model.config import (
    build_remote,
    class_of,
    is_remote,
    is_wrapper,
    load_remote,
    read_config,
)
from qaudit.model.device import upload
from qaudit.model.experts import Experts, unfuse
from qaudit.model.proven import left_as_gates, pad_until
from qaudit.model.routes import Joined, Weights, missing, must_be_floats, route, some, unread_keys
from qaudit.model.structure import GATE, Structure, is_linear, must_be_linear

_DECODERS = "only decoder language models can be audited"
_UNWRITTEN = 77  # no mask, index or count is all of this


def fill(skeleton: Skeleton, module: nn.Module, prefix: str, tensors: Mapping[str, Tensor]) -> None:
    """Give a module of the skeleton its weights, and the buffers that go with them."""
    device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
    _compute_buffers(skeleton, module, prefix, device)
    tensors_of_text = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    module.load_state_dict(tensors_of_text, strict=False, assign=True)
    module.requires_grad_(False)


def _compute_buffers(
    skeleton: Skeleton, module: nn.Module, prefix: str, device: torch.device
) -> None:
    """Make the buffers of a module that are not stored, those that are `computed` left out.

    The library's initializers also write parameters, unless they are marked as loaded.
    """
    model, computed = skeleton.model, skeleton.computed
    waiting: dict[str, tuple[nn.Module, str]] = {}
    for name, part in module.named_modules():
        unstored = part._non_persistent_buffers_set & set(dict(part.named_buffers(recurse=False)))
        if not unstored or prefix + name in skeleton.idle:
            continue
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            tensor._is_hf_initialized = True
        for buffer in unstored:
            full_name = ".".join(filter(None, [prefix.rstrip("."), name, buffer]))
            if full_name in computed:
                part._buffers[buffer] = computed[full_name].to(device)
                continue
            like = part.get_buffer(buffer)
            value = float("nan") if like.is_floating_point() else _UNWRITTEN
            part._buffers[buffer] = torch.full(like.shape, value, dtype=like.dtype, device="cpu")
            waiting[full_name] = part, buffer
        with initialization.guard_torch_init_functions():
            models_around(model, prefix + name)[0]._init_weights(part)

    def unwritten() -> dict[str, Tensor]:
        buffers = {name: part.get_buffer(buffer) for name, (part, buffer) in waiting.items()}
        return {
            name: b
            for name, b in buffers.items()
            if (b.isnan().any() if b.is_floating_point() else (b == _UNWRITTEN).all())
            and b.dtype != torch.bool
            and b.numel()
        }

    if lost := unwritten():  # the models around write what an initializer left as it was
        outside = (*model.parameters(), *model.buffers(), *module.parameters(), *module.buffers())
        for tensor in outside:
            if not any(tensor is buffer for buffer in lost.values()):
                tensor._is_hf_initialized = True
        for outer in models_around(model, next(iter(lost))):
            with initialization.guard_torch_init_functions():
                outer._init_weights(outer)
    if lost and (lost := unwritten()):
        raise ModelError(
            f"nothing computes {some([*lost])} of a `{model.config.model_type}` where its blocks "
            "are loaded one at a time",
            hint="only models that run block by block can be audited",
        )
    for part, buffer in waiting.values():
        part._buffers[buffer] = part.get_buffer(buffer).to(device)


def models_around(model: Any, name: str) -> list[Any]:
    """Return the models around a module, which know how to initialize it, the innermost first."""
    inner = {n: m for n, m in model.named_modules() if n and isinstance(m, PreTrainedModel)}
    around = [n for n in inner if f"{name}.".startswith(f"{n}.")]
    return [*(inner[n] for n in sorted(around, key=len, reverse=True)), model]


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A model on the meta device, and where each of its tensors comes from."""

    model: Any  # a PreTrainedModel; the library's own types hide most of what is used here
    blocks_name: str
    routes: Mapping[str, str]  # parameter or stored buffer -> key in the files
    dtypes: Mapping[str, torch.dtype]
    missing: frozenset[str]  # not stored: tied to something that is
    joined: Mapping[str, Joined]  # parameters that are made of several tensors
    idle: frozenset[str]  # parts of a wrapper that text never enters: never read
    unused: tuple[str, ...]  # keys of further lists of blocks, which are not read
    fixed_until: int  # tokens of a window whose positions do not depend on its length
    computed: Mapping[str, Tensor] = field(default_factory=dict)  # buffers, by code of a repository

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on stored tensors that are not read."""
        idle = [key for name, key in self.routes.items() if name in self.idle]
        notes = [(idle, "text never enters them"), (self.unused, "they predict further tokens")]
        return tuple(f"not read: {some(keys)}; {reason}" for keys, reason in notes if keys)

    def unread(self, names: Sequence[str]) -> frozenset[str]:
        """Return the stored tensors that nothing reads."""
        return unread_keys(self.model, names, self.idle)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.get_submodule(self.blocks_name))

    def read(
        self, weights: Weights, names: Sequence[str], device: torch.device, *, ahead: bool = False
    ) -> dict[str, Tensor]:
        """Read parameters as the model wants them; `ahead` while the device computes."""
        tensors: dict[str, Tensor] = {}

        def stored(key: str, dtype: torch.dtype) -> Tensor:
            tensor = weights.read(key)
            must_be_floats(key, tensor, dtype)
            return tensor

        for name in names:
            if name in tensors:
                continue
            dtype = self.dtypes[name]
            made = (
                self.joined[name].make(lambda key: stored(key, dtype).to(dtype))  # noqa: B023
                if name in self.joined
                else {name: stored(self.routes[name], dtype)}
            )
            for part, tensor in made.items():
                if part in names:
                    placed = upload(tensor, device) if ahead else tensor.to(device)
                    tensors[part] = placed.to(self.dtypes[part])
        return tensors


NO_DECODERS = {
    "cpmant": "reads what is before an answer in both directions",
    "hrm_text": "runs each of its blocks several times for a token",
    "paligemma": "reads what is before an answer in both directions",
    "prophetnet": "predicts several tokens ahead, each in a stream of its own",
    "xlm": "reads what is behind a token, unless `causal` is true in its configuration",
    "xlnet": "reads what is behind a token, and predicts in another order",
}
_ENCODER = "reads what is behind a token, unless `is_decoder` is true in its configuration"
_BOTH_WAYS = "use_bidirectional_attention"
_CROSS_ATTENTION = ("encoder_attn", "crossattention", "cross_attn")


def build_skeleton(
    folder: Path, weights: Weights, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> Skeleton:
    """Build the model that `folder` describes without memory, and route the weights to it."""
    config = read_config(folder, trust_remote_code=trust_remote_code)
    must_be_held(config.to_dict(), len(weights.names()), f"`{folder}`")
    must_be_causal_type(config, folder)
    model = _build_on_meta(config, folder, dtype)
    blocks_name = find_blocks(model, folder)
    for name, module in model.get_submodule(blocks_name).named_modules():
        if name.rpartition(".")[2] in _CROSS_ATTENTION and any(True for _ in module.parameters()):
            # Text alone never runs that part of its blocks.
            raise ModelError(
                f"blocks of the model in `{folder}` read an encoder (`{name.partition('.')[2]}`)",
                hint="only models that are a decoder alone have a next-token loss to audit",
            )
    parameters = dict(model.state_dict())
    idle = idle_parts(model)
    routes, joined, unused = route(model, weights, parameters, folder, idle)
    needed = {name: tensor for name, tensor in parameters.items() if name not in idle}
    absent = missing(model.all_tied_weights_keys, routes, needed, folder, blocks_name)
    # What the model was built with, fp32 where the family says.
    dtypes = {name: tensor.dtype for name, tensor in parameters.items()}
    for pattern, planned in model._get_dtype_plan(dtype).items():
        matching = re.compile(pattern.replace("*", ".*"))
        dtypes |= {name: planned for name in parameters if matching.search(name)}
    return Skeleton(
        model, blocks_name, routes, dtypes, absent, joined, idle, unused, pad_until([folder])
    )


def must_be_causal_type(config: PreTrainedConfig, folder: Path) -> None:
    """Refuse types that are known to be no plain decoders, before their weights are downloaded."""
    name = str(config.model_type)
    reason = None if getattr(config, "causal", False) else NO_DECODERS.get(name)
    if getattr(config, "is_decoder", True) is False and not name.startswith("gpt_neox"):
        reason = reason or _ENCODER  # GPT-NeoX has the key, and reads from the left all the same
    if getattr(config.get_text_config(), _BOTH_WAYS, None) in (True, "all"):  # "vision": of images
        reason = reason or f"reads what is behind a token, by its `{_BOTH_WAYS}`"
    if reason is not None:
        raise ModelError(
            f"the model in `{folder}` is a `{config.model_type}`, which {reason}",
            hint="only decoder language models whose blocks run once can be audited",
        )


@dataclass(frozen=True)
class Shapes:
    """Tensors of which only the shapes are known."""

    shapes: Mapping[str, tuple[int, ...]]

    def names(self) -> Sequence[str]:
        return list(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def read(self, name: str) -> Tensor:
        raise AssertionError(f"`{name}` was read before it was downloaded")


def unread_in(folder: Path, names: Sequence[str]) -> frozenset[str]:
    """Return the stored tensors of a folder's model that nothing reads, by their names."""
    model = _build_on_meta(read_config(folder), folder, torch.float32)
    return unread_keys(model, names, idle_parts(model))


def must_open(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse by its configuration and the shapes of its tensors what cannot be audited."""
    for index, block in enumerate(build_skeleton(folder, Shapes(shapes), torch.float32).blocks):
        unfuse(block)
        linears = tuple(name for name, module in block.named_modules() if is_linear(module))
        experts = [name for name, module in block.named_modules() if isinstance(module, Experts)]
        matrices = {name.removesuffix(".weight") for name, _ in block.named_parameters()}
        gates = dict.fromkeys(left_as_gates(matrices, experts), GATE)
        must_be_linear(block, f"block {index}", Structure((linears,), left=gates))


def _build_on_meta(config: PreTrainedConfig, folder: Path, dtype: torch.dtype) -> Any:
    with (
        unreadable(_UNBUILT.format(folder), _DECODERS, ModelError),
        torch.device("meta"),
        initialization.no_init_weights(),
    ):
        if is_remote(folder):  # there is a config, so it may be run
            model = build_remote(config, folder, dtype, "to be built without memory")
        else:
            model = class_of(config)._from_config(config, dtype=dtype)
    model.eval()
    model.requires_grad_(False)
    forget_lengths(model)
    return model


def forget_lengths(model: nn.Module) -> None:
    """Rotate each text by its own length: `dynamic` frequencies grow with the longest one seen."""

    def forget(rotary: Any, *_: object) -> None:
        for name in [name for name in vars(rotary) if name.endswith("max_seq_len_cached")]:
            setattr(rotary, name, rotary.original_max_seq_len)
            of_kind = name.removesuffix("max_seq_len_cached")
            if (original := rotary._buffers.get(f"{of_kind}original_inv_freq")) is not None:
                rotary._buffers[f"{of_kind}inv_freq"] = original.clone()

    for module in model.modules():
        if hasattr(module, "max_seq_len_cached"):
            module.register_forward_pre_hook(forget)


_UNBUILT = "`{}/config.json` cannot be built as a causal language model"


def decoder_name(model: Any) -> str:
    """Return the name of a wrapper's text decoder, with a dot; else nothing."""
    config = getattr(model, "config", None)
    if config is None or not is_wrapper(config):
        return ""
    decoder = model.get_decoder()
    return next((f"{n}." for n, m in model.named_modules() if n and m is decoder), "")


def idle_parts(model: Any) -> frozenset[str]:
    """Return the names of a wrapper's modules and tensors that text never enters."""
    text = decoder_name(model)
    if not text:
        return frozenset()
    head = model.get_output_embeddings()
    used = [text, *(f"{n}." for n, m in model.named_modules() if n and m is head)]
    parts = (*model.named_parameters(), *model.named_buffers(), *model.named_modules())
    return frozenset(
        name
        for name, _ in parts
        if name and not any(name.startswith(u) or u.startswith(f"{name}.") for u in used)
    )


def find_blocks(model: nn.Module, folder: Path) -> str:
    """Return the name of the outermost list of modules that holds most parameters."""
    sizes: dict[str, int] = {}
    text = decoder_name(model)
    for name, module in model.named_modules():
        if not name.startswith(text):
            continue  # a tower beside the text's
        inside = any(name.startswith(f"{outer}.") for outer in sizes)
        if isinstance(module, nn.ModuleList) and len(module) and not inside:
            sizes[name] = sum(p.numel() for p in module.parameters())
    if not sizes or not max(sizes.values()):
        raise ModelError(
            f"the model in `{folder}` has no list of blocks",
            hint="only models made of a list of transformer blocks can be streamed",
        )
    return max(sizes, key=lambda name: sizes[name])


def load_whole(
    folder: Path, weights: Weights, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> Any:
    """Let the library load the same tensors in its own way, as a whole model on the CPU."""
    config = read_config(folder, trust_remote_code=trust_remote_code)
    if is_remote(folder):
        return load_remote(config, folder, weights, dtype)
    must_be_held(config.to_dict(), len(weights.names()), f"`{folder}`")
    idle: set[str] = set()
    if is_wrapper(config):
        skeleton = build_skeleton(folder, weights, dtype)
        idle = {key for name, key in skeleton.routes.items() if name in skeleton.idle}
    tensors = {name: weights.read(name) for name in weights.names() if name not in idle}
    disable_progress_bar()  # on stderr, terminal or not
    with unreadable(_UNBUILT.format(folder)):
        kind = class_of(config)
        model = kind.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype).eval()
    forget_lengths(model)
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


def must_be_filled(module: nn.Module, where: str, idle: frozenset[str] = frozenset()) -> None:
    """Refuse a module with a parameter or buffer that nothing filled."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    if unfilled := [name for name, tensor in tensors if tensor.is_meta and name not in idle]:
        raise ModelError(
            f"{where} has no values for {some(unfilled)}", hint="please report this model family"
        )
