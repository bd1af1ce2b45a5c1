"""AWQ files in AutoAWQ's GEMM layout: 4 bits, groups, zero points.

qweight  int32 (C, R / 8)   eight rows in a word, as nibbles 0 2 4 6 1 3 5 7
qzeros   int32 (G, R / 8)   the same order
scales   fp16 (G, R)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from qaudit.checkpoints.quantized.packing import in_awq_order, pack
from qaudit.core.stored import StoredWeight
from qaudit.errors import SchemeError
from qaudit.export.formats import (
    Document,
    Format,
    Runtime,
    declared_group,
    half_scales,
    integer_codes,
)

if TYPE_CHECKING:
    from torch import Tensor

BITS = 4
IN_A_WORD = 8


class AwqFiles(Format):
    """Files that vLLM, SGLang and transformers load as AWQ."""

    name: ClassVar[str] = "awq"
    reader: ClassVar[str] = "awq"

    @property
    def runtimes(self) -> tuple[Runtime, ...]:
        return (
            Runtime("vLLM", "0.33"),
            Runtime("SGLang", "0.5.23"),
            Runtime("GPTQModel", "7.6", "backend awq_torch computes with these very weights"),
            Runtime("transformers", "5.0", "with gptqmodel"),
        )

    def pack(self, linear: str, stored: StoredWeight) -> dict[str, Tensor]:
        import torch

        codes = integer_codes(linear, stored, self.scheme, self.name)
        rows = len(codes.codes_RC)
        if codes.bits != BITS:
            raise SchemeError(
                f"`awq` files have 4 bits, and `{self.scheme.short}` has {codes.bits}",
                hint="export it as `compressed-tensors`, which has 2 to 8",
            )
        if rows % IN_A_WORD:
            raise SchemeError(
                f"`{linear}` has {rows} rows, and `awq` files hold multiples of {IN_A_WORD}",
                hint="export it as `compressed-tensors`",
            )
        zeros_RG = codes.zeros_RG
        if zeros_RG is None:
            zeros_RG = torch.full_like(codes.scales_RG, 2 ** (BITS - 1), dtype=torch.uint8)
        return {
            f"{linear}.qweight": _packed(codes.codes_RC.cpu()),
            f"{linear}.qzeros": _packed(zeros_RG.cpu()),
            f"{linear}.scales": half_scales(linear, codes).T.contiguous(),
        }

    def config(self, unquantized: tuple[str, ...], *, symmetric: bool) -> Document:
        return {
            "quant_method": "awq",
            "bits": BITS,
            "group_size": declared_group(self.scheme),
            "zero_point": True,  # zero points are in the file, equal ones for symmetric codes
            "version": "gemm",
            "modules_to_not_convert": list(unquantized),
        }


def _packed(values_RN: Tensor) -> Tensor:
    return pack(in_awq_order(values_RN.T.contiguous()), BITS)
