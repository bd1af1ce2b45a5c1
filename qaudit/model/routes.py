"""Between the keys in the files and the parameters of a model nothing may be left over.

Every parameter has a tensor of its shape, or is tied to one that has; every tensor has a
parameter, except buffers that models compute for themselves and old checkpoints still store.

A soup's tensors, merged one at a time as they are read.

The members are read side by side and never held as models: a soup costs the memory of one
tensor per member. A checkpoint is a soup of one and is read as it is.

Which tensors of the files each parameter is made of, by `transformers`' own conversions.

A parameter is one stored tensor under another name, or is made of several: the experts of a layer
are stored one by one and held in one tensor. The library's `WeightConverter` makes it here, as in
`from_pretrained`, of the tensors of that parameter alone. Conversions only move numbers, so that
tensors of a soup can be merged before they are joined.

Names of experts one by one in files, for releases that store all experts of a layer together.

`transformers` reads experts one by one for most types (`conversion_mapping.py`), and exports use
the names it reads. Here are types whose own release is fused and for which runtimes name the
linears of each expert all the same:

llama4    `feed_forward.experts.3.gate_proj`: `SequentialLlama4TextExperts` of transformers 5.23
          (quantizers/base.py), which it puts in place for compressed-tensors; `Llama4LinearExperts`
          of llm-compressor (modeling/moe/llama4.py); Defuser 0.0.28, which GPTQModel 7.6 runs.

Types that are not here are refused. Of gpt-oss, gate and up alternate by row: Defuser 0.0.28 calls
the first half of these rows `gate_proj`, llm-compressor since its pull request 3100 every second
one, vLLM's loader (models/gpt_oss.py, September 2026) has names for neither, nor has transformers.
Experts of Granite and Qwen3-VL have names in llm-compressor and Defuser; a runtime that loads them
quantized was not found.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from qaudit.checkpoints.configuration import unreadable
from qaudit.checkpoints.safetensors import headers
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


def _is_ignored(key: str, model: Any) -> bool:
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return any(re.search(pattern, key) for pattern in patterns)


def must_be_read(unread: Iterable[str], model: Any, folder: Path) -> None:
    """Refuse tensors no parameter reads, but for buffers that models compute."""
    unread = (key for key in unread if not _COMPUTED.search(key))
    if remaining := [key for key in unread if not _is_ignored(key, model)]:
        raise SourceError(
            f"the model of `{folder / 'config.json'}` has no place for {some(remaining)}",
            hint="the config and the weights do not belong together",
        )


def must_be_floats(key: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Refuse whole numbers where the model has a parameter: relabelled bytes load as huge ones."""
    stored = f"tensor `{key}` is stored as `{str(tensor.dtype).removeprefix('torch.')}`"
    if dtype.is_floating_point and not tensor.is_floating_point():
        raise SourceError(
            f"{stored} and is a weight, which takes floating-point numbers",
            hint="its header is damaged, or it was quantized: audit it as bf16, fp16 or fp32",
        )
    if dtype.is_floating_point and tensor.itemsize == 1:
        raise SourceError(
            f"{stored} without the scale that 8-bit floats have",
            hint="a quantized checkpoint has a `quantization_config`: download it whole again",
        )


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
    must_be_stored(sorted(absent - excused), folder)
    return frozenset(absent)


def must_be_stored(missing: Sequence[str], folder: Path) -> None:
    """Refuse parameters that have no tensor."""
    if missing:
        raise SourceError(
            f"no tensor for {some(missing)} in `{folder}`",
            hint="the checkpoint is incomplete, or its config belongs to another model",
        )


def some(names: Sequence[str]) -> str:
    """List the first few names of many."""
    return first_of(sorted(names), _LISTED)


class MergedWeights:
    """The weights of a soup, as one source of tensors."""

    def __init__(
        self, labels: Sequence[str], members: Sequence[Weights], merge: Callable[..., Tensor]
    ) -> None:
        """Refuse members that differ; `merge` makes one tensor of those of all members."""
        self._labels, self._members, self._merge = list(labels), list(members), merge
        for label, member in zip(labels[1:], members[1:], strict=True):
            must_agree(labels[0], members[0], label, member)

    def names(self) -> Sequence[str]:
        return self._members[0].names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._members[0].shape(name)

    def read(self, name: str) -> Tensor:
        tensors = [member.read(name) for member in self._members]
        if tensors[0].is_floating_point():
            return self._merge(tensors)
        for label, tensor in zip(self._labels[1:], tensors[1:], strict=True):
            if tensor.dtype != tensors[0].dtype or not torch.equal(tensor, tensors[0]):
                both = f"`{self._labels[0]}` and `{label}`"
                raise SourceError(
                    f"`{name}` holds whole numbers that differ between {both}",
                    hint="whole numbers cannot be merged: leave one of the members out",
                )
        return tensors[0]  # counts or masks have no mean


def must_agree(first: str, a: Weights, second: str, b: Weights) -> None:
    """Refuse two members whose tensors differ in name or shape, and name the first difference."""
    names = set(a.names()), set(b.names())
    for name in (*sorted(names[0] ^ names[1]), *a.names()):
        difference = ""
        if not all(name in stored for stored in names):
            has, lacks = (first, second) if name in names[0] else (second, first)
            difference = f"in `{has}` and not in `{lacks}`"
        elif a.shape(name) != b.shape(name):
            difference = f"{list(a.shape(name))} in one and {list(b.shape(name))} in the other"
        if difference:
            raise SourceError(
                f"`{first}` and `{second}` cannot be merged: `{name}` is {difference}",
                hint="a soup needs members of one architecture",
            )


_MISMATCH = "the config and the weights do not belong together"


@dataclass(frozen=True, eq=False)
class Joined:
    """Parameters that the library makes of several stored tensors, or of a part of one."""

    model: Any  # conversions look up the shapes of its parameters
    target: str  # the first parameter that is made
    converter: WeightConverter
    keys: dict[str, list[str]] = field(default_factory=dict)  # source pattern -> keys, in order
    _origins: dict[str, Tensor] = field(default_factory=dict)

    def make(self, read: Callable[[str], Tensor]) -> Mapping[str, Tensor]:
        """Return the parameters, made of what `read` returns for each key."""
        converter = copy.deepcopy(self.converter)
        for pattern, keys in self.keys.items():
            for key in keys:
                converter.add_tensor(self.target, key, pattern, cast(Any, partial(read, key)))
        made = converter.convert(self.target, model=self.model, config=self.model.config)
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}

    @property
    def stored(self) -> list[str]:
        return [key for keys in self.keys.values() for key in keys]

    def origins(self, parameter: str) -> Tensor:
        """Return a small version of a parameter that holds, for each number, whose it is.

        Every stored tensor is played by a 2 x 2 of its place in `stored`.
        """
        if not self._origins:
            places = {key: float(place) for place, key in enumerate(self.stored)}
            with suppress(RuntimeError, KeyError, IndexError, ValueError):
                self._origins.update(self.make(lambda key: torch.full((2, 2), places[key])))
        return self._origins.get(parameter, torch.empty(0))


def targets_of(
    model: Any, names: Sequence[str], parameters: Mapping[str, Tensor]
) -> Iterator[tuple[str, str, str | None]]:
    """Yield each key, the parameter it is or is part of, and by which pattern of a conversion."""
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters, shapes = converters_of(model), dict(parameters)
    for key in sorted(names, key=dot_natural_key):  # experts in order, as in the library
        target, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, shapes
        )
        if target not in parameters and key in parameters:
            target, pattern = key, None
        yield key, target, pattern


def unread_keys(model: Any, names: Sequence[str], idle: Collection[str]) -> frozenset[str]:
    """Return the stored tensors that nothing reads: of towers, and of further lists of blocks."""
    parameters = dict(model.state_dict())
    return frozenset(
        key
        for key, target, _ in targets_of(model, names, parameters)
        if target in idle or (target not in parameters and _predicts_further(key, model))
    )


def route(
    model: Any,
    weights: Weights,
    parameters: Mapping[str, Tensor],
    folder: Path,
    idle: Collection[str] = (),
) -> tuple[Mapping[str, str], Mapping[str, Joined], tuple[str, ...]]:
    """Give every key in the files its place in the model, as `from_pretrained` would.

    Of the towers of a wrapper, which are `idle`, some tensors may be missing. Return the key of
    each parameter or stored buffer, the first of several; the parameters that are made of several;
    and keys of further lists of blocks, which only predict further ahead.
    """
    converters = converters_of(model)
    by_pattern = {p: converter for converter in converters for p in converter.source_patterns}
    keys: dict[str, str] = {}
    joins: dict[str, Joined] = {}
    unread: list[str] = []
    for key, target, pattern in targets_of(model, weights.names(), parameters):
        if target not in parameters:
            unread.append(key)
        elif pattern is not None and target in idle:
            keys.setdefault(target, key)
        elif pattern is not None:
            new = Joined(model, target, copy.deepcopy(by_pattern[pattern]))
            joins.setdefault(target, new).keys.setdefault(pattern, []).append(key)
        elif target in keys:
            raise SourceError(
                f"tensors `{keys[target]}` and `{key}` in `{folder}` are both `{target}`",
                hint="keep one of them",
            )
        else:
            keys[target] = key
    for target, key in keys.items():
        needed, stored = tuple(parameters[target].shape), tuple(weights.shape(key))
        if target not in idle and needed != stored:
            file = folder
            with suppress(SourceError, KeyError):  # pickled, or merged under another name
                file = folder / headers(folder)[key].file
            raise SourceError(
                f"tensor `{key}` in `{file}` is {list(stored)} "
                f"where the config asks for {list(needed)}",
                hint=_MISMATCH,
            )
    joined: dict[str, Joined] = {}
    for part in joins.values():
        first = part.stored[0]
        refusal = f"`{first}` and others in `{folder}` cannot be joined"
        with unreadable(refusal, _MISMATCH, SourceError):  # tried on shapes alone
            made = part.make(lambda key: torch.empty(tuple(weights.shape(key)), device="meta"))
        for name, tensor in made.items():
            if name not in parameters or tensor.shape != parameters[name].shape:
                asked = list(parameters[name].shape) if name in parameters else "nothing"
                raise SourceError(
                    f"`{first}` and {len(part.stored) - 1} other tensors in `{folder}` make "
                    f"`{name}` {list(tensor.shape)} where the config asks for {asked}",
                    hint=_MISMATCH,
                )
        joined |= dict.fromkeys(made, part)
    unused = tuple(key for key in unread if _predicts_further(key, model))
    must_be_read([key for key in unread if key not in unused], model, folder)
    first_keys = {name: part.stored[0] for name, part in joined.items()}
    return keys | first_keys, joined, unused


def _predicts_further(key: str, model: Any) -> bool:
    """Return whether a tensor is of blocks that predict the tokens after the next one."""
    if re.search(r"(^|\.)(mtp|mtp_\w+|nextn\w*)\.", key) or _is_ignored(key, model):
        return bool(re.search(r"\.\d+\.|(^|\.)mtp", key))
    config = model.config.get_text_config()
    further = getattr(config, "num_nextn_predict_layers", None)
    blocks = getattr(config, "num_hidden_layers", None)
    match = re.search(r"(^|\.)layers\.(\d+)\.", key)
    return bool(further and blocks and match and int(match[2]) >= int(blocks))


_LLAMA4 = "feed_forward.experts"


def converters_of(model: Any) -> list[WeightConverter]:
    """Return the conversions that join stored tensors of a model, by the library and by us."""
    transforms = get_model_conversion_mapping(model)
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    if str(model.config.model_type) not in ("llama4", "llama4_text"):
        return converters
    return [
        *converters,
        WeightConverter(
            [f"{_LLAMA4}.*.gate_proj.weight", f"{_LLAMA4}.*.up_proj.weight"],
            f"{_LLAMA4}.gate_up_proj",
            [MergeModulelist(dim=0), Concatenate(dim=1), Transpose(1, 2)],
        ),
        WeightConverter(
            [f"{_LLAMA4}.*.down_proj.weight"],
            f"{_LLAMA4}.down_proj",
            [MergeModulelist(dim=0), Transpose(1, 2)],
        ),
    ]
