"""AWQ, in AutoAWQ's GEMM layout of 4 bits, groups and zero points.

qweight  int32 (C, R / 8)   eight rows in a word, as nibbles 0 2 4 6 1 3 5 7
qzeros   int32 (G, R / 8)   the same order
scales   fp16 (G, R)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from qaudit.core.linears import StoredWeight
from qaudit.formats import packing, reading
from qaudit.formats.arithmetic import affine, in_order, pack, unpack
from qaudit.formats.packing import Document
from qaudit.support.lazy import Tensor

_BITS, _PER_WORD = 4, 8
_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight neighbours is in nibble 0, 1, ... of a word


def _awq(parts: reading.StoredLinear) -> reading.Layout:
    name, config = parts.name, parts.config
    version = str(config.get("version") or "gemm").lower()
    if version != "gemm":
        raise reading.contradiction(
            f"AWQ's layout `{version[:40]}` is not read; it is `gemm` alone"
        )
    planned = reading.whole_number(config, "bits", "w_bit", low=2, high=8)
    if planned not in (None, _BITS):
        raise reading.contradiction(
            f"the quantization configuration has {planned} bits, and AWQ packs 4"
        )
    columns, words = parts.sizes({".qweight": ("C W", reading.INT32)}).values()
    rows = words * _PER_WORD
    stored = {".scales": ("G R", reading.SCALES), ".qzeros?": ("G W", reading.INT32)}
    groups = parts.sizes(stored, "`qweight`", R=rows, W=words)["G"]
    if ".qzeros" not in parts.infos and config.get("zero_point", True):
        raise parts.refused("has no `qzeros`, and the configuration has zero points")
    size = parts.group(columns, groups, config)
    symmetric = "`zero_point: false`" if config.get("zero_point") is False else ""

    def codes(words_NW: Tensor) -> Tensor:
        eights = unpack(words_NW, _BITS, rows).view(len(words_NW), -1, 8)
        codes_NR: Tensor = eights[..., [_ORDER.index(k) for k in range(8)]].flatten(1)
        return codes_NR.T.contiguous()

    def decode(read: Mapping[str, Tensor]) -> Tensor:
        zeros_RG = codes(read[".qzeros"]) if ".qzeros" in read else None
        zeros = (zeros_RG, 2 ** (_BITS - 1), symmetric)
        group_of_C = in_order(columns, size)
        return affine(name, codes(read[".qweight"]), read[".scales"].T, group_of_C, zeros)

    return reading.Layout((rows, columns), _BITS, decode, size)


class AwqFiles(packing.Format):
    """Files that vLLM, SGLang and transformers load as AWQ."""

    name: ClassVar[str] = "awq"
    loading: ClassVar[str] = packing.GPTQMODEL
    loaded_by: ClassVar[packing.Programs] = {"gptqmodel": (), "vllm": ()}
    reader = reading.Reader(
        "awq",
        (".qweight",),
        (".qweight", ".qzeros", ".scales"),
        _awq,
        older="quant_config.json",
        bits=lambda config: _BITS,
    )
    runtimes = (
        packing.Runtime("vLLM", "0.33"),
        packing.Runtime("SGLang", "0.5.23"),
        packing.Runtime("GPTQModel", "7.6", "backend awq_torch computes with these very weights"),
        packing.Runtime("transformers", "5.0", "with gptqmodel"),
    )

    def pack(self, linear: str, stored: StoredWeight) -> dict[str, Tensor]:
        codes = packing.integer_codes(linear, stored, self.scheme, self.name)
        rows = len(codes.codes_RC)
        if codes.bits != _BITS:
            raise packing.unfit(
                f"`awq` files have 4 bits, and `{self.scheme.short}` has {codes.bits}",
                ", which has 2 to 8",
            )
        if rows % _PER_WORD:
            raise packing.unfit(f"`{linear}` has {rows} rows, and `awq` files hold multiples of 8")

        def packed(values_RN: Tensor) -> Tensor:
            return pack(
                values_RN.T.reshape(values_RN.shape[1], -1, 8)[..., _ORDER].flatten(1), _BITS
            )

        return {
            f"{linear}.qweight": packed(codes.codes_RC.cpu()),
            f"{linear}.qzeros": packed(packing.zero_points(codes, 2 ** (_BITS - 1))),
            f"{linear}.scales": packing.half_scales(linear, codes).T.contiguous(),
        }

    def config(self, outside: Sequence[str], symmetric: bool, dtype: str = "float32") -> Document:
        return {
            "quant_method": "awq",
            "bits": _BITS,
            "group_size": packing.declared_group(self.scheme),
            "zero_point": True,  # zero points are in the file, equal ones for symmetric codes
            "version": "gemm",
            "modules_to_not_convert": list(outside),
        }
