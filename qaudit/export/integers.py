"""GPTQ, AWQ and MLX files: integers in 32-bit words, with a scale for each group of columns.

GPTQ, as GPTQModel and AutoGPTQ have it. Symmetric codes are written as v1, which every loader
reads. Zero points need v2: a v1 zero of 0 wraps around. bfloat16 scales from 2^-17 up are exact
in float16.

    qweight  int32 (words of C codes, R)
    qzeros   int32 (G, words of R zeros)   v1 stores zero - 1, v2 the zero itself
    scales   fp16 (G, R)
    g_idx    int32 (C,), the group of each column

AWQ, in AutoAWQ's GEMM layout of 4 bits, groups and zero points:

    qweight  int32 (C, R / 8)   eight rows in a word, as nibbles 0 2 4 6 1 3 5 7
    qzeros   int32 (G, R / 8)   the same order
    scales   fp16 (G, R)

MLX's affine files, 2 to 8 bits in groups of 32, 64 or 128 columns. Where a bias has no more digits
than bfloat16 has, as with symmetric codes, scales and biases are bfloat16; else float32, in which
the product of a zero point and a scale is exact.

    weight          uint32 (R, words of C codes)
    scales, biases  (R, G): weight = code * scale + bias, so that a bias is -zero * scale
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from qaudit.checkpoints.quantized.arithmetic import WORD, in_awq_order, pack
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

_AWQ_BITS, _AWQ_IN_A_WORD = 4, 8


class GptqFiles(Format):
    """Files that GPTQModel, transformers, vLLM and SGLang load as GPTQ."""

    name: ClassVar[str] = "gptq"
    reader: ClassVar[str] = "gptq"
    config_files: ClassVar[tuple[str, ...]] = ("quantize_config.json",)
    bits: ClassVar[tuple[int, ...]] = (3, 4, 8)
    multiple: ClassVar[int] = 32  # kernels read this many rows at once

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
        if codes.bits not in self.bits:
            raise SchemeError(
                f"`gptq` files have 3, 4 or 8 bits, and `{self.scheme.short}` has {codes.bits}",
                hint="export it as `compressed-tensors`, which has 2 to 8",
            )
        if rows % self.multiple or columns % self.multiple:
            raise SchemeError(
                f"`{linear}` is {rows} x {columns}, and `gptq` files hold multiples of "
                f"{self.multiple}",
                hint="export it as `compressed-tensors`",
            )
        v1_zero = 2 ** (codes.bits - 1) - 1
        zeros_RG = _zeros(codes, v1_zero)
        return {
            f"{linear}.qweight": pack(codes.codes_RC.cpu(), codes.bits).T.contiguous(),
            f"{linear}.qzeros": pack(zeros_RG.T.contiguous(), codes.bits),
            f"{linear}.scales": half_scales(linear, codes).T.contiguous(),
            f"{linear}.g_idx": torch.arange(columns, dtype=torch.int32) // codes.group,
        }

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
        codes = integer_codes(linear, stored, self.scheme, self.name)
        rows = len(codes.codes_RC)
        if codes.bits != _AWQ_BITS:
            raise SchemeError(
                f"`awq` files have 4 bits, and `{self.scheme.short}` has {codes.bits}",
                hint="export it as `compressed-tensors`, which has 2 to 8",
            )
        if rows % _AWQ_IN_A_WORD:
            raise SchemeError(
                f"`{linear}` has {rows} rows, and `awq` files hold multiples of {_AWQ_IN_A_WORD}",
                hint="export it as `compressed-tensors`",
            )

        def packed(values_RN: Tensor) -> Tensor:
            return pack(in_awq_order(values_RN.T.contiguous()), _AWQ_BITS)

        return {
            f"{linear}.qweight": packed(codes.codes_RC.cpu()),
            f"{linear}.qzeros": packed(_zeros(codes, 2 ** (_AWQ_BITS - 1))),
            f"{linear}.scales": half_scales(linear, codes).T.contiguous(),
        }

    def config(self, unquantized: tuple[str, ...], *, symmetric: bool) -> Document:
        return {
            "quant_method": "awq",
            "bits": _AWQ_BITS,
            "group_size": declared_group(self.scheme),
            "zero_point": True,  # zero points are in the file, equal ones for symmetric codes
            "version": "gemm",
            "modules_to_not_convert": list(unquantized),
        }


class MlxFiles(Format):
    """Files that mlx-lm loads."""

    name: ClassVar[str] = "mlx"
    reader: ClassVar[str] = "mlx"
    bits: ClassVar[tuple[int, ...]] = (2, 3, 4, 5, 6, 8)
    groups: ClassVar[tuple[int, ...]] = (32, 64, 128)

    @property
    def runtimes(self) -> tuple[Runtime, ...]:
        return (Runtime("mlx-lm", "0.32", "with mlx 0.32"),)

    def pack(self, linear: str, stored: StoredWeight) -> dict[str, Tensor]:
        import torch

        codes = integer_codes(linear, stored, self.scheme, self.name)
        group, columns = declared_group(self.scheme), codes.codes_RC.shape[1]
        if codes.bits not in self.bits or group not in self.groups:
            raise SchemeError(
                f"`mlx` files have {', '.join(map(str, self.bits))} bits in groups of 32, 64 or "
                f"128, and `{self.scheme.short}` has {codes.bits} in groups of {group}",
                hint="export it as `compressed-tensors`, or scan with group=64",
            )
        if columns * codes.bits % WORD:
            raise SchemeError(
                f"`{linear}` has {columns} columns, whose codes do not fill words",
                hint="export it as `compressed-tensors`",
            )
        scales_RG = codes.scales_RG.cpu().float()
        zeros_RG = _zeros(codes, 2 ** (codes.bits - 1)).float()
        dtype = torch.bfloat16 if codes.zeros_RG is None else torch.float32
        return {
            f"{linear}.weight": pack(codes.codes_RC.cpu(), codes.bits).view(torch.uint32),
            f"{linear}.scales": scales_RG.to(dtype),
            f"{linear}.biases": (-zeros_RG * scales_RG).to(dtype),
        }

    def config(self, unquantized: tuple[str, ...], *, symmetric: bool) -> Document:
        return {
            "group_size": declared_group(self.scheme),
            "bits": declared_bits(self.scheme),
            "mode": "affine",
        }

    def settings(self, config: Mapping[str, Any]) -> Document:
        """mlx-lm looks here first, and for a base of rotations outside of `rope_parameters`."""
        own: Document = {"quantization": self.config((), symmetric=True)}
        rope = config.get("rope_parameters")
        if "rope_theta" not in config and isinstance(rope, Mapping) and "rope_theta" in rope:
            own["rope_theta"] = rope["rope_theta"]
        return own


def _zeros(codes: IntegerCodes, symmetric: int) -> Tensor:
    """Return the zero points of all groups; those of symmetric codes are one number."""
    import torch

    if codes.zeros_RG is not None:
        return codes.zeros_RG.cpu()
    return torch.full(codes.scales_RG.shape, symmetric, dtype=torch.uint8)
