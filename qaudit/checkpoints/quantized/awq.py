"""AWQ as AutoAWQ's GEMM layout: eight neighbours along the output in a word, out of order."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from qaudit.checkpoints.quantized.format import (
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

BITS, PER_WORD = 4, 8


def layout(parts: Parts) -> Layout:
    """Check shapes against each other and against the configuration."""
    version = str(parts.config.get("version") or "gemm").lower()
    if version != "gemm":
        raise contradiction(f"AWQ's layout `{version[:40]}` is not read; it is `gemm` alone")
    planned = whole_number(parts.config, "bits", "w_bit", low=2, high=8)
    if planned not in (None, BITS):
        raise contradiction(f"the quantization configuration has {planned} bits, and AWQ packs 4")
    parts.must_hold(".qweight", "I32")
    parts.must_hold(".scales", "F16", "BF16", "F32")
    columns, words = parts.shape(".qweight", 2)
    rows = words * PER_WORD
    groups = parts.shape(".scales", 2)[0]
    parts.must_be(".scales", (groups, rows), "`qweight`")
    if ".qzeros" in parts.infos:
        parts.must_hold(".qzeros", "I32")
        parts.must_be(".qzeros", (groups, words), "`scales`")
    elif parts.config.get("zero_point", True):
        raise parts.refused("has no `qzeros`, and the configuration has zero points")
    size = group_size(parts, columns, groups)
    must_be_group(parts, columns, size, parts.config)
    return Layout((rows, columns), BITS, partial(_decode, parts.name, size), size)


def _decode(name: str, size: int, read: Mapping[str, Tensor]) -> Tensor:
    from qaudit.checkpoints.quantized.arithmetic import in_order, scaled

    codes_CR = _in_order(read[".qweight"])
    group_of_C = in_order(len(codes_CR), size)
    centered_RC = codes_CR.T.float()
    if ".qzeros" in read:
        centered_RC.sub_(_in_order(read[".qzeros"]).T.float().index_select(1, group_of_C))
    else:
        centered_RC.sub_(2 ** (BITS - 1))
    return scaled(name, centered_RC.contiguous(), read[".scales"].T, group_of_C)


def _in_order(words_NW: Tensor) -> Tensor:
    """Return the codes of words, neighbours beside each other."""
    from qaudit.checkpoints.quantized.packing import from_awq_order, unpack

    return from_awq_order(unpack(words_NW, BITS, words_NW.shape[1] * PER_WORD))


FORMAT = Format("awq", (".qweight",), (".qweight", ".qzeros", ".scales"), layout)
