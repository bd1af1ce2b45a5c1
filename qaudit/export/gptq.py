"""GPTQ files, as GPTQModel and AutoGPTQ have them.

    qweight  int32 (words of C codes, R)
    qzeros   int32 (G, words of R zeros)   v1 stores zero - 1, v2 the zero itself
    scales   fp16 (G, R)
    g_idx    int32 (C,), the group of each column

Symmetric codes are written as v1, which every loader reads. Zero points need v2: a v1 zero of 0
wraps around. bfloat16 scales from 2^-17 up are exact in float16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from qaudit.checkpoints.quantized.packing import pack
from qaudit.core.stored import IntegerCodes, StoredWeight
from qaudit.errors import SchemeError
from qaudit.export.formats import (
    Document,
    Format,
    Runtime,
    declared_bits,
    declared_group,
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
    reader: ClassVar[str] = "gptq"
    config_files: ClassVar[tuple[str, ...]] = ("quantize_config.json",)

    @property
    def runtimes(self) -> tuple[Runtime, ...]:
        return (
            Runtime("GPTQModel", "7.6", "backend gptq_torch computes with these very weights"),
            Runtime("transformers", "5.0", "with gptqmodel and optimum"),
            Runtime("vLLM", "0.33", "4 and 8 bits, symmetric, groups of 32, 64, 128 or rows"),
            Runtime("SGLang", "0.5.23", "4 and 8 bits, symmetric"),
        )

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
