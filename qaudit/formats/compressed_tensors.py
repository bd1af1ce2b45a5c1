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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, ClassVar

from qaudit.core.floats import MX_GROUP, NV_GROUP, SQUARE, Float8Codes, MxFloat4Codes, NvFloat4Codes
from qaudit.core.linears import IntegerCodes, StoredWeight
from qaudit.errors import SchemeError
from qaudit.formats import arithmetic, packing, reading
from qaudit.formats.arithmetic import FLOATS, fp4, without_zeros
from qaudit.formats.packing import Document
from qaudit.settings import EXAMPLE_SCHEME
from qaudit.support.lazy import Tensor, torch

Table = Mapping[str, Any]

_OF_ANY = ("naive-quantized", "mixed-precision")
_CLASSES = frozenset({"Linear", "Embedding"})
"""What a group's `targets` names for all modules that no other group names."""

_ROUNDINGS: Mapping[tuple[object, ...], tuple[reading.Kind, int | None]] = {
    ("float", 8, "token", True): ("fp8", None),
    ("float", 8, "group", True): ("fp8 by 128", SQUARE),
    ("float", 8, "tensor", False): ("fp8 fixed", None),
    ("int", 8, "token", True): ("int8", None),
    ("int", 8, "tensor", False): ("int8 fixed", None),
    ("float", 4, "tensor_group", "local"): ("nvfp4", NV_GROUP),
    ("float", 4, "group", True): ("mxfp4", MX_GROUP),
}
"""Activations that are run: type, bits, strategy and whether scales are dynamic; and the group."""


def _groups_of(config: reading.Config) -> list[Table]:
    groups = config.get("config_groups")
    tables = groups.values() if isinstance(groups, Mapping) else ()
    return [table for table in tables if isinstance(table, Mapping)]


def _bits_in(config: reading.Config) -> int | None:
    """Return the bits of the first group that says them, or what older versions wrote for all."""
    weights = (table.get("weights") for table in _groups_of(config))
    tables = (table if isinstance(table, Mapping) else config for table in weights)
    return next(filter(None, map(reading.bits_in, tables)), None)


def _group_of(parts: reading.StoredLinear) -> Table:
    """Return the group of a linear: the one that names it, or the one of its class."""
    base, tables = parts.name.removesuffix(".weight"), _groups_of(parts.config)

    def names(table: Table, key: str) -> bool:
        """Return whether a list has the name of the linear or a pattern of it, and no class."""
        for text in map(str, table[key] if isinstance(table.get(key), list) else ()):
            pattern = text.removeprefix("re:")
            if pattern == base if pattern == text else reading.matches(pattern, base):
                return True
        return False

    if not tables:
        raise reading.contradiction("the quantization configuration has no `config_groups`")
    if names(parts.config, "ignore"):
        raise reading.contradiction(
            f"`ignore` names `{base[:60]}`, whose weight is stored quantized"
        )
    named = [table for table in tables if names(table, "targets")]
    for table in named or tables:
        targets = table.get("targets")
        of_class = isinstance(targets, list) and _CLASSES.intersection(map(str, targets))
        if (named or of_class) and isinstance(table.get("weights"), Mapping):
            return table
    raise reading.contradiction(
        f"no group of the quantization configuration has `targets` for `{base[:60]}`, whose "
        "weight is stored quantized"
    )


def rounding_of(table: Table) -> reading.Rounding | str | None:
    """Return the rounding of a group, or the name of one that is not run."""
    inputs = table.get("input_activations")
    if not isinstance(inputs, Mapping):
        return None
    kind, bits = str(inputs.get("type") or "int"), inputs.get("num_bits")
    strategy, dynamic = str(inputs.get("strategy") or ""), inputs.get("dynamic")
    key = (kind, bits, strategy, "local" if dynamic == "local" else bool(dynamic))
    rounding, size = _ROUNDINGS.get(key, (None, None))
    usual = inputs.get("symmetric", True) and inputs.get("actorder") is None
    if rounding is None or not usual or inputs.get("group_size") not in (None, size):
        return f"{bits}-bit {kind}, {'dynamic' if dynamic else 'fixed'} by {strategy or 'tensor'}"
    return reading.Rounding(rounding)


def layout(parts: reading.StoredLinear) -> reading.Layout:
    """Choose the reader by the dtypes of the tensors, and hold the configuration against both."""
    group = _group_of(parts)
    weights, kind = group["weights"], "float"
    if ".weight_packed" not in parts.infos:
        kind = "int" if parts.dtype(".weight", "I8", *FLOATS) == "I8" else "float"
        stored_form = f"{kind}-quantized"
    elif parts.dtype(".weight_packed", "I32", "U8") == "I32":
        kind, stored_form = "int", "pack-quantized"
    else:
        scales = parts.dtype(".weight_scale", "F8_E4M3", "U8", "F8_E8M0")
        stored_form = f"{'nv' if scales == 'F8_E4M3' else 'mx'}fp4-pack-quantized"
    for planned, stored in (
        (group.get("format") or parts.config.get("format"), stored_form),
        (weights.get("type"), kind),
    ):
        if isinstance(planned, str) and planned not in (stored, *_OF_ANY):
            raise reading.contradiction(
                f"the quantization configuration has `{planned}`, and `{parts.name}` is stored as "
                f"`{stored}`"
            )
    rounding = parts.scaled(rounding_of(group))
    linear = _LAYOUTS[stored_form](parts, weights)
    parts.must_have(linear.bits, reading.bits_in(weights))
    return replace(linear, rounding=rounding)


def _groups(parts: reading.StoredLinear, rows: int) -> int:
    """Return how many scales a row has; a scale of the whole tensor is one of every row."""
    parts.dtype(".weight_scale", *reading.SCALES)
    shape = parts.infos[".weight_scale"].shape
    if prod(shape) == 1:
        return 1
    stored = {".weight_scale": ("R" if len(shape) == 1 else "R G", reading.SCALES)}
    return parts.sizes(stored, "`weight_packed`", R=rows).get("G", 1)


def _integers(
    parts: reading.StoredLinear,
    weights: Table,
    shape: tuple[int, int],
    bits: int,
    stored: tuple[str, int, Callable[[Tensor, int], Tensor]],
) -> reading.Layout:
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
        zeros_RG = None if zeros is None else zeros.reshape(-1, groups).expand(rows, -1)
        scales_RG = read[".weight_scale"].reshape(-1, groups).expand(rows, -1)
        group_of_C = arithmetic.in_order(columns, size)
        if middle and order is not None and int(order.max()) >= 0:  # -1 everywhere: no order
            group_of_C = arithmetic.indexed(parts.name, order, groups)
        how = (zeros_RG, middle, symmetric)
        return arithmetic.affine(parts.name, codes(read[key], columns), scales_RG, group_of_C, how)

    return reading.Layout(shape, bits, decode, size)


def _words(parts: reading.StoredLinear, weights: Table) -> reading.Layout:
    bits = reading.whole_number(weights, "num_bits", low=1, high=8)
    if bits is None or bits < 2:
        what = f"the group of `{parts.name}` packs {bits} bits; 2 to 8 are read"
        raise reading.contradiction(what)
    stored = {".weight_packed": ("R W", reading.INT32), ".weight_shape": ("T", ("I64", "I32"))}
    sizes = parts.sizes(stored, "a matrix", T=2)
    rows, words, raw = sizes["R"], sizes["W"], parts.raw(".weight_shape")
    middle = len(raw) // 2
    named, columns = (int.from_bytes(half, "little") for half in (raw[:middle], raw[middle:]))
    if named != rows or not 0 < columns < 1 << 40:
        raise parts.refused(f"has a `weight_shape` of {[named, columns]}, and {rows} rows of words")
    dense, per_word = -(-columns * bits // 32) == words, 32 // bits
    if not dense and -(-columns // per_word) != words:
        raise reading.contradiction(
            f"the quantization configuration has {bits} bits, and `{parts.name}` has {words} "
            f"words for {columns} columns"
        )
    zeros = -(-rows * bits // 32) if dense else -(-rows // per_word)
    beside = {".weight_zero_point?": ("Z G", reading.INT32), ".weight_g_idx?": ("C", ())}
    parts.sizes(beside, "`weight_packed`", Z=zeros, G=_groups(parts, rows), C=columns)
    if ".weight_g_idx" not in parts.infos and weights.get("actorder") in ("group", "dynamic"):
        raise parts.refused("has no `weight_g_idx`, and the configuration orders columns by group")

    unpacked = arithmetic.unpack if dense else arithmetic.unpack_padded
    codes = (".weight_packed", 2 ** (bits - 1), lambda packed, n: unpacked(packed, bits, n))
    return _integers(parts, weights, (rows, columns), bits, codes)


def _bytes(parts: reading.StoredLinear, weights: Table) -> reading.Layout:
    rows, columns = parts.sizes({".weight": ("R C", ("I8",))}).values()
    if ".weight_zero_point" in parts.infos:
        scales = prod(parts.infos[".weight_scale"].shape)
        parts.must_count(".weight_zero_point", scales, "I8", "I32")
    return _integers(parts, weights, (rows, columns), 8, (".weight", 0, lambda codes, _: codes))


def _floats(parts: reading.StoredLinear, weights: Table) -> reading.Layout:
    rows, columns = parts.sizes({".weight": ("R C", FLOATS)}).values()
    parts.dtype(".weight_scale", *reading.SCALES)
    structure = weights.get("block_structure")
    if prod(parts.infos[".weight_scale"].shape) == 1:
        block = (rows, columns)
    elif isinstance(structure, list):
        block = reading.pair_of(structure, "block_structure")
        parts.blocks({".weight_scale": ("D A", reading.SCALES)}, block, (rows, columns))
    else:
        block = (1, parts.group(columns, _groups(parts, rows), weights))

    def decode(read: Mapping[str, Tensor]) -> Tensor:
        return arithmetic.in_blocks(parts.name, read[".weight"], read[".weight_scale"], block)

    return reading.Layout((rows, columns), 8, without_zeros(parts, decode))


_LAYOUTS: Mapping[str, Callable[[reading.StoredLinear, Table], reading.Layout]] = {
    "pack-quantized": _words,
    "int-quantized": _bytes,
    "float-quantized": _floats,
    "nvfp4-pack-quantized": fp4,
    "mxfp4-pack-quantized": fp4,
}
FORMAT = reading.Reader(
    "compressed-tensors",
    (".weight_packed", ".weight_scale"),
    (
        ".weight", ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape",
        ".weight_g_idx", ".weight_global_scale", ".input_scale", ".input_global_scale",
    ),
    layout,
    ignored=(".input_zero_point", ".output_scale", ".k_scale", ".v_scale"),
    aliases=("compressed_tensors",),
    bits=_bits_in,
    rounding=lambda config: next((r for t in _groups_of(config) if (r := rounding_of(t))), None),
)  # fmt: skip


def _arg(bits: int, kind: str, strategy: str, **more: Any) -> Document:
    usual = {"symmetric": True, "strategy": strategy, "dynamic": False}
    return {"num_bits": bits, "type": kind, **usual, **more}


_NV, _MX = (
    {"scale_dtype": f"torch.{dtype}", "zp_dtype": f"torch.{dtype}", "group_size": size}
    for dtype, size in (("float8_e4m3fn", NV_GROUP), ("uint8", MX_GROUP))
)
_WRITTEN: Mapping[str, tuple[str, Document, Document]] = {
    "squares": (
        "float-quantized",
        _arg(8, "float", "block", block_structure=[SQUARE, SQUARE]),
        _arg(8, "float", "group", group_size=SQUARE, dynamic=True),
    ),
    "float8": (
        "float-quantized", _arg(8, "float", "channel"), _arg(8, "float", "token", dynamic=True)
    ),
    "integers": ("int-quantized", _arg(8, "int", "channel"), _arg(8, "int", "token", dynamic=True)),
    "nv-float4": (
        "nvfp4-pack-quantized", _arg(4, "float", "tensor_group", **_NV),
        _arg(4, "float", "tensor_group", **_NV, dynamic="local"),
    ),
    "mx-float4": (
        "mxfp4-pack-quantized", _arg(4, "float", "group", **_MX),
        _arg(4, "float", "group", **_MX, dynamic=True),
    ),
}  # fmt: skip
"""The format, and the arguments of weights and of inputs, by codes that are no packed integers."""


class CompressedTensors(packing.Format):
    """Files that transformers, vLLM and SGLang load through compressed-tensors."""

    name: ClassVar[str] = "compressed-tensors"
    mixes_bits: ClassVar[bool] = True
    loaded_by: ClassVar[packing.Programs] = {"transformers": ("compressed-tensors",), "vllm": ()}
    reader = FORMAT

    @property
    def runtimes(self) -> tuple[packing.Runtime, ...]:
        form, remark = self._arguments(symmetric=True)[0], "with compressed-tensors 0.18"
        if form == "pack-quantized":
            return (
                packing.Runtime("transformers", "5.0", f"{remark}; zero points: dequantize=True"),
                packing.Runtime("vLLM", "0.33", "2 to 8 bits"),
                packing.Runtime("SGLang", "0.5.23", "4 and 8 bits"),
            )
        if getattr(self.scheme, "scale_dtype", "bf16") == "float32":
            remark += "; rounds the scales of weights unless dtype=float32"
        if "fp4" in form:
            remark += "; in bfloat16"
        rounded = "" if self.scheme.act_bits is None else ", with its activations"
        return (
            packing.Runtime("transformers", "5.0", remark),
            packing.Runtime("vLLM", "0.33", f"{form}{rounded}"),
        )

    def snippet(self, place: str, model: str, config: Document) -> str:
        weights = config["config_groups"]["group_0"]["weights"]
        if weights["type"] == "float" or weights["symmetric"]:
            return super().snippet(place, model, config)
        dequantized = ", quantization_config=CompressedTensorsConfig(dequantize=True)"
        return packing.TRANSFORMERS.format(
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
            parts = {"weight_packed": stored.codes_RC[:, ::2] | (stored.codes_RC[:, 1::2] << 4)}
            if isinstance(stored, MxFloat4Codes):
                parts["weight_scale"] = stored.exponents_RG
            else:
                parts["weight_scale"] = stored.scales_RG
                # The linears of a group share one scale, which each has a copy of in the file.
                parts["weight_global_scale"] = stored.tensor_scale.reshape(1).clone()
                if stored.input_scale is not None:
                    parts["input_global_scale"] = stored.input_scale.reshape(1).clone()
        elif isinstance(stored, IntegerCodes) and self._rounds_inputs:
            signed_RC = stored.codes_RC.to(torch.int16) - 2 ** (stored.bits - 1)
            parts = {"weight": signed_RC.to(torch.int8), "weight_scale": stored.scales_RG}
        else:
            codes = packing.integer_codes(linear, stored, self)
            if self.scheme.mixes_bits and codes.zeros_RG is not None:
                raise SchemeError(
                    f"`{self.scheme.short}` has zero points, with which transformers decodes "
                    "linears of several widths by the width of one",
                    hint="export it with `--format gptq` or `--format mlx`, or scan and export a "
                    "mixture without zero points",
                )
            parts = {
                "weight_packed": arithmetic.pack(codes.codes_RC.cpu(), codes.bits),
                "weight_scale": codes.scales_RG,
                "weight_shape": torch.tensor(codes.codes_RC.shape, dtype=torch.int64),
            }
            if codes.zeros_RG is not None:
                zeros_GR = codes.zeros_RG.cpu().T.contiguous()
                parts["weight_zero_point"] = arithmetic.pack(zeros_GR, codes.bits).T
        return {f"{linear}.{name}": part.cpu().contiguous() for name, part in parts.items()}

    def _must_be_run_so(self, linear: str, stored: StoredWeight) -> None:
        scheme = self.scheme
        if isinstance(stored, Float8Codes | MxFloat4Codes | NvFloat4Codes) and not scheme.layout:
            raise SchemeError(
                f"`{scheme.short}` rotates what its linears read, which no runtime of "
                "compressed-tensors does here",
                hint=f"export {packing.schemes_of('float8', 'nv-float4', 'mx-float4')}, without "
                "rotate=true",
            )
        if scheme.act_bits is not None and getattr(scheme, "rule", "even") != "even":
            raise SchemeError(
                f"`{scheme.short}` rounds activations by another rule than runtimes of "
                "compressed-tensors do",
                hint="scan with rule=even, or weights alone: "
                f"{packing.schemes_of('mx-float4', rounds_inputs=False)}:rule=floor",
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
                hint=f"export {packing.schemes_of('float8')} or {EXAMPLE_SCHEME}:group=-1, which "
                "have a scale for each row",
            )

    def config(self, outside: Sequence[str], symmetric: bool, dtype: str = "float32") -> Document:
        form, weights, inputs = self._arguments(symmetric)
        if len({bits for name, bits in self.mixed.items() if ".experts." in name}) > 1:
            raise SchemeError(
                f"`{self.scheme.short}` has experts of several widths, which transformers decodes "
                "by the width of one, and vLLM refuses in a layer",
                hint="scan and export it without tie=none, or with a table that has one for all",
            )
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
            for bits, patterns in packing.patterns_of(self.mixed).items()
        ] or [linears]
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {f"group_{k}": group for k, group in enumerate(groups)},
            "ignore": list(outside),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    def _arguments(self, symmetric: bool) -> tuple[str, Document, Document | None]:
        layout, group = self.scheme.layout, packing.declared_group(self.scheme)
        codes = layout.codes if layout else "integers"
        if codes != "integers" or self._rounds_inputs:
            squares = layout is not None and layout.squares
            form, weights, inputs = _WRITTEN["squares" if squares else codes]
            return form, weights, inputs if self._rounds_inputs else None
        bits, strategy = int(self.scheme.bit_class), "channel" if group == -1 else "group"
        size = {} if group == -1 else {"group_size": group}
        return "pack-quantized", _arg(bits, "int", strategy, symmetric=symmetric, **size), None
