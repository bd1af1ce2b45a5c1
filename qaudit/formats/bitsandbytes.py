"""bitsandbytes files: NF4, FP4 and int8 as `Linear4bit` and `Linear8bitLt` save them.

4 bits  weight uint8 (bytes, 1), .absmax, .quant_map, .nested_* and .quant_state (JSON as bytes)
8 bits  weight int8 (R, C), SCB fp32 (R), weight_format uint8 () = 0
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from qaudit.core.bnb_codes import FourBitCodes, Int8Codes
from qaudit.core.linears import Codes, StoredWeight
from qaudit.errors import SchemeError
from qaudit.formats import packing, reading
from qaudit.formats.arithmetic import wide
from qaudit.formats.packing import Document
from qaudit.formats.reading import contradiction, refused
from qaudit.support.lazy import Tensor, torch

_STATES = tuple(f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_TABLES = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(
        sign * value / 12 for sign in (1, -1) for value in (0, 1 / 16, 8, 12, 4, 6, 2, 3)
    ),
}  # fmt: skip
"""What the library decodes by, whatever the file has as `quant_map`."""

_DTYPES = ("float32", "bfloat16", "float16")


def rounding_of(config: reading.Config) -> reading.Rounding | None:
    """Return the rounding of LLM.int8; 4-bit weights are multiplied with what they are given."""
    if not config.get("load_in_8bit"):
        return None
    threshold = config.get("llm_int8_threshold", 6.0)
    if not isinstance(threshold, int | float) or not 0 <= threshold < float("inf"):
        raise contradiction(f"`llm_int8_threshold` is `{str(threshold)[:40]}`, no threshold")
    return reading.Rounding("int8 but outliers", float(threshold))


def layout(parts: reading.StoredLinear) -> reading.Layout:
    """Take the shape of int8 rows from headers; that of 4-bit codes is stored as JSON."""
    bits, other = (8, 4) if ".SCB" in parts.infos else (4, 8)
    if not parts.config.get(f"load_in_{bits}bit") or parts.config.get(f"load_in_{other}bit"):
        raise contradiction(
            f"`{parts.name}` is stored in {bits} bits, and the quantization configuration has no "
            f"`load_in_{bits}bit` alone, without which transformers reads codes as weights"
        )
    if bits == 4:
        return _of_four_bits(parts)
    rows, columns = parts.sizes({".weight": ("R C", ("I8",))}).values()
    parts.must_count(".SCB", rows, *reading.SCALES)

    def decode(read: Mapping[str, Tensor]) -> Tensor:
        scales_R1 = wide(read[".SCB"], parts.name).reshape(-1, 1)
        return read[".weight"].float() * scales_R1 * (1.0 / 127.0)

    return reading.Layout((rows, columns), 8, decode, rounding=rounding_of(parts.config))


def _of_four_bits(parts: reading.StoredLinear) -> reading.Layout:
    name = parts.name
    suffix = next((name for name in _STATES if name in parts.infos), "")
    if not suffix:
        raise parts.refused("has no `quant_state`")
    state = _state(name, suffix, parts.raw(suffix))
    (rows, columns), size = state["shape"], state["blocksize"]
    count, kind, nested = rows * columns, state["quant_type"], state.get("nested_blocksize") or 256
    blocks = -(-count // size)
    parts.must_count(".weight", -(-count // 2), "U8")
    tables = {".weight.quant_map": ("M", ())}
    if is_nested := ".weight.nested_absmax" in parts.infos:
        tables[".weight.nested_quant_map"] = ("N", ())
        parts.must_count(".weight.nested_absmax", -(-blocks // nested), *reading.SCALES)
    parts.sizes(tables, "a table", M=16, N=256)
    parts.must_count(".weight.absmax", blocks, *(("U8",) if is_nested else reading.SCALES))

    def decode(read: Mapping[str, Tensor]) -> Tensor:
        packed, table = read[".weight"].flatten(), read[".weight.quant_map"]
        scales = read[".weight.absmax"].flatten()
        if is_nested:
            outer = wide(read[".weight.nested_absmax"].flatten(), name)
            codes_of = wide(read[".weight.nested_quant_map"], name)
            of_block = outer.repeat_interleave(nested)[:blocks]
            scales = codes_of[scales.to(torch.int32)] * of_block + state["nested_offset"]
        usual = torch.tensor(_TABLES[kind])
        if not torch.allclose(table.float(), usual, rtol=1e-5, atol=1e-7):
            raise contradiction(
                f"`{name}` has a `quant_map` that is not the one of `{kind}`, by which "
                "bitsandbytes decodes"
            )
        codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten()[:count]
        of_block = wide(scales, name).repeat_interleave(size)[:count]
        weight = wide(table, name)[codes.to(torch.int32)] * of_block
        # The library's own product is rounded to its dtype.
        return weight.reshape(rows, columns).to(getattr(torch, state["dtype"]))

    return reading.Layout((rows, columns), 4, decode)


def _state(name: str, suffix: str, raw: bytes) -> dict[str, Any]:
    """Read the JSON that is stored beside 4-bit codes, and check it."""
    try:
        state = json.loads(raw)
        shape, size = state["shape"], state["blocksize"]
        sizes = (*shape, size, state.get("nested_blocksize") or 1)
        right = len(shape) == 2 and all(type(side) is int and 0 < side < 1 << 40 for side in sizes)
        right &= state.setdefault("quant_type", suffix.rpartition("__")[2]) in _TABLES
        if not right or state.setdefault("dtype", "float32") not in _DTYPES:
            raise ValueError("a shape, block size or dtype is wrong")
        state["nested_offset"] = float(state.get("nested_offset") or 0.0)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise refused(name, "has a `quant_state` that cannot be read") from error
    return {**state}


FORMAT = reading.Reader(
    "bitsandbytes",
    (".weight.absmax", ".SCB"),
    (
        ".weight", ".weight.absmax", ".weight.quant_map", ".weight.nested_absmax",
        ".weight.nested_quant_map", *_STATES, ".SCB", ".weight_format",
    ),
    layout,
    bits=lambda config: 8 if config.get("load_in_8bit") else 4,
    rounding=rounding_of,
)  # fmt: skip


class Bitsandbytes(packing.Format):
    """Files that transformers and SGLang load through bitsandbytes."""

    name: ClassVar[str] = "bnb"
    has_experts: ClassVar[bool] = False  # transformers 5.23 loads none
    holds: ClassVar[tuple[Codes, ...]] = ("bitsandbytes",)
    loaded_by: ClassVar[packing.Programs] = {"transformers": ("bitsandbytes", "accelerate")}
    reader = FORMAT
    runtimes = (
        packing.Runtime("transformers", "5.0", "with bitsandbytes 0.48"),
        packing.Runtime("SGLang", "0.5.23"),
    )

    def pack(self, linear: str, stored: StoredWeight) -> dict[str, Tensor]:
        if isinstance(stored, Int8Codes):
            return {
                f"{linear}.weight": stored.codes_RC.cpu(),
                f"{linear}.SCB": stored.absmax_R.cpu(),
                f"{linear}.weight_format": torch.tensor(0, dtype=torch.uint8),
            }
        if not isinstance(stored, FourBitCodes):
            raise SchemeError(
                f"`{self.scheme.short}` stores no codes of bitsandbytes, which `bnb` holds",
                hint="export it as `compressed-tensors`, or a scheme "
                f"{packing.schemes_of('bitsandbytes')}",
            )
        state = stored.state(stored.shape).as_dict(packed=True)
        parts = {f"{linear}.weight.{name}": part.cpu() for name, part in state.items()}
        return {f"{linear}.weight": stored.packed.cpu(), **parts}

    def config(self, outside: Sequence[str], symmetric: bool, dtype: str = "float32") -> Document:
        kind = self.scheme.layout.kind if self.scheme.layout else ""
        four = kind != "int8"
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": four,
            "load_in_8bit": not four,
            "_load_in_4bit": four,
            "_load_in_8bit": not four,
            "bnb_4bit_quant_type": kind if four else "fp4",
            "bnb_4bit_use_double_quant": bool(getattr(self.scheme, "double_quant", False)),
            "bnb_4bit_compute_dtype": dtype,  # in which it was measured
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_threshold": float(getattr(self.scheme, "threshold", 6.0)),
            "llm_int8_skip_modules": list(outside),
            "llm_int8_has_fp16_weight": False,
            "llm_int8_enable_fp32_cpu_offload": False,
        }
