"""The formats of llama.cpp's GGUF files, packed as its quantizer packs them.

    gguf-q8_0     code = round(w / d), ties away from zero, d = largest magnitude / 127
    gguf-q4_0     code = trunc(w / d + 8.5), d = -(the weight of largest magnitude) / 8
    gguf-q3_k ... q6_k   scales of 16 or 32 columns under one of 256, both searched
    gguf-q4_k_m, gguf-q3_k_m   a mix of types by role and block, as `llama-quantize` makes it

Bytes are those of ggml (x86-64), and types in mixes those of `llama-quantize`, which
`tests/peers/test_llamacpp.py` compares; a type alone is its `--pure`. `importance=true`
weighs errors by the mean square of each column's inputs, as with a file of `llama-imatrix`; the
inputs are those of the full-precision model on the calibration text. The default is without, as
`llama-quantize` is.

Where 256 does not divide the columns, a linear gets the type that llama.cpp falls back to, and a
note says so; rows that 32 does not divide are refused. A name is therefore not what is stored: the
class in which a scheme competes is that of the bits a weight takes. Embeddings and head stay as
they are, where `llama-quantize` stores them in 6 or 8 bits.

**Mixes** follow `llama-quant.cpp` for dense models: values, outputs of attention and the second
matrix of the feed-forward get more bits, in some blocks or in all. The role of a linear is that of
the last part of its name, as transformers has it.

Given up: the 2-bit, IQ and ternary types; mixes of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.gguf import TYPES, GgufBlocks, pack
from qaudit.core.linears import (
    CodeLayout,
    Linears,
    Quantized,
    StoredWeight,
    decoded,
    refuse_nonfinite,
    required_inputs,
)
from qaudit.core.scheme import Calibration, Scheme, Shapes
from qaudit.errors import SourceError
from qaudit.support.lazy import torch

FALLBACKS = {"Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What llama.cpp stores where 256 does not divide the columns."""

_ROLES = {
    "value": ("v_proj", "value", "attn_v"),
    "qkv": ("qkv_proj", "query_key_value", "c_attn", "att_proj", "attn_qkv"),
    "attention output": ("o_proj", "out_proj", "attn_out", "attention.dense", "attn.c_proj"),
    "down": ("down_proj", "dense_4h_to_h", "fc2", "ff_out", "mlp.c_proj"),
    "other": (
        "q_proj", "k_proj", "gate_proj", "up_proj", "gate_up_proj", "dense_h_to_4h", "fc1",
        "ff_proj", "mlp.c_fc",
    ),
}  # fmt: skip
_LARGE = 80
"""Blocks of a model that llama.cpp takes for one of 70B, if its heads share keys and values."""


def role_of(name: str) -> str | None:
    for role, ends in _ROLES.items():
        if any(name == end or name.endswith(f".{end}") for end in ends):
            return role
    return None


def shares_values(rows: Mapping[str, int]) -> bool:
    """Return whether heads share keys and values: fewer rows of values than of queries."""
    by_role = {name.rpartition(".")[2]: count for name, count in rows.items()}
    return by_role.get("v_proj", 0) < by_role.get("q_proj", 0)


def fallback(kind: str, columns: int) -> str | None:
    """Return the type that columns can have; None where 32 does not divide them either."""
    if columns % TYPES[kind].columns:
        kind = FALLBACKS.get(kind, kind)
    return None if columns % TYPES[kind].columns else kind


def type_in_mix(mix: str, name: str, block: int, blocks: int, shared: bool = False) -> str:
    """Return the type of a linear in a `_M` file, before columns that do not fit.

    `shared`: heads share keys and values.
    """
    role = role_of(name)
    is_large = blocks == _LARGE and shared
    if mix == "Q3_K":
        if role in ("value", "qkv"):
            return "Q5_K" if block < 2 or (role == "value" and is_large) else "Q4_K"
        if role == "down":
            return "Q5_K" if block < blocks // 16 else "Q4_K"
        return "Q4_K" if role == "attention output" else "Q3_K"
    # In the first and the last eighth of blocks, and in every third one between.
    first = blocks // 8
    more = block < first or block >= 7 * blocks // 8 or (block - first) % 3 == 2
    if role in ("value", "qkv", "down") and more:
        return "Q6_K"
    return "Q5_K" if role == "value" and is_large else "Q4_K"


@dataclass(frozen=True, kw_only=True)
class GgufQ8(Scheme):
    """Round blocks of 32 weights to 8 bits as llama.cpp does (GGUF Q8_0)."""

    name: ClassVar[str] = "gguf-q8_0"
    code_bits: ClassVar[int | None] = 8
    mixes_types: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        """Take the bits of a code from the name, `gguf-q4_k`."""
        super().__init_subclass__()
        cls.code_bits = int(cls.name.removeprefix("gguf-q")[0])

    @property
    def layout(self) -> CodeLayout:
        return CodeLayout("gguf", kind=self.name.removeprefix("gguf-").upper())

    def planned_bits(self, shapes: Shapes, blocks: int) -> float | None:
        """Return the bits that a weight of linears takes; None where one cannot be stored."""
        if any(".c_" in name for _, name in shapes):
            return None  # GPT-2 stores its matrices transposed
        shared = shares_values({name: rows for (_, name), (rows, _) in shapes.items()})
        total = weights = 0
        for (block, name), (rows, columns) in shapes.items():
            if role_of(name) is None:
                continue
            kind = fallback(self._type_of(name, block, blocks, shared), columns)
            if kind is None:
                return None
            total += rows * columns // TYPES[kind].columns * TYPES[kind].nbytes * 8
            weights += rows * columns
        return total / weights if weights else None

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        importance_C = None
        if self.calibrates:
            inputs = required_inputs(linears, self.name)
            importance_C = inputs.gram_CC.diagonal() / inputs.tokens
        stored: dict[str, StoredWeight] = {}
        notes: dict[str, None] = {}
        shared = shares_values({name: len(weight) for name, weight in linears.weights.items()})
        for name, weight_RC in linears.weights.items():
            wanted = self._type_of(name, linears.block, linears.blocks, shared)
            kind = fallback(wanted, weight_RC.shape[1])
            if kind is None:
                raise SourceError(
                    f"`{name}` has rows of {weight_RC.shape[1]} columns, and `{self.name}` stores "
                    "blocks of 32",
                    hint=f"leave {self.name} out; `rtn` takes any number of columns",
                )
            if kind != wanted:
                note = f"{kind} in place of {wanted} where 256 does not divide the columns"
                notes[f"{note}, as llama.cpp"] = None
            stored[name] = GgufBlocks(pack(kind, weight_RC.detach(), importance_C), kind)
        unknown = [f"`{name}`" for name in linears.weights if role_of(name) is None]
        if unknown and self.name.endswith("_m"):
            note = f"llama.cpp's mix names no role for {', '.join(unknown)}"
            notes[f"{note}, which get the type of most linears"] = None
        quantized = decoded(linears, stored, tuple(notes))
        for name, weight_RC in quantized.weights.items():
            if not bool(torch.isfinite(weight_RC).all()):
                raise SourceError(
                    f"the weights of `{name}` are too large for `{self.name}`, whose scales are "
                    "float16",
                    hint=f"leave {self.name} out; `rtn` takes weights of any size",
                )
        return quantized

    def _type_of(self, name: str, block: int, blocks: int, shared: bool) -> str:
        kind = self.name.removeprefix("gguf-").upper()
        if not kind.endswith("_M"):
            return kind
        return type_in_mix(kind.removesuffix("_M"), name, block, blocks, shared)


@dataclass(frozen=True, kw_only=True)
class GgufQ4(GgufQ8):
    """Round blocks of 32 weights to 4 bits as llama.cpp does (GGUF Q4_0)."""

    name: ClassVar[str] = "gguf-q4_0"

    importance: bool = False

    @property
    def calibration(self) -> Calibration:  # type: ignore[override]
        """Return whose activations decide: with importance those of full precision."""
        return Calibration.FULL_PRECISION if self.importance else Calibration.NONE


class GgufQ3K(GgufQ4):
    """Round to 3 bits under 6-bit scales of 16 columns, which are searched (GGUF Q3_K)."""

    name: ClassVar[str] = "gguf-q3_k"


class GgufQ4K(GgufQ4):
    """Round to 4 bits under 6-bit scales and minima of 32 columns (GGUF Q4_K)."""

    name: ClassVar[str] = "gguf-q4_k"


class GgufQ5K(GgufQ4):
    """Round to 5 bits under 6-bit scales and minima of 32 columns (GGUF Q5_K)."""

    name: ClassVar[str] = "gguf-q5_k"


class GgufQ6K(GgufQ4):
    """Round to 6 bits under 8-bit scales of 16 columns, which are searched (GGUF Q6_K)."""

    name: ClassVar[str] = "gguf-q6_k"


class GgufQ4KM(GgufQ4):
    """Round as a Q4_K_M file: Q4_K, and Q6_K for half of the values and down projections."""

    name: ClassVar[str] = "gguf-q4_k_m"


class GgufQ3KM(GgufQ4):
    """Round as a Q3_K_M file: Q3_K, and Q4_K or Q5_K for values, outputs and down projections."""

    name: ClassVar[str] = "gguf-q3_k_m"
