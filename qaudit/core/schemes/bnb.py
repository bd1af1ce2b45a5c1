"""bitsandbytes: NF4, FP4 and LLM.int8, by bitsandbytes' own code.

NF4 and FP4 (Dettmers et al., "QLoRA", 2305.14314) look up each weight, divided by the largest
magnitude of its block, in a table of 16 values. Blocks run over the flattened weight and do
not stop at the end of a row. Double quantization stores the block maxima in 8 bits themselves.
Codes and maxima are those of `Linear4bit`, and bitsandbytes itself turns them back into weights.
Given up: the rounding of any particular 4-bit matmul kernel (the one for AVX512-BF16 CPUs, for
example, computes in bf16 whatever the dtype of the model).

LLM.int8 (Dettmers et al., 2208.07339) quantizes activations too: per token, in the forward
pass, except for columns in which any token of the batch reaches `threshold`, which stay in
the dtype of the model. So the scheme returns its own forward, which is `Linear8bitLt` in
evaluation mode. Which columns are outliers depends on the tokens that share a batch; that is
how bitsandbytes works and is not fixed here.

Weights in float64, which bitsandbytes does not take, are rounded to float32 first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from qaudit.core.bnb_codes import (
    BLOCKSIZES,
    FourBitCodes,
    Int8Codes,
    NestedMaxima,
    library,
    without_warning,
)
from qaudit.core.linears import CodeLayout, Linears, Quantized, decoded, refuse_nonfinite
from qaudit.core.scheme import Scheme, limited, one_of
from qaudit.errors import SourceError
from qaudit.support.lazy import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class FourBit(Scheme):
    """Base of both 4-bit tables: blocks of the flattened weight, one maximum each."""

    code_bits: ClassVar[int | None] = 4
    layout: ClassVar[CodeLayout]

    blocksize: int = limited(
        64,
        one_of("blocksize", BLOCKSIZES, "a blocksize of {} does not exist in bitsandbytes"),
    )
    double_quant: bool = False

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        stored = {}
        for name, weight_RC in linears.weights.items():
            # Two codes share a byte: an odd number of weights would go through torch.compile, while
            # a zero behind the last one changes no block's maximum.
            flat = weight_RC.detach().reshape(1, -1)
            flat = torch.nn.functional.pad(flat, (0, flat.numel() % 2))
            packed, state = library().functional.quantize_4bit(
                flat.float() if flat.dtype == torch.float64 else flat,
                blocksize=self.blocksize,
                compress_statistics=self.double_quant,
                quant_type=self.layout.kind,
            )
            maxima = None
            if self.double_quant:
                maxima = NestedMaxima(state.state2.absmax, state.state2.code, state.offset)
            table = (state.code, self.layout.kind, self.blocksize)
            stored[name] = FourBitCodes(
                packed, state.absmax, *table, weight_RC.shape, state.dtype, maxima
            )
        return decoded(linears, stored)


@dataclass(frozen=True, kw_only=True)
class Nf4(FourBit):
    """Look weights up in the 16 quantiles of a normal distribution (bitsandbytes NF4)."""

    name: ClassVar[str] = "bnb-nf4"
    layout: ClassVar[CodeLayout] = CodeLayout("bitsandbytes", kind="nf4")


@dataclass(frozen=True, kw_only=True)
class Fp4(FourBit):
    """Look weights up in the 16 values of a 4-bit float (bitsandbytes FP4)."""

    name: ClassVar[str] = "bnb-fp4"
    layout: ClassVar[CodeLayout] = CodeLayout("bitsandbytes", kind="fp4")


@dataclass(frozen=True, kw_only=True)
class Int8(Scheme):
    """Multiply 8-bit weights and 8-bit activations, outlier columns apart (LLM.int8)."""

    name: ClassVar[str] = "bnb-int8"
    code_bits: ClassVar[int | None] = 8

    threshold: float = limited(
        6.0,
        (
            lambda size: size >= 0,
            "a threshold of {} is out of range",
            "use 0 for no outlier columns, or a positive magnitude such as 6.0",
        ),
    )

    layout: ClassVar[CodeLayout] = CodeLayout("bitsandbytes", kind="int8")

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        stored = {}
        for name, weight_RC in linears.weights.items():
            # bitsandbytes zeroes and restores outliers in place: not in the caller's tensor.
            half_RC = weight_RC.detach().to(torch.float16, copy=True).contiguous()
            if not torch.isfinite(half_RC).all():
                raise SourceError(
                    f"the weight of `{name}` holds numbers too large for float16",
                    hint="bitsandbytes' int8 goes through float16; leave bnb-int8 out",
                )
            codes_RC, absmax_R, _ = library().functional.int8_vectorwise_quant(half_RC)
            stored[name] = Int8Codes(codes_RC, absmax_R)
        notes = ("outlier columns are found per batch, as in bitsandbytes",)
        forwards = {name: partial(self._multiply, codes) for name, codes in stored.items()}
        return decoded(linears, stored, notes if self.threshold else (), forwards=forwards)

    def _multiply(self, codes: Int8Codes, x: Tensor) -> Tensor:
        """Do what the forward of `Linear8bitLt` does in evaluation mode, without a bias."""
        bitsandbytes = library()
        state = bitsandbytes.MatmulLtState()
        state.CB, state.SCB = codes.codes_RC, codes.absmax_R
        state.has_fp16_weights = state.is_training = False
        state.threshold = self.threshold
        with without_warning("bitsandbytes.autograd._functions", "MatMul8bitLt: inputs will be"):
            output: Tensor = bitsandbytes.matmul(x, codes.codes_RC, state=state)
        return output
