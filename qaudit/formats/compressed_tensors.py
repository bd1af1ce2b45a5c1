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

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any, ClassVar

from qaudit.core.floats import MX_GROUP, NV_GROUP, SQUARE, Float8Codes, MxFloat4Codes, NvFloat4Codes
from qaudit.core.linears import IntegerCodes, StoredWeight
from qaudit.errors import SchemeError
from qaudit.formats.activations import Kind, Rounding
from qaudit.formats.arithmetic import (
    affine,
    in_blocks,
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
from qaudit.formats.floats import FLOATS
from qaudit.formats.packing import (
    TRANSFORMERS,
    Document,
    Format,
    Runtime,
    declared_bits,
    declared_group,
    integer_codes,
    patterns_of,
    schemes_of,
)
from qaudit.formats.reading import (
    INT32,
    SCALES,
    Config,
    Decode,
    Layout,
    Reader,
    StoredLinear,
    bits_in,
    contradiction,
    matches,
    pair_of,
    whole_number,
)
from qaudit.settings import EXAMPLE_SCHEME
from qaudit.support.lazy import Tensor, torch

Table = Mapping[str, Any]

_OF_ANY = ("naive-quantized", "mixed-precision")
_CLASSES = frozenset({"Linear", "Embedding"})
"""What a group's `targets` names for all modules that no other group names."""

_ROUNDINGS: Mapping[tuple[object, ...], tuple[Kind, int | None]] = {
    ("float", 8, "token", True): ("fp8", None),
    ("float", 8, "group", True): ("fp8 by 128", SQUARE),
    ("float", 8, "tensor", False): ("fp8 fixed", None),
    ("int", 8, "token", True): ("int8", None),
    ("int", 8, "tensor", False): ("int8 fixed", None),
    ("float", 4, "tensor_group", "local"): ("nvfp4", NV_GROUP),
    ("float", 4, "group", True): ("mxfp4", MX_GROUP),
}
"""Activations that are run: type, bits, strategy and whether scales are dynamic; and the group."""


def _groups_of(config: Config) -> list[Table]:
    groups = config.get("config_groups")
    tables = groups.values() if isinstance(groups, Mapping) else ()
    return [table for table in tables if isinstance(table, Mapping)]


def _group_of(parts: StoredLinear) -> Table:
    """Return the group of a linear: the one that names it, or the one of its class."""
    base, tables = parts.name.removesuffix(".weight"), _groups_of(parts.config)

    def names(table: Table, key: str) -> bool:
        """Return whether a list has the name of the linear or a pattern of it, and no class."""
        for text in map(str, table[key] if isinstance(table.get(key), list) else ()):
            pattern = text.removeprefix("re:")
            if pattern == base if pattern == text else matches(pattern, base):
                return True
        return False

    if not tables:
        raise contradiction("the quantization configuration has no `config_groups`")
    if names(parts.config, "ignore"):
        raise contradiction(f"`ignore` names `{base[:60]}`, whose weight is stored quantized")
    named = [table for table in tables if names(table, "targets")]
    for table in named or tables:
        targets = table.get("targets")
        of_class = isinstance(targets, list) and _CLASSES.intersection(map(str, targets))
        if (named or of_class) and isinstance(table.get("weights"), Mapping):
            return table
    raise contradiction(
        f"no group of the quantization configuration has `targets` for `{base[:60]}`, whose "
        "weight is stored quantized"
    )


def _planned_bits(config: Config) -> int | None:
    weights = [table.get("weights") for table in _groups_of(config)]
    counts = (bits_in(table if isinstance(table, Mapping) else config) for table in weights)
    return next((bits for bits in counts if bits is not None), None)


def _planned_rounding(config: Config) -> Rounding | str | None:
    kinds = (rounding_of(table) for table in _groups_of(config))
    return next((kind for kind in kinds if kind is not None), None)


def rounding_of(table: Table) -> Rounding | str | None:
    """Return the rounding of a group, or the name of one that is not run."""
    own = table.get("input_activations")
    if not isinstance(own, Mapping):
        return None
    kind, bits = str(own.get("type") or "int"), own.get("num_bits")
    strategy, dynamic = str(own.get("strategy") or ""), own.get("dynamic")
    key = (kind, bits, strategy, "local" if dynamic == "local" else bool(dynamic))
    known, size = _ROUNDINGS.get(key, (None, None))
    usual = own.get("symmetric", True) and own.get("actorder") is None
    if known is None or not usual or own.get("group_size") not in (None, size):
        return f"{bits}-bit {kind}, {'dynamic' if dynamic else 'fixed'} by {strategy or 'tensor'}"
    return Rounding(known)


def layout(parts: StoredLinear) -> Layout:
    """Choose the reader by the dtypes of the tensors, and hold the configuration against both."""
    group = _group_of(parts)
    weights, stored_form = group["weights"], _form(parts)
    kind = "int" if stored_form in ("pack-quantized", "int-quantized") else "float"
    for planned, stored in (
        (group.get("format") or parts.config.get("format"), stored_form),
        (weights.get("type"), kind),
    ):
        if isinstance(planned, str) and planned not in (stored, *_OF_ANY):
            raise contradiction(
                f"the quantization configuration has `{planned}`, and `{parts.name}` is stored as "
                f"`{stored}`"
            )
    known = parts.scaled(rounding_of(group))
    linear = _LAYOUTS[stored_form](parts, weights)
    parts.must_have(linear.bits, whole_number(weights, "num_bits", low=1, high=16))
    return replace(linear, rounding=known)


def _form(parts: StoredLinear) -> str:
    if ".weight_packed" not in parts.infos:
        of_bytes = parts.dtype(".weight", "I8", *FLOATS) == "I8"
        return "int-quantized" if of_bytes else "float-quantized"
    if parts.dtype(".weight_packed", "I32", "U8") == "I32":
        return "pack-quantized"
    scales = parts.dtype(".weight_scale", "F8_E4M3", "U8", "F8_E8M0")
    return "nvfp4-pack-quantized" if scales == "F8_E4M3" else "mxfp4-pack-quantized"


def _groups(parts: StoredLinear, rows: int) -> int:
    """Return how many scales a row has; a scale of the whole tensor is one of every row."""
    parts.dtype(".weight_scale", *SCALES)
    shape = parts.infos[".weight_scale"].shape
    if prod(shape) == 1:
        return 1
    sides = "R" if len(shape) == 1 else "R G"
    return parts.sizes({".weight_scale": (sides, SCALES)}, "`weight_packed`", R=rows).get("G", 1)


def _integers(
    parts: StoredLinear,
    weights: Table,
    shape: tuple[int, int],
    bits: int,
    stored: tuple[str, int, Callable[[Tensor, int], Tensor]],
) -> Layout:
    """Return the layout of integers: the key of codes, their middle, and what makes codes of it."""
    key, middle, codes = stored
    rows, columns = shape
    groups = _groups(parts, rows)
    symmetric = "`symmetric: true`" if weights.get("symmetric", True) else ""
    if not symmetric and ".weight_zero_point" not in parts.infos:
        raise parts.refused("has no `weight_zero_point`, and the configuration has zero points")
    size = parts.group(columns, groups, weights)

    def decode(read: Mapping[str, Tensor]) -> Tensor:
        zeros, order = read.get(".weight_zero_point"), read.get(".weight_g_idx")
        if zeros is not None and middle:
            zeros = codes(zeros.T.contiguous(), rows).T
        of_rows = [
            None if one is None else one.reshape(-1, groups).expand(rows, -1)
            for one in (zeros, read[".weight_scale"])
        ]
        zeros_RG, scales_RG = of_rows
        assert scales_RG is not None
        group_of_C = in_order(columns, size)
        if middle and order is not None and int(order.max()) >= 0:  # -1 everywhere: no order
            group_of_C = indexed(parts.name, order, groups)
        how = (zeros_RG, middle, symmetric)
        return affine(parts.name, codes(read[key], columns), scales_RG, group_of_C, how)

    return Layout(shape, bits, decode, size)


def _words(parts: StoredLinear, weights: Table) -> Layout:
    bits = whole_number(weights, "num_bits", low=1, high=8)
    if bits is None or bits < 2:
        raise contradiction(f"the group of `{parts.name}` packs {bits} bits; 2 to 8 are read")
    stored = {".weight_packed": ("R W", INT32), ".weight_shape": ("T", ("I64", "I32"))}
    sizes = parts.sizes(stored, "a matrix", T=2)
    rows, words, raw = sizes["R"], sizes["W"], parts.raw(".weight_shape")
    middle = len(raw) // 2
    named, columns = (int.from_bytes(half, "little") for half in (raw[:middle], raw[middle:]))
    if named != rows or not 0 < columns < 1 << 40:
        raise parts.refused(f"has a `weight_shape` of {[named, columns]}, and {rows} rows of words")
    dense, per_word = -(-columns * bits // 32) == words, 32 // bits
    if not dense and -(-columns // per_word) != words:
        raise contradiction(
            f"the quantization configuration has {bits} bits, and `{parts.name}` has {words} "
            f"words for {columns} columns"
        )
    zeros = -(-rows * bits // 32) if dense else -(-rows // per_word)
    beside = {".weight_zero_point?": ("Z G", INT32), ".weight_g_idx?": ("C", ())}
    known = {"Z": zeros, "G": _groups(parts, rows), "C": columns}
    parts.sizes(beside, "`weight_packed`", **known)
    if ".weight_g_idx" not in parts.infos and weights.get("actorder") in ("group", "dynamic"):
        raise parts.refused("has no `weight_g_idx`, and the configuration orders columns by group")

    def codes(packed: Tensor, count: int) -> Tensor:
        return (unpack if dense else unpack_padded)(packed, bits, count)

    how = (".weight_packed", 2 ** (bits - 1), codes)
    return _integers(parts, weights, (rows, columns), bits, how)


def _bytes(parts: StoredLinear, weights: Table) -> Layout:
    rows, columns = parts.sizes({".weight": ("R C", ("I8",))}).values()
    if ".weight_zero_point" in parts.infos:
        parts.dtype(".weight_zero_point", "I8", "I32")
        zeros, scales = (parts.infos[f".weight_{one}"].shape for one in ("zero_point", "scale"))
        if prod(zeros) != prod(scales):
            raise parts.refused("has another number of zero points than of scales")
    return _integers(parts, weights, (rows, columns), 8, (".weight", 0, lambda codes, _: codes))


def _of_floats(parts: StoredLinear, decode: Decode) -> Decode:
    """Decode floats; refuse zero points beside them, which libraries subtract or leave out."""

    def without_zeros(read: Mapping[str, Tensor]) -> Tensor:
        zeros = read.get(".weight_zero_point")
        if zeros is not None and bool(zeros.float().any()):
            raise parts.refused("has zero points, and is stored as floats, which have none")
        return decode(read)

    return without_zeros


def _floats(parts: StoredLinear, weights: Table) -> Layout:
    rows, columns = parts.sizes({".weight": ("R C", FLOATS)}).values()
    parts.dtype(".weight_scale", *SCALES)
    structure = weights.get("block_structure")
    if prod(parts.infos[".weight_scale"].shape) == 1:
        block = (rows, columns)
    elif isinstance(structure, list):
        block = pair_of(structure, "block_structure")
        known = {"D": -(-rows // block[0]), "A": -(-columns // block[1])}
        because = f"blocks of {block[0]} by {block[1]}"
        parts.sizes({".weight_scale": ("D A", SCALES)}, because, **known)
    else:
        block = (1, parts.group(columns, _groups(parts, rows), weights))

    def decode(read: Mapping[str, Tensor]) -> Tensor:
        return in_blocks(parts.name, read[".weight"], read[".weight_scale"], block)

    return Layout((rows, columns), 8, _of_floats(parts, decode))


def _fp4(parts: StoredLinear, weights: Table) -> Layout:
    """NVFP4 has 8-bit float scales below a scale of the tensor, MXFP4 exponents."""
    name, (rows, nbytes) = parts.name, parts.sizes({".weight_packed": ("R B", ("U8",))}).values()
    columns, is_nv = 2 * nbytes, parts.infos[".weight_scale"].dtype == "F8_E4M3"
    size = NV_GROUP if is_nv else MX_GROUP
    if columns % size:
        raise parts.refused(f"has {columns} columns, which groups of {size} do not fill")
    known = {"R": rows, "G": columns // size}
    parts.sizes({".weight_scale": ("R G", ())}, f"groups of {size}", **known)
    parts.group(columns, columns // size, weights)
    if is_nv:
        parts.dtype(".weight_global_scale", "F32")
        if prod(parts.infos[".weight_global_scale"].shape) != 1:
            raise parts.refused("has more than one `weight_global_scale`")

    def decode(read: Mapping[str, Tensor]) -> Tensor:
        scales_RG = read[".weight_scale"]
        if is_nv:
            whole = wide(read[".weight_global_scale"], name).reshape(())
            if not float(whole):
                raise parts.refused("has a `weight_global_scale` of zero")
            scales_RG = wide(scales_RG, name) / whole
        else:
            scales_RG = power_of_two(scales_RG)
        return scaled(name, unpack_fp4(read[".weight_packed"]), scales_RG, in_order(columns, size))

    return Layout((rows, columns), 4, _of_floats(parts, decode), size)


_LAYOUTS: Mapping[str, Callable[[StoredLinear, Table], Layout]] = {
    "pack-quantized": _words,
    "int-quantized": _bytes,
    "float-quantized": _floats,
    "nvfp4-pack-quantized": _fp4,
    "mxfp4-pack-quantized": _fp4,
}
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


_LIBRARY = "with compressed-tensors 0.18"


class CompressedTensors(Format):
    """Files that transformers, vLLM and SGLang load through compressed-tensors."""

    name: ClassVar[str] = "compressed-tensors"
    mixes_bits: ClassVar[bool] = True
    loaded_by: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "transformers": ("compressed-tensors",),
        "vllm": (),
    }
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

    def snippet(self, place: str, model: str, config: Document) -> str:
        weights = config["config_groups"]["group_0"]["weights"]
        if weights["type"] == "float" or weights["symmetric"]:
            return super().snippet(place, model, config)
        dequantized = ", quantization_config=CompressedTensorsConfig(dequantize=True)"
        return TRANSFORMERS.format(
            place=place, model=model, imports="CompressedTensorsConfig, ", options=dequantized
        )

    @property
    def _rounds_inputs(self) -> bool:
        return self.scheme.layout is not None and self.scheme.layout.rounds_inputs

    def pack(self, linear: str, stored: StoredWeight) -> dict[str, Tensor]:
        self._must_be_run_so(linear, stored)
        parts: dict[str, Tensor]
        if isinstance(stored, Float8Codes):
            parts = {"weight": stored.codes_RC, "weight_scale": stored.scales}
        elif isinstance(stored, MxFloat4Codes | NvFloat4Codes):
            parts = _float_parts(stored)
        elif isinstance(stored, IntegerCodes) and self._rounds_inputs:
            signed_RC = stored.codes_RC.to(torch.int16) - 2 ** (stored.bits - 1)
            parts = {"weight": signed_RC.to(torch.int8), "weight_scale": stored.scales_RG}
        else:
            parts = _integer_parts(integer_codes(linear, stored, self.scheme, self.name))
        return {f"{linear}.{name}": one.cpu().contiguous() for name, one in parts.items()}

    def _must_be_run_so(self, linear: str, stored: StoredWeight) -> None:
        scheme = self.scheme
        if isinstance(stored, Float8Codes | MxFloat4Codes | NvFloat4Codes) and not scheme.layout:
            raise SchemeError(
                f"`{scheme.short}` rotates what its linears read, which no runtime of "
                "compressed-tensors does here",
                hint=f"export {schemes_of('float8', 'nv-float4', 'mx-float4')}, without "
                "rotate=true",
            )
        if scheme.act_bits is not None and getattr(scheme, "rule", "even") != "even":
            raise SchemeError(
                f"`{scheme.short}` rounds activations by another rule than runtimes of "
                "compressed-tensors do",
                hint="scan with rule=even, or weights alone: "
                f"{schemes_of('mx-float4', rounds_inputs=False)}:rule=floor",
            )
        block = {MxFloat4Codes: (1, MX_GROUP), NvFloat4Codes: (1, NV_GROUP)}.get(type(stored))
        if isinstance(stored, Float8Codes) and stored.squares:
            block = (SQUARE, SQUARE)
        if block is None:
            return
        shape = stored.codes_RC.shape  # type: ignore[attr-defined]
        if any(side % size for side, size in zip(shape, block, strict=True)):
            of = f"{block[0]} x {block[1]}" if block[0] > 1 else f"{block[1]} columns"
            raise SchemeError(
                f"blocks of {of} do not fill `{linear}`, which is {' x '.join(map(str, shape))}, "
                "and runtimes read full blocks alone",
                hint=f"export {schemes_of('float8')} or {EXAMPLE_SCHEME}:group=-1, which have a "
                "scale for each row",
            )

    def config(
        self, unquantized: tuple[str, ...], *, symmetric: bool, dtype: str = "float32"
    ) -> Document:
        form, weights, inputs = self._arguments(symmetric)
        linears = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
            "format": form,
        }
        groups = [
            {
                **linears,
                "targets": [f"re:{pattern}" for pattern in patterns],
                "weights": {**weights, "num_bits": bits},
            }
            for bits, patterns in patterns_of(self.mixed).items()
        ] or [linears]
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {f"group_{k}": group for k, group in enumerate(groups)},
            "ignore": list(unquantized),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    def _arguments(self, symmetric: bool) -> tuple[str, Document, Document | None]:
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
    usual = {"symmetric": True, "strategy": strategy, "dynamic": False}
    return {"num_bits": bits, "type": kind, **usual, **more}


def _integer_parts(codes: IntegerCodes) -> dict[str, Tensor]:
    parts = {
        "weight_packed": pack(codes.codes_RC.cpu(), codes.bits),
        "weight_scale": codes.scales_RG,
        "weight_shape": torch.tensor(codes.codes_RC.shape, dtype=torch.int64),
    }
    if codes.zeros_RG is not None:
        zeros_GR = codes.zeros_RG.cpu().T.contiguous()
        parts["weight_zero_point"] = pack(zeros_GR, codes.bits).T
    return parts


def _float_parts(codes: MxFloat4Codes | NvFloat4Codes) -> dict[str, Tensor]:
    packed = codes.codes_RC[:, ::2] | (codes.codes_RC[:, 1::2] << 4)
    if isinstance(codes, MxFloat4Codes):
        return {"weight_packed": packed, "weight_scale": codes.exponents_RG}
    # The linears of a group share one scale, which each has a copy of in the file.
    scales = {"weight_global_scale": codes.tensor_scale, "input_global_scale": codes.input_scale}
    shared = {name: one.reshape(1).clone() for name, one in scales.items() if one is not None}
    return {"weight_packed": packed, "weight_scale": codes.scales_RG, **shared}
