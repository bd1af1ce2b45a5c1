"""GPTQ, as GPTQModel and AutoGPTQ have it, and AWQ: integers in 32-bit words, scales by group.

GPTQ's codes are packed along the input and zero points along the output. Version 1 stores a zero
point less one, so that zero wraps around, and every loader reads it: symmetric codes are written
so. Zero points need v2, which stores them as they are. The bits of each linear follow from its
shapes; those of a mixture are rules of `dynamic`, too. bfloat16 scales from 2^-17 up are exact in
float16.

    qweight  int32 (words of C codes, R)
    qzeros   int32 (G, words of R zeros)   v1 stores zero - 1, v2 the zero itself
    scales   fp16 (G, R)
    g_idx    int32 (C,), the group of each column

AWQ is in AutoAWQ's GEMM layout of 4 bits, groups and zero points.

    qweight  int32 (C, R / 8)   eight rows in a word, as nibbles 0 2 4 6 1 3 5 7
    qzeros   int32 (G, R / 8)   the same order
    scales   fp16 (G, R)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from qaudit.core.linears import StoredWeight
from qaudit.formats import packing, reading
from qaudit.formats.arithmetic import affine, in_order, indexed, pack, unpack
from qaudit.formats.packing import Document
from qaudit.support.lazy import Tensor, torch
from qaudit.version import __version__


def _gptq(parts: reading.StoredLinear) -> reading.Layout:
    name, config, dynamic = parts.name, parts.config, parts.config.get("dynamic")
    rules = dynamic if isinstance(dynamic, Mapping) else {}
    for rule in rules:
        if rule.startswith("-:") and reading.matches(rule[2:], name.removesuffix(".weight")):
            raise reading.contradiction(
                f"`dynamic` leaves `{name}` dense by `{rule[:60]}`, and it is stored quantized"
            )

    def decides(key: str, value: bool) -> bool:
        ruled = any(isinstance(rule, Mapping) and key in rule for rule in rules.values())
        return config.get(key) is value and not ruled

    version = str(config.get("checkpoint_format") or config.get("format") or "").lower()
    if version not in ("", "gptq", "gptq_v2"):
        raise reading.contradiction(f"the checkpoint format `{version[:40]}` of GPTQ is not known")
    stored = {
        ".qweight": ("W R", reading.INT32),
        ".scales": ("G R", reading.SCALES),
        ".qzeros": ("G Z", reading.INT32),
    }
    words, rows, groups, packed = parts.sizes(stored).values()
    bits = packed * 32 // rows
    if bits not in (2, 3, 4, 8) or bits * rows != packed * 32 or words * 32 % bits:
        raise parts.refused(
            f"packs {rows} zero points in {packed} words, which no number of bits does"
        )
    columns = words * 32 // bits
    if ".g_idx" not in parts.infos and decides("desc_act", True):
        raise parts.refused("has no `g_idx`, and the configuration has `desc_act: true`")
    parts.sizes({".g_idx?": ("C", ("I32", "I64"))}, f"{bits}-bit `qweight`", C=columns)
    parts.must_have(bits, None if dynamic else reading.bits_in(config))
    size = parts.group(columns, groups, {} if dynamic else config)
    symmetric = "`sym: true`" if decides("sym", True) else ""

    def decode(read: Mapping[str, Tensor]) -> Tensor:
        zeros_RG = unpack(read[".qzeros"], bits, rows).T
        if version != "gptq_v2":
            zeros_RG = (zeros_RG.float() + 1) % 2**bits
        group_of_C = in_order(columns, size)
        if ".g_idx" in read:
            stored_C = indexed(name, read[".g_idx"], groups)
            if decides("desc_act", False) and not torch.equal(stored_C, group_of_C):
                raise reading.contradiction(  # some runtimes leave it out
                    "the quantization configuration has `desc_act: false`, and the `g_idx` of "
                    f"`{name}` is in another order than its columns"
                )
            group_of_C = stored_C
        codes_RC = unpack(read[".qweight"].T.contiguous(), bits, columns)
        zeros = (zeros_RG, 2 ** (bits - 1), symmetric)
        return affine(name, codes_RC, read[".scales"].T, group_of_C, zeros)

    return reading.Layout((rows, columns), bits, decode, size)


class GptqFiles(packing.Format):
    """Files that GPTQModel, transformers, vLLM and SGLang load as GPTQ."""

    name: ClassVar[str] = "gptq"
    widths: ClassVar[tuple[int, ...]] = (3, 4, 8)
    mixes_bits: ClassVar[bool] = True
    loading: ClassVar[str] = packing.GPTQMODEL
    loaded_by: ClassVar[packing.Programs] = {"gptqmodel": (), "vllm": ()}
    reader = reading.Reader(
        "gptq",
        (".qweight",),
        (".qweight", ".qzeros", ".scales", ".g_idx"),
        _gptq,
        older="quantize_config.json",
    )
    config_files: ClassVar[tuple[str, ...]] = ("quantize_config.json",)
    runtimes = (
        packing.Runtime("GPTQModel", "7.6", "backend gptq_torch computes with these very weights"),
        packing.Runtime("transformers", "5.0", "with gptqmodel and optimum"),
        packing.Runtime("vLLM", "0.33", "4 and 8 bits, symmetric, groups of 32, 64, 128 or rows"),
        packing.Runtime("SGLang", "0.5.23", "4 and 8 bits, symmetric"),
    )

    def pack(self, linear: str, stored: StoredWeight) -> dict[str, Tensor]:
        codes = packing.integer_codes(linear, stored, self)
        rows, columns = codes.codes_RC.shape
        if rows % 32 or columns % 32:  # kernels read so many at once
            raise packing.unfit(
                f"`{linear}` is {rows} x {columns}, and `gptq` files hold multiples of 32"
            )
        zeros_RG = packing.zero_points(codes, 2 ** (codes.bits - 1) - 1)  # of version 1
        return {
            f"{linear}.qweight": pack(codes.codes_RC.cpu(), codes.bits).T.contiguous(),
            f"{linear}.qzeros": pack(zeros_RG.T.contiguous(), codes.bits),
            f"{linear}.scales": packing.half_scales(linear, codes).T.contiguous(),
            f"{linear}.g_idx": torch.arange(columns, dtype=torch.int32) // codes.group,
        }

    def config(self, outside: Sequence[str], symmetric: bool, dtype: str = "float32") -> Document:
        rules = {
            f"+:{pattern}": {"bits": bits}
            for bits, patterns in packing.patterns_of(self.mixed).items()
            for pattern in patterns
        }
        return {
            "quant_method": "gptq",
            "bits": int(self.scheme.bit_class),
            "group_size": packing.declared_group(self.scheme),
            "desc_act": False,
            "sym": symmetric,
            "lm_head": False,
            "checkpoint_format": "gptq" if symmetric else "gptq_v2",
            "pack_dtype": "int32",
            **({"dynamic": rules} if rules else {}),
            "meta": {"quantizer": [f"qaudit:{__version__}"]},
        }


_BITS, _PER_WORD = 4, 8
_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight neighbours is in nibble 0, 1, ... of a word


def _awq(parts: reading.StoredLinear) -> reading.Layout:
    name, config = parts.name, parts.config
    version = str(config.get("version") or "gemm").lower()
    if version != "gemm":
        raise reading.contradiction(
            f"AWQ's layout `{version[:40]}` is not read; it is `gemm` alone"
        )
    parts.must_have(_BITS, reading.bits_in(config))
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
    widths: ClassVar[tuple[int, ...]] = (_BITS,)
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
        codes = packing.integer_codes(linear, stored, self)
        rows = len(codes.codes_RC)
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
