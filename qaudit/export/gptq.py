"""GPTQ files, as GPTQModel and AutoGPTQ have them.

    qweight  int32 (words of C codes, R)
    qzeros   int32 (G, words of R zeros)   v1 stores zero - 1, v2 the zero itself
    scales   fp16 (G, R)
    g_idx    int32 (C,), the group of each column

Symmetric codes are written as v1, which every loader reads. Zero points need v2: a v1 zero of 0
wraps around. bfloat16 scales from 2^-17 up are exact in float16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from qaudit.checkpoints.quantized.packing import pack, unpack
from qaudit.core.stored import IntegerCodes, StoredWeight
from qaudit.errors import SchemeError
from qaudit.export.formats import (
    Document,
    Format,
    Read,
    Runtime,
    declared_bits,
    declared_group,
    expect,
    half_scales,
    integer_codes,
)
from qaudit.version import __version__

if TYPE_CHECKING:
    from torch import Tensor

BITS = (3, 4, 8)
ROWS = 32  # kernels read this many rows at once


class GptqFiles(Format):
    """Files that GPTQModel, transformers, vLLM and SGLang load as GPTQ."""

    name: ClassVar[str] = "gptq"
    runtimes: ClassVar[tuple[Runtime, ...]] = (
        Runtime("GPTQModel", "7.6", "backend gptq_torch computes with these very weights"),
        Runtime("transformers", "5.0", "with gptqmodel and optimum"),
        Runtime("vLLM", "0.33", "4 and 8 bits, symmetric, groups of 32, 64, 128 or rows"),
        Runtime("SGLang", "0.5.23", "4 and 8 bits, symmetric"),
    )
    config_files: ClassVar[tuple[str, ...]] = ("quantize_config.json",)

    def pack(self, linear: str, stored: StoredWeight) -> dict[str, Tensor]:
        import torch

        codes = integer_codes(linear, stored, self.scheme, self.name)
        rows, columns = codes.codes_RC.shape
        self._must_fit(linear, codes)
        groups = codes.scales_RG.shape[1]
        stored_zero = 2 ** (codes.bits - 1) - 1 if codes.zeros_RG is None else 0
        zeros_GR = torch.full((groups, rows), stored_zero, dtype=torch.uint8)
        if codes.zeros_RG is not None:
            zeros_GR = codes.zeros_RG.cpu().T.contiguous()
        return {
            f"{linear}.qweight": pack(codes.codes_RC.cpu(), codes.bits).T.contiguous(),
            f"{linear}.qzeros": pack(zeros_GR, codes.bits),
            f"{linear}.scales": half_scales(linear, codes).T.contiguous(),
            f"{linear}.g_idx": torch.arange(columns, dtype=torch.int32) // codes.group,
        }

    def _must_fit(self, linear: str, codes: IntegerCodes) -> None:
        rows, columns = codes.codes_RC.shape
        if codes.bits not in BITS:
            raise SchemeError(
                f"`gptq` files have 3, 4 or 8 bits, and `{self.scheme.short}` has {codes.bits}",
                hint="export it as `compressed-tensors`, which has 2 to 8",
            )
        if rows % ROWS or columns % ROWS:
            raise SchemeError(
                f"`{linear}` is {rows} x {columns}, and `gptq` files hold multiples of {ROWS}",
                hint="export it as `compressed-tensors`",
            )

    def unpack(self, linear: str, read: Read, config: Mapping[str, Any]) -> StoredWeight:
        bits, second = int(config["bits"]), config["checkpoint_format"] == "gptq_v2"
        words, scales_GR = read(f"{linear}.qweight"), read(f"{linear}.scales")
        qzeros, g_idx_C = read(f"{linear}.qzeros"), read(f"{linear}.g_idx")
        columns, rows = len(g_idx_C), words.shape[1]
        group = columns if int(config["group_size"]) == -1 else int(config["group_size"])
        groups = columns // group
        expect(
            words.shape[0] * 32 == columns * bits,
            linear,
            f"`qweight` has {words.shape[0]} rows, and {columns} codes of {bits} bits need "
            f"{columns * bits // 32}",
        )
        expect(tuple(scales_GR.shape) == (groups, rows), linear, "`scales` do not fit the groups")
        expect(
            tuple(qzeros.shape) == (groups, rows * bits // 32),
            linear,
            "`qzeros` do not fit the groups",
        )
        expect(
            g_idx_C.tolist() == [column // group for column in range(columns)],
            linear,
            "`g_idx` is another order of groups than was written",
        )
        zeros_GR = unpack(qzeros, bits, rows)
        zeros_RG = (zeros_GR if second else (zeros_GR + 1) & (2**bits - 1)).T.contiguous()
        codes_RC = unpack(words.T.contiguous(), bits, columns)
        return IntegerCodes(codes_RC, scales_GR.T.contiguous(), zeros_RG, bits, group)

    def config(self, unquantized: tuple[str, ...], *, symmetric: bool) -> Document:
        return {
            "quant_method": "gptq",
            "bits": declared_bits(self.scheme),
            "group_size": declared_group(self.scheme),
            "desc_act": False,
            "sym": symmetric,
            "lm_head": False,
            "checkpoint_format": "gptq" if symmetric else "gptq_v2",
            "pack_dtype": "int32",
            "meta": {"quantizer": [f"qaudit:{__version__}"]},
        }
