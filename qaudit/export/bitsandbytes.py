"""bitsandbytes files: NF4, FP4 and int8 as `Linear4bit` and `Linear8bitLt` save them.

4 bits  weight uint8 (bytes, 1), .absmax, .quant_map, .nested_* and .quant_state (JSON as bytes)
8 bits  weight int8 (R, C), SCB fp32 (R), weight_format uint8 () = 0
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from qaudit.core.bnb_codes import FourBitCodes, Int8Codes, parts_of
from qaudit.core.stored import StoredWeight
from qaudit.errors import SchemeError
from qaudit.export.formats import Document, Format, Runtime, schemes_of

if TYPE_CHECKING:
    from torch import Tensor

_MAXIMA = ("absmax", "quant_map")
_NESTED = ("nested_absmax", "nested_quant_map")


class Bitsandbytes(Format):
    """Files that transformers and SGLang load through bitsandbytes."""

    name: ClassVar[str] = "bnb"
    reader: ClassVar[str] = "bitsandbytes"

    @property
    def runtimes(self) -> tuple[Runtime, ...]:
        return (
            Runtime("transformers", "5.0", "with bitsandbytes 0.48"),
            Runtime("SGLang", "0.5.23"),
        )

    def pack(self, linear: str, stored: StoredWeight) -> dict[str, Tensor]:
        import torch

        if isinstance(stored, Int8Codes):
            return {
                f"{linear}.weight": stored.codes_RC.cpu(),
                f"{linear}.SCB": stored.absmax_R.cpu(),
                f"{linear}.weight_format": torch.tensor(0, dtype=torch.uint8),
            }
        if not isinstance(stored, FourBitCodes):
            raise SchemeError(
                f"`{self.scheme.short}` stores no codes of bitsandbytes, which `bnb` holds",
                hint=f"export it as `compressed-tensors`, or a scheme {schemes_of('bitsandbytes')}",
            )
        parts = {f"{linear}.weight.{name}": part.cpu() for name, part in parts_of(stored).items()}
        return {f"{linear}.weight": stored.packed.cpu(), **parts}

    def config(self, unquantized: tuple[str, ...], *, symmetric: bool) -> Document:
        kind = self.scheme.layout.kind if self.scheme.layout else ""
        four = kind != "int8"
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": four,
            "load_in_8bit": not four,
            "_load_in_4bit": four,
            "_load_in_8bit": not four,
            "bnb_4bit_quant_type": kind if four else "fp4",
            "bnb_4bit_use_double_quant": bool(getattr(self.scheme, "double_quant", False)),
            "bnb_4bit_compute_dtype": "bfloat16" if four else "float32",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_threshold": float(getattr(self.scheme, "threshold", 6.0)),
            "llm_int8_skip_modules": list(unquantized),
            "llm_int8_has_fp16_weight": False,
            "llm_int8_enable_fp32_cpu_offload": False,
        }
