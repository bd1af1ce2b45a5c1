"""MLX's affine files, 2 to 8 bits in groups of columns; embeddings are quantized, too.

A bias of each group is in place of a zero point. Written are groups of 32, 64 or 128. Where a bias
has no more digits than bfloat16 has, as with symmetric codes, scales and biases are bfloat16; else
float32, in which the product of a zero point and a scale is exact.

    weight          uint32 (R, words of C codes)
    scales, biases  (R, G): weight = code * scale + bias, so that a bias is -zero * scale
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from qaudit.core.linears import StoredWeight
from qaudit.formats import packing
from qaudit.formats.arithmetic import WORD, in_order, pack, unpack, wide
from qaudit.formats.packing import Document
from qaudit.formats.reading import SCALES, Layout, Reader, StoredLinear, contradiction, whole_number
from qaudit.support.lazy import Tensor, torch


def _mlx(parts: StoredLinear) -> Layout:
    """Take bits and group from the configuration of this linear, or of all."""
    name, of_linear = parts.name, parts.config.get(parts.name.removesuffix(".weight"))
    if of_linear is False:
        raise contradiction(f"`{name}` is stored quantized, and the configuration denies it")
    config = {**parts.config, **(of_linear if isinstance(of_linear, dict) else {})}
    mode = str(config.get("mode") or "affine")
    if mode != "affine":
        raise contradiction(f"MLX's mode `{mode[:40]}` is not read; it is `affine` alone")
    bits = whole_number(config, "bits", low=2, high=8)
    if bits is None:
        raise contradiction("the quantization configuration of MLX has no `bits`")
    stored = {".weight": ("R W", ("U32",)), ".scales": ("R G", SCALES), ".biases": ("R G", SCALES)}
    rows, words, groups = parts.sizes(stored).values()
    columns = words * WORD // bits
    if words * WORD % bits:
        raise parts.refused(f"has rows of {words} words, which hold no whole number of {bits} bits")
    size = parts.group(columns, groups, config)

    def decode(read: Mapping[str, Tensor]) -> Tensor:
        group_of_C = in_order(columns, size)
        weight_RC = unpack(read[".weight"].view(torch.int32), bits, columns).float()
        weight_RC.mul_(wide(read[".scales"], name).index_select(1, group_of_C))
        return weight_RC.add_(wide(read[".biases"], name).index_select(1, group_of_C))

    return Layout((rows, columns), bits, decode, size)


class MlxFiles(packing.Format):
    """Files that mlx-lm loads."""

    name: ClassVar[str] = "mlx"
    library: ClassVar[str] = "mlx"
    widths: ClassVar[tuple[int, ...]] = (2, 3, 4, 5, 6, 8)
    mixes_bits: ClassVar[bool] = True
    has_embeddings: ClassVar[bool] = True
    suffixes = (".weight", ".scales", ".biases")
    reader = Reader("mlx", (".scales",), suffixes, _mlx, beside=(".biases",))
    runtimes = (packing.Runtime("mlx-lm", "0.32", "with mlx 0.32"),)
    loaded_by: ClassVar[packing.Programs] = {"mlx": ()}
    loading: ClassVar[str] = (
        "from mlx_lm import generate, load\n\n"
        'model, tokenizer = load("{place}")\n'
        'print(generate(model, tokenizer, prompt="The quick brown fox"))'
    )

    def pack(self, linear: str, stored: StoredWeight) -> dict[str, Tensor]:
        codes = packing.integer_codes(linear, stored, self)
        group, columns = packing.declared_group(self.scheme), codes.codes_RC.shape[1]
        if group not in (32, 64, 128):
            raise packing.unfit(
                f"`mlx` files have groups of 32, 64 or 128, and `{self.scheme.short}` has groups "
                f"of {group}",
                ", or scan with group=64",
            )
        if columns * codes.bits % WORD:
            raise packing.unfit(f"`{linear}` has {columns} columns, whose codes do not fill words")
        scales_RG = codes.scales_RG.cpu().float()
        zeros_RG = packing.zero_points(codes, 2 ** (codes.bits - 1)).float()
        dtype = torch.bfloat16 if codes.zeros_RG is None else torch.float32
        return {
            f"{linear}.weight": pack(codes.codes_RC.cpu(), codes.bits).view(torch.uint32),
            f"{linear}.scales": scales_RG.to(dtype),
            f"{linear}.biases": (-zeros_RG * scales_RG).to(dtype),
        }

    def config(self, outside: Sequence[str], symmetric: bool, dtype: str = "float32") -> Document:
        bits, group = int(self.scheme.bit_class), packing.declared_group(self.scheme)
        each = {name: {"group_size": group, "bits": width} for name, width in self.mixed.items()}
        return {"group_size": group, "bits": bits, "mode": "affine", **each}

    def whole_config(self, original: Document, quantization: Document) -> Document:
        """mlx-lm looks here first, and for a base of rotations outside of `rope_parameters`."""
        whole = super().whole_config(original, quantization)
        rope = original.get("rope_parameters")
        if "rope_theta" not in original and isinstance(rope, Mapping) and "rope_theta" in rope:
            whole["rope_theta"] = rope["rope_theta"]
        return {**whole, "quantization": self.config((), symmetric=True)}
