"""MLX's affine files: 2 to 8 bits in groups of 32, 64 or 128 columns.

    weight          uint32 (R, words of C codes)
    scales, biases  (R, G): weight = code * scale + bias, so that a bias is -zero * scale

Where a bias has no more digits than bfloat16 has, as with symmetric codes, scales and biases are
bfloat16; else float32, in which the product of a zero point and a scale is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from qaudit.checkpoints.quantized.packing import WORD, pack
from qaudit.core.stored import StoredWeight
from qaudit.errors import SchemeError
from qaudit.export.formats import (
    Document,
    Format,
    Runtime,
    declared_bits,
    declared_group,
    integer_codes,
)

if TYPE_CHECKING:
    from torch import Tensor

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)


class MlxFiles(Format):
    """Files that mlx-lm loads."""

    name: ClassVar[str] = "mlx"
    reader: ClassVar[str] = "mlx"

    @property
    def runtimes(self) -> tuple[Runtime, ...]:
        return (Runtime("mlx-lm", "0.32", "with mlx 0.32"),)

    def pack(self, linear: str, stored: StoredWeight) -> dict[str, Tensor]:
        import torch

        codes = integer_codes(linear, stored, self.scheme, self.name)
        group, columns = declared_group(self.scheme), codes.codes_RC.shape[1]
        if codes.bits not in BITS or group not in GROUPS:
            raise SchemeError(
                f"`mlx` files have {', '.join(map(str, BITS))} bits in groups of 32, 64 or 128, "
                f"and `{self.scheme.short}` has {codes.bits} in groups of {group}",
                hint="export it as `compressed-tensors`, or scan with group=64",
            )
        if columns * codes.bits % WORD:
            raise SchemeError(
                f"`{linear}` has {columns} columns, whose codes do not fill words",
                hint="export it as `compressed-tensors`",
            )
        scales_RG = codes.scales_RG.cpu().float()
        zeros_RG = torch.full_like(scales_RG, 2 ** (codes.bits - 1))
        if codes.zeros_RG is not None:
            zeros_RG = codes.zeros_RG.cpu().float()
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
