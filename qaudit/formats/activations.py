"""What a repository does to activations, as its runtime does it; or a note that it is left out.

A rounding is known by the configuration alone: by token, or by groups of a token, it needs nothing
else; under a fixed scale it takes the one that is stored beside the weight.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from qaudit.formats import torchao_config
from qaudit.formats.reading import Config, StoredLinear, contradiction

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal[
    "fp8", "fp8 by 128", "fp8 fixed", "int8", "int8 fixed", "int8 but outliers", "nvfp4", "mxfp4"
]
_FIXED: Mapping[str, tuple[str, ...]] = {
    "fp8 fixed": (".input_scale", ".activation_scale"),
    "int8 fixed": (".input_scale",),
    "nvfp4": (".input_global_scale",),
}
STORED = tuple(dict.fromkeys(suffix for suffixes in _FIXED.values() for suffix in suffixes))
"""Suffixes of scales of activations."""

_GROUP, _NV_GROUP, _MX_GROUP = 128, 16, 32


@dataclass(frozen=True)
class Rounding:
    """How what a linear reads is rounded; the number is a scale, a bound or a threshold."""

    kind: Kind
    number: float | None = None

    @property
    def bits(self) -> int | None:
        """Return the bits of each activation; None where some keep all of theirs."""
        if self.kind == "int8 but outliers":
            return None
        return 4 if self.kind.endswith("fp4") else 8

    def of(self, parts: StoredLinear) -> Rounding:
        if self.kind not in _FIXED:
            return self
        suffix = next((name for name in _FIXED[self.kind] if name in parts.infos), "")
        if not suffix:
            raise parts.refused(
                f"has no `{_FIXED[self.kind][0][1:]}`, and the configuration fixes the scale of "
                "activations"
            )
        scale = parts.number(suffix)
        if not 0 < scale < float("inf"):
            raise parts.refused(f"has a `{suffix[1:]}` of {scale:g}, which is no scale")
        return replace(self, number=scale)

    def __call__(self, x: Tensor) -> Tensor:
        from qaudit.core.activations import in_parts

        if self.kind == "int8 but outliers":  # of any token of a batch
            assert self.number is not None
            return _but_outliers(x, self.number)
        return in_parts(x, self._round)

    def _round(self, x: Tensor) -> Tensor:
        from qaudit.core import activations, floats

        match self.kind:
            case "fp8":
                return activations.fp8_tokens(
                    x if self.number is None else x.clamp(-self.number, self.number)
                )
            case "fp8 by 128":
                return activations.fp8_token_groups(x)
            case "int8":
                return activations.int8_tokens(x)
            case "mxfp4":
                return activations.mxfp4_groups(x, "even")
        assert self.number is not None
        match self.kind:
            case "nvfp4":
                return activations.nvfp4_groups(x, x.new_tensor(self.number, dtype=_float32()))
            case "fp8 fixed":
                codes = floats.e4m3(x.float() / self.number)
                return (codes.float() * self.number).to(x.dtype)
            case _:
                whole = (x.float() / self.number).round().clamp(-128, 127)
                return (whole * self.number).to(x.dtype)


def _float32() -> Any:
    import torch

    return torch.float32


def _but_outliers(x: Tensor, threshold: float) -> Tensor:
    """Round tokens to 8 bits but for columns with a value from a threshold on (LLM.int8)."""
    wide = x.float()
    large = wide.abs() >= threshold if threshold else wide.abs() < 0
    rest = wide.masked_fill(large, 0)
    scale = (rest.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    whole_C = large.flatten(0, -2).any(0)
    return (rest / scale).round().mul(scale).where(~whole_C, wide).to(x.dtype)


def of_group(table: Mapping[str, Any]) -> Rounding | str | None:
    """Return the rounding of a group of compressed-tensors, or the name of one that is not run."""
    arguments = table.get("input_activations")
    if not isinstance(arguments, Mapping):
        return None
    kind, bits = str(arguments.get("type") or "int"), arguments.get("num_bits")
    strategy, dynamic = str(arguments.get("strategy") or ""), arguments.get("dynamic")
    kinds: dict[tuple[object, ...], Kind] = {
        ("float", 8, "token", True): "fp8",
        ("float", 8, "group", True): "fp8 by 128",
        ("float", 8, "tensor", False): "fp8 fixed",
        ("int", 8, "token", True): "int8",
        ("int", 8, "tensor", False): "int8 fixed",
        ("float", 4, "tensor_group", "local"): "nvfp4",
        ("float", 4, "group", True): "mxfp4",
    }
    sizes = {"fp8 by 128": _GROUP, "nvfp4": _NV_GROUP, "mxfp4": _MX_GROUP}
    key = (kind, bits, strategy, "local" if dynamic == "local" else bool(dynamic))
    rounding = kinds.get(key)
    usual = arguments.get("symmetric", True) and arguments.get("actorder") is None
    if (
        rounding is None
        or not usual
        or arguments.get("group_size") not in (None, sizes.get(rounding))
    ):
        return f"{bits}-bit {kind}, {'dynamic' if dynamic else 'fixed'} by {strategy or 'tensor'}"
    return Rounding(rounding)


def of_fp8(config: Config) -> Rounding | str | None:
    if config.get("quant_method") == "fbgemm_fp8":
        bound = config.get("activation_scale_ub", 1200.0)
        if not isinstance(bound, int | float) or not 0 < bound < float("inf"):
            raise contradiction(f"`activation_scale_ub` is `{str(bound)[:40]}`, which is no bound")
        return Rounding("fp8", float(bound))
    scheme, blocks = config.get("activation_scheme"), config.get("weight_block_size")
    if not scheme:
        return None
    if scheme == "static":
        return Rounding("fp8 fixed")
    if scheme == "dynamic" and not blocks:
        return Rounding("fp8")
    if scheme == "dynamic" and isinstance(blocks, list) and blocks[-1] == _GROUP:
        return Rounding("fp8 by 128")
    return f"fp8, {scheme} scales" + (f" in blocks of {blocks}" if blocks else "")


def of_bitsandbytes(config: Config) -> Rounding | None:
    """Return the rounding of LLM.int8; 4-bit weights are multiplied with what they are given."""
    if not config.get("load_in_8bit"):
        return None
    threshold = config.get("llm_int8_threshold", 6.0)
    if not isinstance(threshold, int | float) or not 0 <= threshold < float("inf"):
        raise contradiction(f"`llm_int8_threshold` is `{str(threshold)[:40]}`, no threshold")
    return Rounding("int8 but outliers", float(threshold))


def of_torchao(config: Config) -> Rounding | str | None:
    """Return the rounding of most linears of a model of torchao, by its configuration."""
    table = torchao_config.main(config)
    data, kind = torchao_config.attributes(table), torchao_config.type_of(table)
    if kind.endswith("WeightOnlyConfig"):
        return None
    if kind == "Int8DynamicActivationInt8WeightConfig":
        return _of_torchao_int8(data, data.get("act_mapping_type"))
    if kind == "Float8DynamicActivationFloat8WeightConfig":
        bounds = (data.get("activation_value_lb"), data.get("activation_value_ub"))
        return _of_torchao_fp8(data, data.get("activation_dtype"), *bounds)
    return "8-bit int, asymmetric by token"


def of_torchao_tensor(data: Mapping[str, Any], parts: Collection[str]) -> Rounding | str | None:
    if data.get("activation_quantization") is not None:
        return f"{str(data['activation_quantization'])[:40]}"
    if str(torchao_config.value_of(data.get("activation_dtype"))).startswith("float8"):
        return "8-bit float before 4-bit weights"
    arguments = data.get("act_quant_kwargs")
    if arguments is None:
        return None
    if "act_quant_scale" in parts:
        return "fixed scales of torchao"
    table = torchao_config.attributes(arguments)
    if torchao_config.type_of(arguments) == "QuantizeTensorToInt8Kwargs":
        return _of_torchao_int8(table, table.get("mapping_type"))
    if torchao_config.type_of(arguments) == "QuantizeTensorToFloat8Kwargs":
        bounds = (table.get("hp_value_lb"), table.get("hp_value_ub"))
        return _of_torchao_fp8(table, table.get("float8_dtype"), *bounds)
    return torchao_config.type_of(arguments)[:40] or "an unnamed kind"


def _of_torchao_int8(data: Mapping[str, Any], mapping: Any) -> Rounding | str:
    by_token = _by_token(data.get("granularity"))
    if (
        by_token
        and torchao_config.value_of(mapping) == "SYMMETRIC"
        and not data.get("reduce_range")
    ):
        return Rounding("int8")
    return "8-bit int, " + ("not symmetric, or of fewer codes" if by_token else "not by token")


def _of_torchao_fp8(
    data: Mapping[str, Any], dtype: Any, low: object, high: object
) -> Rounding | str:
    if not _by_token(data.get("granularity")):
        return "fp8, not by token"
    if torchao_config.value_of(dtype) != "float8_e4m3fn" or low is not None:
        return "fp8, not E4M3, or with a lowest scale"
    if high is None:
        return Rounding("fp8")
    if not isinstance(high, int | float) or not 0 < high < float("inf"):
        raise contradiction(f"the bound of activations is `{str(high)[:40]}`, which is no bound")
    return Rounding("fp8", float(high))


def _by_token(granularity: Any) -> bool:
    """Return whether scales are by row of activations; of a list the first is theirs."""
    first = granularity[0] if isinstance(granularity, list) and granularity else granularity
    last = torchao_config.attributes(first).get("dim", -1) == -1
    return first is None or (torchao_config.type_of(first) == "PerRow" and last)


def act_bits(rounding: Rounding | str | None) -> int:
    """Return the bits of activations that are run as they ship; 16 where they stay as they are."""
    return (rounding.bits or 16) if isinstance(rounding, Rounding) else 16
