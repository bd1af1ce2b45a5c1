"""MLX's affine files, 2 to 8 bits in groups of columns; embeddings are quantized, too.

A bias of each group is in place of a zero point. Written are groups of 32, 64 or 128. Where a bias
has no more digits than bfloat16 has, as with symmetric codes, scales and biases are bfloat16; else
float32, in which the product of a zero point and a scale is exact.

    weight          uint32 (R, words of C codes)
    scales, biases  (R, G): weight = code * scale + bias, so that a bias is -zero * scale
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from qaudit.core.stored import StoredWeight
from qaudit.errors import SchemeError
from qaudit.formats.arithmetic import WORD, in_order, pack, unpack, wide
from qaudit.formats.packing import (
    Document,
    Format,
    Runtime,
    declared_bits,
    declared_group,
    integer_codes,
    zero_points,
)
from qaudit.formats.reading import (
    SCALES,
    Layout,
    Reader,
    StoredLinear,
    contradiction,
    group_size,
    whole_number,
)
from qaudit.support.lazy import Tensor, torch


def _mlx(parts: StoredLinear) -> Layout:
    """Take bits and group from the configuration of this linear, or of all."""
    own = parts.config.get(parts.name.removesuffix(".weight"))
    if own is False:
        raise contradiction(f"`{parts.name}` is stored quantized, and the configuration denies it")
    config = {**parts.config, **(own if isinstance(own, dict) else {})}
    mode = str(config.get("mode") or "affine")
    if mode != "affine":
        raise contradiction(f"MLX's mode `{mode[:40]}` is not read; it is `affine` alone")
    bits = whole_number(config, "bits", low=2, high=8)
    if bits is None:
        raise contradiction("the quantization configuration of MLX has no `bits`")
    parts.must_hold(".weight", "U32")
    rows, words = parts.shape(".weight", 2)
    groups = parts.shape(".scales", 2)[1]
    for suffix in (".scales", ".biases"):
        parts.must_hold(suffix, *SCALES)
        parts.must_be(suffix, (rows, groups), "`weight`")
    columns = words * 32 // bits
    if words * 32 % bits:
        raise parts.refused(f"has rows of {words} words, which hold no whole number of {bits} bits")
    size, planned = group_size(parts, columns, groups), whole_number(config, "group_size", low=1)
    if planned is not None and planned != size:
        raise contradiction(
            f"the quantization configuration has {bits} bits in groups of {planned} columns, "
            f"and `{parts.name}` is stored in groups of {size}"
        )
    return Layout((rows, columns), bits, partial(_from_mlx, parts.name, bits, size), size)


def _from_mlx(name: str, bits: int, size: int, read: Mapping[str, Tensor]) -> Tensor:
    words_RW = read[".weight"].view(torch.int32)
    columns = words_RW.shape[1] * 32 // bits
    group_of_C = in_order(columns, size)
    scales_RG, biases_RG = wide(read[".scales"], name), wide(read[".biases"], name)
    weight_RC = unpack(words_RW, bits, columns).float()
    weight_RC.mul_(scales_RG.index_select(1, group_of_C))
    return weight_RC.add_(biases_RG.index_select(1, group_of_C))


MLX = Reader("mlx", (".scales",), (".weight", ".scales", ".biases"), _mlx, beside=(".biases",))


class MlxFiles(Format):
    """Files that mlx-lm loads."""

    name: ClassVar[str] = "mlx"
    has_embeddings: ClassVar[bool] = True
    reader = MLX
    bits: ClassVar[tuple[int, ...]] = (2, 3, 4, 5, 6, 8)
    groups: ClassVar[tuple[int, ...]] = (32, 64, 128)

    @property
    def runtimes(self) -> tuple[Runtime, ...]:
        return (Runtime("mlx-lm", "0.32", "with mlx 0.32"),)

    def pack(self, linear: str, stored: StoredWeight) -> dict[str, Tensor]:
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
        zeros_RG = zero_points(codes, 2 ** (codes.bits - 1)).float()
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
