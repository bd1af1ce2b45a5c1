"""LoRA adapters: a base's tensors with what an adapter adds, merged one at a time as they are read.

The arithmetic is that of PEFT's `merge_and_unload` on a model in the base's dtype, whose adapters
are in float32: W + scale B A, rounded once to the dtype of W. `scale` is alpha / r, or alpha over
the root of r (rsLoRA), each by `rank_pattern` and `alpha_pattern`; DoRA (2402.09353) then gives
each row the norm that was learned. Modules that were trained whole (`modules_to_save`) and biases
take the place of the base's. What PEFT merges in another way is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qaudit.checkpoints.configuration import read_configuration
from qaudit.checkpoints.safetensors import ADAPTER, ADAPTER_WEIGHTS, WeightFolder, unread_tensors
from qaudit.checkpoints.stamps import own_folder
from qaudit.errors import ConfigurationError, SourceError
from qaudit.support.foreign import slow_reason
from qaudit.support.lazy import Tensor
from qaudit.types import Checkpoint
from qaudit.whole import read_table

_PREFIX = "base_model.model."
_WITH_PEFT = "merge it into its base with PEFT (`merge_and_unload`), and scan the result"
_PARTS = {
    "lora_A.weight": "A", "lora_B.weight": "B", "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude", "lora_embedding_A": "embedding_A",
    "lora_embedding_B": "embedding_B",
}  # fmt: skip
_OTHER_ARITHMETIC = (
    "layer_replication", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "velora_config",
    "monteclora_config", "alora_invocation_tokens", "trainable_token_indices", "target_parameters",
    "lora_bias", "megatron_config",
)  # fmt: skip
"""Settings of PEFT under which the merged weights are other than those computed here."""


@dataclass(frozen=True)
class AdapterSettings:
    """What `adapter_config.json` says of the arithmetic, and of the base."""

    base: str | None
    revision: str | None
    rank: int
    alpha: float
    rank_pattern: Mapping[str, float]
    alpha_pattern: Mapping[str, float]
    rank_stabilized: bool
    fan_in_fan_out: bool


def read_adapter(folder: Path) -> AdapterSettings:
    """Read `adapter_config.json`, or refuse what is not merged as PEFT merges it."""
    table = read_configuration(folder, ADAPTER)
    path = folder / ADAPTER
    if (kind := table.get("peft_type")) != "LORA":
        raise ConfigurationError(
            f"`{path}` is of type `{str(kind)[:40]}`, and adapters of type `LORA` are merged",
            hint="merge it into its base with its own library, and scan the result",
        )
    for key in filter(table.get, _OTHER_ARITHMETIC):
        raise ConfigurationError(
            f"`{path}` sets `{key}`, and such adapters are not merged here", hint=_WITH_PEFT
        )
    base, revision = (table.get(key) for key in ("base_model_name_or_path", "revision"))
    try:
        return AdapterSettings(
            str(base) if base else None,
            str(revision) if revision else None,
            int(_number(table, "r")),
            _number(table, "lora_alpha"),
            _pattern(table, "rank_pattern"),
            _pattern(table, "alpha_pattern"),
            bool(table.get("use_rslora")),
            bool(table.get("fan_in_fan_out")),
        )
    except (TypeError, ValueError, re.error) as error:
        raise ConfigurationError(
            f"`{path}` cannot be read: {error}", hint="take the file that PEFT wrote"
        ) from error


def _pattern(table: Mapping[str, Any], key: str) -> dict[str, float]:
    patterns = table.get(key) or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"`{key}` is no table")
    for pattern in patterns:
        if reason := slow_reason(pattern):
            raise ValueError(f"`{key}` has the pattern `{pattern[:60]}`: {reason}")
    return {pattern: _number(patterns, pattern) for pattern in patterns}


def _number(table: Mapping[str, Any], key: str) -> float:
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1 << 20:
        raise ValueError(f"`{key}` is {str(value)[:40]}, which is no positive number")
    return float(value)


def open_checkpoint(
    checkpoint: Checkpoint,
    *,
    allow_pickle: bool,
    folder: Callable[[Checkpoint], Path] = own_folder,
    without: Collection[str] = (),
) -> WeightFolder | AdaptedWeights:
    """Open the weights of a checkpoint, of an adapter with those of its base."""
    if checkpoint.base is None or not checkpoint.is_adapter:
        return WeightFolder(folder(checkpoint), allow_pickle=allow_pickle, without=without)
    place = folder(checkpoint.base)
    unread = unread_tensors([place], [checkpoint.base])
    base = WeightFolder(place, allow_pickle=allow_pickle, without=unread)
    return AdaptedWeights(base, folder(checkpoint), allow_pickle=allow_pickle)


def must_share_tokens(folder: Path, base: Path) -> None:
    """Refuse an adapter whose own tokenizer makes other tokens than that of its base."""
    texts = [place / "tokenizer.json" for place in (folder, base)]
    if not all(path.is_file() for path in texts):
        return
    # Trainer writes the file anew; padding and the order of keys are of no consequence.
    first, second = map(read_table, texts)
    for key in ("model", "added_tokens", "normalizer", "pre_tokenizer"):
        if first.get(key) != second.get(key):
            raise SourceError(
                f"`{texts[0]}` and `{texts[1]}` differ in `{key}`: the adapter was trained on "
                "other tokens than its base",
                hint="merge it into its base with PEFT (`merge_and_unload`), save its tokenizer "
                "beside the result, and scan that",
            )


class AdaptedWeights:
    """The weights of a base with an adapter, as one source of tensors."""

    def __init__(self, base: WeightFolder, folder: Path, *, allow_pickle: bool = False) -> None:
        """Open an adapter's folder beside the weights of its base; check every name and shape."""
        self._base, self._folder = base, folder
        self.names, self.shape = base.names, base.shape
        self._settings = read_adapter(folder)
        name = next((n for n in ADAPTER_WEIGHTS if (folder / n).is_file()), None)
        if name is None:
            raise SourceError(
                f"`{folder}` has `{ADAPTER}` and no weights of an adapter",
                hint=f"PEFT writes `{ADAPTER_WEIGHTS[0]}` beside it",
            )
        if name.endswith(".bin") and not allow_pickle:
            raise SourceError(
                f"the adapter `{folder}` holds pickled weights only, and opening a pickle can run "
                "code",
                hint="pass `--allow-pickle` if you trust where it comes from",
            )
        self._adapter = WeightFolder(folder, allow_pickle=allow_pickle, single=name)
        self._parts: dict[str, dict[str, str]] = {}  # of each module: the part, and its tensor
        self._whole: dict[str, str] = {}  # of the base -> of the adapter, in place of it
        base_names = set(base.names())
        for stored in self._adapter.names():
            module, part = _split(stored)
            if part:
                self._parts.setdefault(f"{module}.weight", {})[part] = stored
            else:
                self._whole[module] = stored
        for tensor in dict.fromkeys((*self._parts, *self._whole)):
            if tensor not in base_names:
                raise SourceError(
                    f"the adapter `{folder}` changes `{tensor}`, which its base does not hold",
                    hint="it belongs to another base, or that ties its embeddings: merge it into "
                    "its base with PEFT (`merge_and_unload`), and scan the result",
                )
            self._check(tensor)

    def read(self, name: str) -> Tensor:
        weight_RC = self._base.read(name)
        if name in self._whole:
            weight_RC = self._adapter.read(self._whole[name]).to(weight_RC.dtype)
        if name not in self._parts:
            return weight_RC
        parts = {part: self._adapter.read(at).float() for part, at in self._parts[name].items()}
        module = name.removesuffix(".weight")
        is_embedding = "embedding_A" in parts
        a, b = (parts[f"embedding_{k}" if is_embedding else k] for k in "AB")
        change_RC, rank = (b @ a).T if is_embedding else b @ a, len(a)
        transposed = self._settings.fan_in_fan_out and not is_embedding
        alpha = _by_pattern(self._settings.alpha_pattern, module, self._settings.alpha)
        change_RC.mul_(alpha / (math.sqrt(rank) if self._settings.rank_stabilized else rank))
        merged_RC = (weight_RC.T if transposed else weight_RC).float() + change_RC
        if "magnitude" in parts:
            norm_R = merged_RC.norm(dim=1, keepdim=True)
            merged_RC = parts["magnitude"].reshape(-1, 1) / norm_R * merged_RC
        return (merged_RC.T if transposed else merged_RC).to(weight_RC.dtype).contiguous()

    def _check(self, name: str) -> None:
        """Refuse an adapter of one tensor that does not fit its base, or lacks a part."""
        shape = self._base.shape(name)
        if name in self._whole:
            self._must_be(name, self._whole[name], shape)
        if name not in self._parts:
            return
        parts, module = self._parts[name], name.removesuffix(".weight")
        if set(parts) not in ({"A", "B"}, {"A", "B", "magnitude"}, {"embedding_A", "embedding_B"}):
            raise SourceError(
                f"the adapter `{self._folder}` has of `{module}` only "
                f"{', '.join(sorted(f'`{at}`' for at in parts.values()))}",
                hint="save the adapter again with PEFT's `save_pretrained`",
            )
        if len(shape) != 2:
            raise SourceError(
                f"the adapter `{self._folder}` changes `{name}` of shape {list(shape)}; "
                "adapters of matrices are merged",
                hint=_WITH_PEFT,
            )
        rank = int(_by_pattern(self._settings.rank_pattern, module, self._settings.rank))
        rows, columns = shape[::-1] if self._settings.fan_in_fan_out else shape
        needed = {
            "A": (rank, columns), "B": (rows, rank), "magnitude": (rows,),
            "embedding_A": (rank, shape[0]), "embedding_B": (shape[1], rank),
        }  # fmt: skip
        for part, stored in parts.items():
            if part != "magnitude" or math.prod(self._adapter.shape(stored)) != rows:
                self._must_be(name, stored, needed[part])

    def _must_be(self, name: str, stored: str, shape: tuple[int, ...]) -> None:
        if (found := self._adapter.shape(stored)) != shape:
            raise SourceError(
                f"`{stored}` of the adapter `{self._folder}` is {list(found)}, "
                f"and `{name}` with `{ADAPTER}` asks for {list(shape)}",
                hint="it belongs to another base or another configuration",
            )


def _split(stored: str) -> tuple[str, str | None]:
    """Return the module that a tensor of an adapter changes, and which part of it it is."""
    name = stored.removeprefix(_PREFIX).replace(".base_layer.", ".")
    for ending, part in _PARTS.items():
        if name.endswith(f".{ending}"):
            return name.removesuffix(f".{ending}"), part
    return name, None


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first pattern that ends a module's name, as PEFT looks it up."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
