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
from typing import Any, ClassVar

from qaudit.core.floats import MX_GROUP, NV_GROUP, SQUARE, Float8Codes, MxFloat4Codes, NvFloat4Codes
from qaudit.core.stored import Codes, IntegerCodes, StoredWeight
from qaudit.errors import SchemeError
from qaudit.formats.activations import Rounding
from qaudit.formats.compressed_tensors.floats import packed_floats, read_floats, read_fp4
from qaudit.formats.compressed_tensors.groups import (
    group_of,
    planned_bits,
    planned_rounding,
    rounding_of,
)
from qaudit.formats.compressed_tensors.integers import read_bytes, read_words, signed_bytes, words
from qaudit.formats.floats import FLOATS
from qaudit.formats.packing import (
    Document,
    Format,
    Runtime,
    declared_bits,
    declared_group,
    integer_codes,
    schemes_of,
)
from qaudit.formats.reading import Layout, Reader, StoredLinear, contradiction, whole_number
from qaudit.settings import EXAMPLE_SCHEME
from qaudit.support.lazy import Tensor

_READERS: Mapping[str, Callable[[StoredLinear, Mapping[str, Any]], Layout]] = {
    "pack-quantized": read_words,
    "int-quantized": read_bytes,
    "float-quantized": read_floats,
    "nvfp4-pack-quantized": read_fp4,
    "mxfp4-pack-quantized": read_fp4,
}
_OF_ANY = ("naive-quantized", "mixed-precision")


def layout(parts: StoredLinear) -> Layout:
    """Choose the reader by the dtypes of the tensors, and hold the configuration against both."""
    group = group_of(parts)
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
    rounding = rounding_of(group)
    known = parts.scaled(rounding) if isinstance(rounding, Rounding) else None
    linear = _READERS[stored_form](parts, weights)
    planned = whole_number(weights, "num_bits", low=1, high=16)
    if planned not in (None, linear.bits):
        raise contradiction(
            f"the quantization configuration has {planned} bits, and `{parts.name}` is stored "
            f"in {linear.bits}"
        )
    return replace(linear, rounding=known)


def _form(parts: StoredLinear) -> str:
    if ".weight_packed" not in parts.infos:
        of_bytes = parts.must_hold(".weight", "I8", *FLOATS) == "I8"
        return "int-quantized" if of_bytes else "float-quantized"
    if parts.must_hold(".weight_packed", "I32", "U8") == "I32":
        return "pack-quantized"
    scales = parts.must_hold(".weight_scale", "F8_E4M3", "U8", "F8_E8M0")
    return "nvfp4-pack-quantized" if scales == "F8_E4M3" else "mxfp4-pack-quantized"


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
    bits=planned_bits,
    rounding=planned_rounding,
)  # fmt: skip


_FLOATS: tuple[Codes, ...] = ("float8", "nv-float4", "mx-float4")
_LIBRARY = "with compressed-tensors 0.18"


class CompressedTensors(Format):
    """Files that transformers, vLLM and SGLang load through compressed-tensors."""

    name: ClassVar[str] = "compressed-tensors"
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

    @property
    def _rounds_inputs(self) -> bool:
        return self.scheme.layout is not None and self.scheme.layout.rounds_inputs

    def pack(self, linear: str, stored: StoredWeight) -> dict[str, Tensor]:
        self._must_be_run_so(linear, stored)
        if isinstance(stored, Float8Codes | MxFloat4Codes | NvFloat4Codes):
            parts = packed_floats(stored)
        elif isinstance(stored, IntegerCodes) and self._rounds_inputs:
            parts = signed_bytes(stored)
        else:
            parts = words(integer_codes(linear, stored, self.scheme, self.name))
        return {f"{linear}.{name}": one.cpu().contiguous() for name, one in parts.items()}

    def _must_be_run_so(self, linear: str, stored: StoredWeight) -> None:
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
