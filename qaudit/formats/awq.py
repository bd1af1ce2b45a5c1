"""AWQ, in AutoAWQ's GEMM layout of 4 bits, groups and zero points.

qweight  int32 (C, R / 8)   eight rows in a word, as nibbles 0 2 4 6 1 3 5 7
qzeros   int32 (G, R / 8)   the same order
scales   fp16 (G, R)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

from qaudit.core.stored import StoredWeight
from qaudit.errors import SchemeError
from qaudit.formats.arithmetic import (
    from_awq_order,
    in_awq_order,
    in_order,
    must_be_symmetric,
    pack,
    scaled,
    unpack,
)
from qaudit.formats.packing import (
    Document,
    Format,
    Runtime,
    declared_group,
    half_scales,
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
    must_be_group,
    whole_number,
)
from qaudit.support.lazy import Tensor

_AWQ_BITS, _AWQ_PER_WORD = 4, 8


def _awq(parts: StoredLinear) -> Layout:
    version = str(parts.config.get("version") or "gemm").lower()
    if version != "gemm":
        raise contradiction(f"AWQ's layout `{version[:40]}` is not read; it is `gemm` alone")
    planned = whole_number(parts.config, "bits", "w_bit", low=2, high=8)
    if planned not in (None, _AWQ_BITS):
        raise contradiction(f"the quantization configuration has {planned} bits, and AWQ packs 4")
    parts.must_hold(".qweight", "I32")
    parts.must_hold(".scales", *SCALES)
    columns, words = parts.shape(".qweight", 2)
    rows = words * _AWQ_PER_WORD
    groups = parts.shape(".scales", 2)[0]
    parts.must_be(".scales", (groups, rows), "`qweight`")
    if ".qzeros" in parts.infos:
        parts.must_hold(".qzeros", "I32")
        parts.must_be(".qzeros", (groups, words), "`scales`")
    elif parts.config.get("zero_point", True):
        raise parts.refused("has no `qzeros`, and the configuration has zero points")
    size = group_size(parts, columns, groups)
    must_be_group(parts, columns, size, parts.config)
    symmetric = parts.config.get("zero_point") is False
    decode = partial(_from_awq, parts.name, size, symmetric)
    return Layout((rows, columns), _AWQ_BITS, decode, size)


def _from_awq(name: str, size: int, symmetric: bool, read: Mapping[str, Tensor]) -> Tensor:
    def codes(words_NW: Tensor) -> Tensor:
        in_words = unpack(words_NW, _AWQ_BITS, words_NW.shape[1] * _AWQ_PER_WORD)
        return from_awq_order(in_words).T.float()

    centered_RC = codes(read[".qweight"]).sub_(2 ** (_AWQ_BITS - 1))
    group_of_C = in_order(centered_RC.shape[1], size)
    if ".qzeros" in read:
        zeros_RG = codes(read[".qzeros"]).sub_(2 ** (_AWQ_BITS - 1))
        if symmetric:
            must_be_symmetric(name, "`zero_point: false`", zeros_RG)
        centered_RC.sub_(zeros_RG.index_select(1, group_of_C))
    return scaled(name, centered_RC.contiguous(), read[".scales"].T, group_of_C)


AWQ = Reader(
    "awq",
    (".qweight",),
    (".qweight", ".qzeros", ".scales"),
    _awq,
    older="quant_config.json",
    bits=lambda config: _AWQ_BITS,
)


class AwqFiles(Format):
    """Files that vLLM, SGLang and transformers load as AWQ."""

    name: ClassVar[str] = "awq"
    loaded_by: ClassVar[Mapping[str, tuple[str, ...]]] = {"gptqmodel": (), "vllm": ()}
    reader = AWQ

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
        if rows % _AWQ_PER_WORD:
            raise SchemeError(
                f"`{linear}` has {rows} rows, and `awq` files hold multiples of {_AWQ_PER_WORD}",
                hint="export it as `compressed-tensors`",
            )

        def packed(values_RN: Tensor) -> Tensor:
            return pack(in_awq_order(values_RN.T.contiguous()), _AWQ_BITS)

        return {
            f"{linear}.qweight": packed(codes.codes_RC.cpu()),
            f"{linear}.qzeros": packed(zero_points(codes, 2 ** (_AWQ_BITS - 1))),
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
