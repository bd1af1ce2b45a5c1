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

from typing import TYPE_CHECKING, Any, ClassVar

from qaudit.checkpoints.quantized.arithmetic import pack
from qaudit.core.floats import MX_GROUP, NV_GROUP, SQUARE, Float8Codes, MxFloat4Codes, NvFloat4Codes
from qaudit.core.stored import Codes, IntegerCodes, StoredWeight
from qaudit.errors import SchemeError
from qaudit.export.formats import (
    Document,
    Format,
    Runtime,
    declared_bits,
    declared_group,
    integer_codes,
    schemes_of,
)
from qaudit.settings import EXAMPLE_SCHEME

if TYPE_CHECKING:
    from torch import Tensor


_FLOATS: tuple[Codes, ...] = ("float8", "nv-float4", "mx-float4")
_LIBRARY = "with compressed-tensors 0.18"


class CompressedTensors(Format):
    """Files that transformers, vLLM and SGLang load through compressed-tensors."""

    name: ClassVar[str] = "compressed-tensors"
    reader: ClassVar[str] = "compressed-tensors"

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
