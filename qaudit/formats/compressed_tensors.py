"""compressed-tensors: integers of 2 to 8 bits, W8A8, FP8, NVFP4 and MXFP4.

    pack-quantized        weight_packed int32 (R, words of C codes), weight_scale bf16 (R, G),
                          weight_shape int64 (2,); with zero points weight_zero_point int32
                          (words of R codes, G)
    int-quantized         weight int8 (R, C), weight_scale fp32 (R, 1)
    float-quantized       weight e4m3 (R, C), weight_scale fp32 (R, 1), or one of each square of 128
    nvfp4-pack-quantized  weight_packed uint8 (R, C / 2), weight_scale e4m3 (R, G),
                          weight_global_scale fp32 (1,), input_global_scale where inputs are rounded
    mxfp4-pack-quantized  weight_packed uint8 (R, C / 2), weight_scale uint8 (R, G), an exponent

Words run without gaps, as compressed-tensors 0.18 and later packs them; earlier versions pad
3-bit codes and read other weights. Of two 4-bit floats the first is in the low half of a byte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from qaudit.core.floats import MX_GROUP, NV_GROUP, SQUARE, Float8Codes, MxFloat4Codes, NvFloat4Codes
from qaudit.core.stored import Codes, IntegerCodes, StoredWeight
from qaudit.errors import SchemeError
from qaudit.formats.activations import Rounding, of_group
from qaudit.formats.arithmetic import (
    in_order,
    indexed,
    pack,
    power_of_two,
    scaled,
    unpack,
    unpack_fp4,
    unpack_padded,
    wide,
)
from qaudit.formats.floats import FLOATS, from_floats
from qaudit.formats.packing import (
    Document,
    Format,
    Runtime,
    declared_bits,
    declared_group,
    integer_codes,
    schemes_of,
)
from qaudit.formats.reading import (
    SCALES,
    Config,
    Layout,
    Reader,
    StoredLinear,
    bits_in,
    contradiction,
    group_size,
    must_be_group,
    refused,
    whole_number,
)
from qaudit.settings import EXAMPLE_SCHEME

if TYPE_CHECKING:
    from torch import Tensor

_NVFP4_GROUP, _MXFP4_GROUP = 16, 32
_CLASSES = frozenset({"Linear", "Embedding"})
"""What a group's `targets` names for all modules that no other group names."""


def layout(parts: StoredLinear) -> Layout:
    """Tell the formats apart by the dtypes of their tensors."""
    group = _group(parts)
    rounding = of_group(group)
    known = rounding.of(parts) if isinstance(rounding, Rounding) else None
    stored = _stored(parts, group["weights"])
    planned = whole_number(group["weights"], "num_bits", low=1, high=16)
    if planned not in (None, stored.bits):
        raise contradiction(
            f"the quantization configuration has {planned} bits, and `{parts.name}` is stored "
            f"in {stored.bits}"
        )
    return replace(stored, rounding=known)


def _stored(parts: StoredLinear, arguments: Mapping[str, Any]) -> Layout:
    if ".weight_packed" not in parts.infos:
        if parts.must_hold(".weight", "I8", *FLOATS) == "I8":
            return _whole_bytes(parts, arguments)
        return _floats(parts, arguments)
    if parts.must_hold(".weight_packed", "I32", "U8") == "U8":
        return _fp4(parts)
    return _integers(parts, arguments)


def _group(parts: StoredLinear) -> Mapping[str, Any]:
    """Return the group that a linear belongs to, with its table of `weights`."""
    base = parts.name.removesuffix(".weight")
    tables = _groups_of(parts.config)
    if not tables:
        raise contradiction("the quantization configuration has no `config_groups`")
    ignored = parts.config.get("ignore")
    if any(_names(base, one) for one in (ignored if isinstance(ignored, list) else ())):
        raise contradiction(f"`ignore` names `{base[:60]}`, whose weight is stored quantized")
    named = [group for group in tables if any(_names(base, one) for one in _targets(group))]
    of_class = [group for group in tables if _CLASSES.intersection(map(str, _targets(group)))]
    for group in named or of_class:
        if isinstance(group.get("weights"), Mapping):
            return group
    raise contradiction(
        f"no group of the quantization configuration has `targets` for `{base[:60]}`, whose "
        "weight is stored quantized"
    )


def _targets(group: Mapping[str, Any]) -> list[Any]:
    targets = group.get("targets")
    return targets if isinstance(targets, list) else []


def _names(base: str, target: object) -> bool:
    """Return whether a target is the name of a linear or a pattern of it, and no class."""
    pattern = str(target).removeprefix("re:")
    if pattern == str(target):
        return pattern == base
    try:
        return re.match(pattern, base) is not None
    except re.error as error:
        raise contradiction(f"`{pattern[:60]}` is no pattern: {error}") from error


# ------------------------------------------------------------------------------- integers


def _integers(parts: StoredLinear, arguments: Mapping[str, Any]) -> Layout:
    bits = whole_number(arguments, "num_bits", low=1, high=8)
    if bits is None or bits < 2:
        raise contradiction(f"the group of `{parts.name}` packs {bits} bits; 2 to 8 are read")
    parts.must_hold(".weight_scale", *SCALES)
    rows, words = parts.shape(".weight_packed", 2)
    groups = _groups(parts, rows)
    columns = _shape(parts, rows)
    dense = -(-columns * bits // 32) == words
    if not dense and -(-columns // (32 // bits)) != words:
        raise contradiction(
            f"the quantization configuration has {bits} bits, and `{parts.name}` has {words} "
            f"words for {columns} columns"
        )
    if ".weight_zero_point" in parts.infos:
        parts.must_hold(".weight_zero_point", "I32")
        packed = -(-rows * bits // 32) if dense else -(-rows // (32 // bits))
        parts.must_be(".weight_zero_point", (packed, groups), "`weight_packed`")
    elif not arguments.get("symmetric", True):
        raise parts.refused("has no `weight_zero_point`, and the configuration has zero points")
    if ".weight_g_idx" in parts.infos:
        parts.must_be(".weight_g_idx", (columns,), "`weight_packed`")
    size = group_size(parts, columns, groups)
    must_be_group(parts, columns, size, arguments)
    symmetric = bool(arguments.get("symmetric", True))
    shape = (bits, dense, rows, columns, size)
    decode = partial(_decode_integers, parts.name, shape, symmetric)
    return Layout((rows, columns), bits, decode, size)


def _groups(parts: StoredLinear, rows: int) -> int:
    """Return how many scales a row has; a scale of the whole tensor is one of every row."""
    shape = parts.infos[".weight_scale"].shape
    if prod(shape) == 1:
        return 1
    if len(shape) == 1:
        parts.must_be(".weight_scale", (rows,), "`weight_packed`")
        return 1
    groups = parts.shape(".weight_scale", 2)[1]
    parts.must_be(".weight_scale", (rows, groups), "`weight_packed`")
    return groups


def _shape(parts: StoredLinear, rows: int) -> int:
    """Return the columns of packed words, which are stored beside them."""
    parts.must_hold(".weight_shape", "I64", "I32")
    parts.must_be(".weight_shape", (2,), "a matrix")
    raw = parts.raw(".weight_shape")
    stored = [int.from_bytes(raw[at : at + len(raw) // 2], "little") for at in (0, len(raw) // 2)]
    if stored[0] != rows or not 0 < stored[1] < 1 << 40:
        raise parts.refused(f"has a `weight_shape` of {stored}, and {rows} rows of words")
    return stored[1]


def _decode_integers(
    name: str,
    shape: tuple[int, bool, int, int, int],
    symmetric: bool,
    read: Mapping[str, Tensor],
) -> Tensor:
    bits, dense, rows, columns, size = shape
    codes = unpack if dense else unpack_padded
    scales = read[".weight_scale"]
    groups = scales.shape[1] if scales.dim() > 1 else 1
    scales_RG = scales.reshape(-1, groups).expand(rows, -1)
    group_of_C = in_order(columns, size)
    order = read.get(".weight_g_idx")
    if order is not None and int(order.max()) >= 0:  # -1 everywhere: no order
        group_of_C = indexed(name, order, scales_RG.shape[1])
    centered_RC = codes(read[".weight_packed"], bits, columns).float()
    if ".weight_zero_point" in read:
        zeros_RG = codes(read[".weight_zero_point"].T.contiguous(), bits, rows).T.float()
        _must_be_central(name, zeros_RG - 2 ** (bits - 1), symmetric)
        centered_RC.sub_(zeros_RG.index_select(1, group_of_C))
    else:
        centered_RC.sub_(2 ** (bits - 1))
    return scaled(name, centered_RC, scales_RG, group_of_C)


def _must_be_central(name: str, zeros: Tensor, symmetric: bool) -> None:
    """Refuse zero points that libraries leave out, because the configuration has none."""
    if symmetric and bool(zeros.any()):
        raise contradiction(
            f"the quantization configuration is `symmetric`, and `{name}` has zero points"
        )


def _whole_bytes(parts: StoredLinear, arguments: Mapping[str, Any]) -> Layout:
    parts.must_hold(".weight_scale", *SCALES)
    rows, columns = parts.shape(".weight", 2)
    groups = _groups(parts, rows)
    if ".weight_zero_point" in parts.infos:
        parts.must_hold(".weight_zero_point", "I8", "I32")
        if prod(parts.infos[".weight_zero_point"].shape) != prod(
            parts.infos[".weight_scale"].shape
        ):
            raise parts.refused("has another number of zero points than of scales")
    elif not arguments.get("symmetric", True):
        raise parts.refused("has no `weight_zero_point`, and the configuration has zero points")
    size = group_size(parts, columns, groups)
    must_be_group(parts, columns, size, arguments)
    symmetric = bool(arguments.get("symmetric", True))
    return Layout((rows, columns), 8, partial(_decode_bytes, parts.name, size, symmetric), size)


def _decode_bytes(name: str, size: int, symmetric: bool, read: Mapping[str, Tensor]) -> Tensor:
    centered_RC = read[".weight"].float()
    rows, columns = centered_RC.shape
    group_of_C = in_order(columns, size)
    scales = read[".weight_scale"]
    groups = scales.shape[1] if scales.dim() > 1 else 1
    scales_RG = scales.reshape(-1, groups).expand(rows, -1)
    if ".weight_zero_point" in read:
        zeros_RG = read[".weight_zero_point"].float().reshape(-1, groups).expand(rows, -1)
        _must_be_central(name, zeros_RG, symmetric)
        centered_RC.sub_(zeros_RG.index_select(1, group_of_C))
    return scaled(name, centered_RC, scales_RG, group_of_C)


# --------------------------------------------------------------------------------- floats


def _floats(parts: StoredLinear, arguments: Mapping[str, Any]) -> Layout:
    rows, columns = parts.shape(".weight", 2)
    parts.must_hold(".weight_scale", *SCALES)
    shape = parts.infos[".weight_scale"].shape
    structure = arguments.get("block_structure")
    if prod(shape) == 1:
        block = (rows, columns)
    elif isinstance(structure, list) and all(type(one) is int and one > 0 for one in structure):
        if len(structure) != 2:
            raise contradiction(f"`block_structure` is `{str(structure)[:40]}`")
        block = (structure[0], structure[1])
        needed = (-(-rows // block[0]), -(-columns // block[1]))
        parts.must_be(".weight_scale", needed, f"blocks of {block[0]} by {block[1]}")
    else:
        block = (1, -(-columns // _groups(parts, rows)))
    decode = partial(from_floats, parts.name, block, (".weight", ".weight_scale"))
    return Layout((rows, columns), 8, decode)


def _fp4(parts: StoredLinear) -> Layout:
    """NVFP4 has 8-bit float scales below a scale of the tensor, MXFP4 exponents."""
    rows, nbytes = parts.shape(".weight_packed", 2)
    columns = 2 * nbytes
    kind = parts.must_hold(".weight_scale", "F8_E4M3", "U8", "F8_E8M0")
    size = _NVFP4_GROUP if kind == "F8_E4M3" else _MXFP4_GROUP
    parts.must_be(".weight_scale", (rows, -(-columns // size)), f"groups of {size}")
    if kind == "F8_E4M3":
        parts.must_hold(".weight_global_scale", "F32")
        if prod(parts.infos[".weight_global_scale"].shape) != 1:
            raise parts.refused("has more than one `weight_global_scale`")
    return Layout((rows, columns), 4, partial(_decode_fp4, parts.name, size), size)


def _decode_fp4(name: str, size: int, read: Mapping[str, Tensor]) -> Tensor:
    import torch

    weight_RC = unpack_fp4(read[".weight_packed"])
    scales_RG = read[".weight_scale"]
    if scales_RG.dtype == torch.float8_e4m3fn:
        whole = wide(read[".weight_global_scale"], name).reshape(())
        if not float(whole):
            raise refused(name, "has a `weight_global_scale` of zero")
        scales_RG = wide(scales_RG, name) / whole
    else:
        scales_RG = power_of_two(scales_RG)
    return scaled(name, weight_RC, scales_RG, in_order(weight_RC.shape[1], size))


def _groups_of(config: Config) -> list[Mapping[str, Any]]:
    groups = config.get("config_groups")
    tables = groups.values() if isinstance(groups, Mapping) else ()
    return [table for table in tables if isinstance(table, Mapping)]


def _planned_bits(config: Config) -> int | None:
    """Return the bits of the first group that has any."""
    weights = [table.get("weights") for table in _groups_of(config)]
    counts = (bits_in(table if isinstance(table, Mapping) else config) for table in weights)
    return next((bits for bits in counts if bits is not None), None)


def _planned_rounding(config: Config) -> Rounding | str | None:
    """Return the first rounding of activations that a group names."""
    kinds = (of_group(table) for table in _groups_of(config))
    return next((kind for kind in kinds if kind is not None), None)


FORMAT = Reader(
    "compressed-tensors",
    (".weight_packed", ".weight_scale"),
    (
        ".weight", ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape",
        ".weight_g_idx", ".weight_global_scale", ".input_scale", ".input_global_scale",
    ),
    layout,
    ignored=(".input_zero_point", ".output_scale", ".k_scale", ".v_scale"),
    aliases=("compressed_tensors",),
    bits=_planned_bits,
    rounding=_planned_rounding,
)  # fmt: skip


_FLOATS: tuple[Codes, ...] = ("float8", "nv-float4", "mx-float4")
_LIBRARY = "with compressed-tensors 0.18"


class CompressedTensors(Format):
    """Files that transformers, vLLM and SGLang load through compressed-tensors."""

    name: ClassVar[str] = "compressed-tensors"
    reader = FORMAT

    @property
    def runtimes(self) -> tuple[Runtime, ...]:
        form, _, _ = self._arguments(symmetric=True)
        if form == "pack-quantized":
            return (
                Runtime("transformers", "5.0", f"{_LIBRARY}; zero points: dequantize=True"),
                Runtime("vLLM", "0.33", "2 to 8 bits"),
                Runtime("SGLang", "0.5.23", "4 and 8 bits"),
            )
        remark = _LIBRARY
        if getattr(self.scheme, "scale_dtype", "bf16") == "float32":
            remark += "; rounds the scales of weights unless dtype=float32"
        if "fp4" in form:
            remark += "; in bfloat16"
        rounded = "" if self.scheme.act_bits is None else ", with its activations"
        return (Runtime("transformers", "5.0", remark), Runtime("vLLM", "0.33", f"{form}{rounded}"))

    @property
    def _rounds_inputs(self) -> bool:
        return self.scheme.layout is not None and self.scheme.layout.rounds_inputs

    def pack(self, linear: str, stored: StoredWeight) -> dict[str, Tensor]:
        self._must_be_run_so(linear, stored)
        if isinstance(stored, Float8Codes):
            parts = {"weight": stored.codes_RC, "weight_scale": stored.scales}
        elif isinstance(stored, NvFloat4Codes):
            parts = _nvfp4(stored)
        elif isinstance(stored, MxFloat4Codes):
            parts = {"weight_packed": _halves(stored.codes_RC), "weight_scale": stored.exponents_RG}
        elif isinstance(stored, IntegerCodes) and self._rounds_inputs:
            parts = _bytes(stored)
        else:
            parts = _words(integer_codes(linear, stored, self.scheme, self.name))
        return {f"{linear}.{name}": one.cpu().contiguous() for name, one in parts.items()}

    def _must_be_run_so(self, linear: str, stored: StoredWeight) -> None:
        """Refuse what no runtime computes as it was measured."""
        scheme = self.scheme
        floats = isinstance(stored, Float8Codes | MxFloat4Codes | NvFloat4Codes)
        if floats and scheme.layout is None:
            raise SchemeError(
                f"`{scheme.short}` rotates what its linears read, which no runtime of "
                "compressed-tensors does here",
                hint=f"export {schemes_of(*_FLOATS)}, without rotate=true",
            )
        if scheme.act_bits is not None and getattr(scheme, "rule", "even") != "even":
            raise SchemeError(
                f"`{scheme.short}` rounds activations by another rule than runtimes of "
                "compressed-tensors do",
                hint="scan with rule=even, or weights alone: "
                f"{schemes_of('mx-float4', rounds_inputs=False)}:rule=floor",
            )
        codes_RC = getattr(stored, "codes_RC", None)
        sizes = {MxFloat4Codes: (1, MX_GROUP), NvFloat4Codes: (1, NV_GROUP)}
        block = sizes.get(type(stored), (1, 1))
        if isinstance(stored, Float8Codes) and stored.squares:
            block = (SQUARE, SQUARE)
        if codes_RC is None or not any(
            side % size for side, size in zip(codes_RC.shape, block, strict=True)
        ):
            return
        of = f"{block[0]} x {block[1]}" if block[0] > 1 else f"{block[1]} columns"
        raise SchemeError(
            f"blocks of {of} do not fill `{linear}`, which is "
            f"{' x '.join(map(str, codes_RC.shape))}, and runtimes read full blocks alone",
            hint=f"export {schemes_of('float8')} or {EXAMPLE_SCHEME}:group=-1, which have a scale "
            "for each row",
        )

    def config(self, unquantized: tuple[str, ...], *, symmetric: bool) -> Document:
        form, weights, inputs = self._arguments(symmetric)
        linears = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
            "format": form,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": linears},
            "ignore": list(unquantized),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    def _arguments(self, symmetric: bool) -> tuple[str, Document, Document | None]:
        """Return the format, and what compressed-tensors needs to know of weights and inputs."""
        layout, group = self.scheme.layout, declared_group(self.scheme)
        codes = layout.codes if layout else "integers"
        if codes == "float8" and layout and layout.squares:
            squares = _arg(8, "float", "block", block_structure=[SQUARE, SQUARE])
            inputs = _arg(8, "float", "group", group_size=SQUARE, dynamic=True)
            return "float-quantized", squares, inputs
        if codes == "float8" or (codes == "integers" and self._rounds_inputs):
            kind = "float" if codes == "float8" else "int"
            rows = _arg(8, kind, "channel")
            return f"{kind}-quantized", rows, _arg(8, kind, "token", dynamic=True)
        if codes == "nv-float4":
            e4m3 = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
            four = _arg(4, "float", "tensor_group", group_size=NV_GROUP, **e4m3)
            rounded = {**four, "dynamic": "local"} if self._rounds_inputs else None
            return "nvfp4-pack-quantized", four, rounded
        if codes == "mx-float4":
            exponents = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
            four = _arg(4, "float", "group", group_size=MX_GROUP, **exponents)
            rounded = {**four, "dynamic": True} if self._rounds_inputs else None
            return "mxfp4-pack-quantized", four, rounded
        weights = _arg(declared_bits(self.scheme), "int", "channel" if group == -1 else "group")
        weights["symmetric"] = symmetric
        if group != -1:
            weights["group_size"] = group
        return "pack-quantized", weights, None


def _arg(bits: int, kind: str, strategy: str, **more: Any) -> Document:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "dynamic": False,
        **more,
    }


def _words(codes: IntegerCodes) -> dict[str, Tensor]:
    import torch

    parts = {
        "weight_packed": pack(codes.codes_RC.cpu(), codes.bits),
        "weight_scale": codes.scales_RG,
        "weight_shape": torch.tensor(codes.codes_RC.shape, dtype=torch.int64),
    }
    if codes.zeros_RG is not None:
        zeros_GR = codes.zeros_RG.cpu().T.contiguous()
        parts["weight_zero_point"] = pack(zeros_GR, codes.bits).T
    return parts


def _bytes(codes: IntegerCodes) -> dict[str, Tensor]:
    import torch

    signed_RC = (codes.codes_RC.to(torch.int16) - 2 ** (codes.bits - 1)).to(torch.int8)
    return {"weight": signed_RC, "weight_scale": codes.scales_RG}


def _nvfp4(codes: NvFloat4Codes) -> dict[str, Tensor]:
    # The linears of a group share one scale, which each has a copy of in the file.
    parts = {
        "weight_packed": _halves(codes.codes_RC),
        "weight_scale": codes.scales_RG,
        "weight_global_scale": codes.tensor_scale.reshape(1).clone(),
    }
    if codes.input_scale is not None:
        parts["input_global_scale"] = codes.input_scale.reshape(1).clone()
    return parts


def _halves(codes_RC: Tensor) -> Tensor:
    """Return two 4-bit codes in a byte."""
    return codes_RC[:, ::2] | (codes_RC[:, 1::2] << 4)
