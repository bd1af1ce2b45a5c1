"""GPTQ: codes packed along the input, zero points along the output.

Version 1 stores a zero point less one, so that zero wraps around; `gptq_v2` stores it as it is.
The bits of each linear follow from its shapes, so that a `dynamic` configuration needs no rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from qaudit.checkpoints.quantized.format import (
    Config,
    Format,
    Layout,
    Parts,
    contradiction,
    group_size,
    must_be_group,
    whole_number,
)

if TYPE_CHECKING:
    from torch import Tensor

_FIRST, _SECOND = ("gptq", ""), ("gptq_v2",)


def is_first_version(config: Config) -> bool:
    """Return whether stored zero points are one too low; refuse an unknown layout."""
    kind = str(config.get("checkpoint_format") or config.get("format") or "").lower()
    if kind not in (*_FIRST, *_SECOND):
        raise contradiction(f"the checkpoint format `{kind[:40]}` of GPTQ is not known")
    return kind in _FIRST


def layout(parts: Parts) -> Layout:
    """Check shapes against each other and against the configuration."""
    for suffix in (".qweight", ".qzeros"):
        parts.must_hold(suffix, "I32")
    parts.must_hold(".scales", "F16", "BF16", "F32")
    words, rows = parts.shape(".qweight", 2)
    groups, _ = parts.shape(".scales", 2)
    packed_zeros = parts.shape(".qzeros", 2)[1]
    parts.must_be(".scales", (groups, rows), "`qweight`")
    parts.must_be(".qzeros", (groups, packed_zeros), "`scales`")
    bits = packed_zeros * 32 // rows
    if bits not in (2, 3, 4, 8) or bits * rows != packed_zeros * 32 or words * 32 % bits:
        raise parts.refused(
            f"packs {rows} zero points in {packed_zeros} words, which no number of bits does"
        )
    columns = words * 32 // bits
    planned = whole_number(parts.config, "bits", "w_bit", low=2, high=8)
    if planned is not None and planned != bits and not parts.config.get("dynamic"):
        raise contradiction(
            f"the quantization configuration has {planned} bits, and `{parts.name}` is stored "
            f"in {bits}"
        )
    size = group_size(parts, columns, groups)
    if ".g_idx" in parts.infos:
        parts.must_hold(".g_idx", "I32", "I64")
        parts.must_be(".g_idx", (columns,), f"{bits}-bit `qweight`")
    if not parts.config.get("dynamic"):
        must_be_group(parts, columns, size, parts.config)
    first = is_first_version(parts.config)
    return Layout((rows, columns), bits, partial(_decode, parts.name, bits, size, first), size)


def _decode(name: str, bits: int, size: int, first: bool, read: Mapping[str, Tensor]) -> Tensor:
    from qaudit.checkpoints.quantized.arithmetic import in_order, indexed, scaled
    from qaudit.checkpoints.quantized.packing import unpack

    words_CR, scales_GR = read[".qweight"], read[".scales"]
    columns, rows = words_CR.shape[0] * 32 // bits, words_CR.shape[1]
    zeros_RG = unpack(read[".qzeros"], bits, rows).T.float()
    if first:
        zeros_RG = (zeros_RG + 1) % 2**bits
    group_of_C = in_order(columns, size)
    if ".g_idx" in read:
        group_of_C = indexed(name, read[".g_idx"], len(scales_GR))
    codes_RC = unpack(words_CR.T.contiguous(), bits, columns).float()
    centered_RC = codes_RC.sub_(zeros_RG.index_select(1, group_of_C))
    return scaled(name, centered_RC, scales_GR.T, group_of_C)


FORMAT = Format("gptq", (".qweight",), (".qweight", ".qzeros", ".scales", ".g_idx"), layout)
