"""bitsandbytes: NF4, FP4 and LLM.int8, by bitsandbytes' own code.

NF4 and FP4 (Dettmers et al., "QLoRA", 2305.14314) look up each weight, divided by the largest
magnitude of its block, in a table of 16 values. Blocks run over the flattened weight and do
not stop at the end of a row. Double quantization stores the block maxima in 8 bits themselves.
What is returned are the dequantized weights, bit for bit those of `Linear4bit`. Given up: the
rounding of any particular 4-bit matmul kernel (the one for AVX512-BF16 CPUs, for example,
computes in bf16 whatever the dtype of the model).

LLM.int8 (Dettmers et al., 2208.07339) quantizes activations too: per token, in the forward
pass, except for columns in which any token of the batch reaches `threshold`, which stay in
the dtype of the model. So the scheme returns its own forward, which is `Linear8bitLt` in
evaluation mode. Which columns are outliers depends on the tokens that share a batch; that is
how bitsandbytes works and is not fixed here.

Weights in float64, which bitsandbytes does not take, are rounded to float32 first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from qaudit.core.scheme import Linears, Quantized, Scheme, refuse_nonfinite
from qaudit.errors import MachineError, SchemeError, SourceError

if TYPE_CHECKING:
    from torch import Tensor

ABSMAX_BITS = 32
NESTED_ABSMAX_BITS = 8
NESTED_BLOCK = 256
BLOCKSIZES = (32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, kw_only=True)
class FourBit(Scheme):
    """Base of both 4-bit tables: blocks of the flattened weight, one maximum each."""

    code_bits: ClassVar[int | None] = 4
    blocksize: int = 64
    double_quant: bool = False

    def __post_init__(self) -> None:
        if self.blocksize not in BLOCKSIZES:
            raise SchemeError(
                f"a blocksize of {self.blocksize} does not exist in bitsandbytes",
                hint=f"use one of {', '.join(map(str, BLOCKSIZES))}",
            )

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        table = self.name.removeprefix("bnb-")
        weights = {
            name: _through_four_bits(weight_RC, table, self.blocksize, self.double_quant)
            for name, weight_RC in linears.weights.items()
        }
        bits = sum(self._storage_bits(weight.numel()) for weight in linears.weights.values())
        return Quantized(weights, bits)

    def _storage_bits(self, numbers: int) -> int:
        """Count codes and block maxima, nested ones with their own maxima and offset."""
        blocks = -(-numbers // self.blocksize)
        if not self.double_quant:
            return 4 * numbers + ABSMAX_BITS * blocks
        nested = ABSMAX_BITS * (-(-blocks // NESTED_BLOCK) + 1)
        return 4 * numbers + NESTED_ABSMAX_BITS * blocks + nested


@dataclass(frozen=True, kw_only=True)
class Nf4(FourBit):
    """Look weights up in the 16 quantiles of a normal distribution (bitsandbytes NF4)."""

    name: ClassVar[str] = "bnb-nf4"


@dataclass(frozen=True, kw_only=True)
class Fp4(FourBit):
    """Look weights up in the 16 values of a 4-bit float (bitsandbytes FP4)."""

    name: ClassVar[str] = "bnb-fp4"


@dataclass(frozen=True, kw_only=True)
class Int8(Scheme):
    """Multiply 8-bit weights and 8-bit activations, outlier columns apart (LLM.int8)."""

    name: ClassVar[str] = "bnb-int8"
    code_bits: ClassVar[int | None] = 8

    threshold: float = 6.0

    def __post_init__(self) -> None:
        if self.threshold < 0:
            raise SchemeError(
                f"a threshold of {self.threshold} is out of range",
                hint="use 0 for no outlier columns, or a positive magnitude such as 6.0",
            )

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        weights, forwards, bits = {}, {}, 0
        for name, weight_RC in linears.weights.items():
            codes_RC, absmax_R = _to_int8(name, weight_RC)
            bits += 8 * codes_RC.numel() + ABSMAX_BITS * absmax_R.numel()
            weights[name] = _from_int8(codes_RC, absmax_R).to(weight_RC.dtype)
            forwards[name] = _int8_forward(codes_RC, absmax_R, self.threshold)
        notes = ("outlier columns are found per batch, as in bitsandbytes",)
        return Quantized(weights, bits, notes if self.threshold else (), forwards)


def _through_four_bits(weight_RC: Tensor, table: str, blocksize: int, nested: bool) -> Tensor:
    """Return the weight as it comes back from 4 bits, in its own shape and dtype."""
    import torch

    functional = _bitsandbytes().functional
    # One long row: given a matrix whose columns are no multiple of the block size, the CPU
    # kernel for AVX512 of bitsandbytes 0.50 restores blocks with the maxima of others (its
    # quantizer, its CUDA kernels and its other CPU code do not). And two codes share a byte:
    # an odd number of weights would go through torch.compile, while a zero behind the last
    # one changes no block's maximum.
    flat = weight_RC.detach().reshape(1, -1)
    flat = torch.nn.functional.pad(flat, (0, flat.numel() % 2))
    packed, state = functional.quantize_4bit(
        flat.float() if flat.dtype == torch.float64 else flat,
        blocksize=blocksize,
        compress_statistics=nested,
        quant_type=table,
    )
    restored: Tensor = functional.dequantize_4bit(packed, state)
    restored = restored.reshape(-1)[: weight_RC.numel()]
    return restored.reshape(weight_RC.shape).to(weight_RC.dtype)


def _to_int8(name: str, weight_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes and the largest magnitude of every row, as `Linear8bitLt` stores them."""
    import torch

    # bitsandbytes zeroes and restores outliers in place, so it must not see the caller's tensor.
    half_RC = weight_RC.detach().to(torch.float16, copy=True).contiguous()
    if not torch.isfinite(half_RC).all():
        raise SourceError(
            f"the weight of `{name}` holds numbers too large for float16",
            hint="bitsandbytes' int8 goes through float16; leave bnb-int8 out",
        )
    codes_RC, absmax_R, _ = _bitsandbytes().functional.int8_vectorwise_quant(half_RC)
    return codes_RC, absmax_R


def _from_int8(codes_RC: Tensor, absmax_R: Tensor) -> Tensor:
    restored: Tensor = _bitsandbytes().functional.int8_vectorwise_dequant(codes_RC, absmax_R)
    return restored


def _int8_forward(
    codes_RC: Tensor, absmax_R: Tensor, threshold: float
) -> Callable[[Tensor], Tensor]:
    """Return the forward of `Linear8bitLt` in evaluation mode, without a bias."""
    bitsandbytes = _bitsandbytes()

    def forward(x: Tensor) -> Tensor:
        state = bitsandbytes.MatmulLtState()
        state.CB, state.SCB = codes_RC, absmax_R
        state.has_fp16_weights = state.is_training = False
        state.threshold = threshold
        with _without_warning("bitsandbytes.autograd._functions", "MatMul8bitLt: inputs will be"):
            output: Tensor = bitsandbytes.matmul(x, codes_RC, state=state)
        return output

    return forward


def _bitsandbytes() -> Any:
    """Import bitsandbytes without its remark on a CPU kernel that is not used here."""
    try:
        with _without_warning("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit"):
            import bitsandbytes
    except ImportError as error:
        raise MachineError(
            f"bitsandbytes cannot be imported: {error}",
            hint="pip install bitsandbytes, or leave the bnb schemes out",
        ) from error
    return bitsandbytes


@contextmanager
def _without_warning(logger: str, start: str) -> Iterator[None]:
    """Keep one known warning of one logger out of the log."""

    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(start)

    target = logging.getLogger(logger)
    target.addFilter(keep)
    try:
        yield
    finally:
        target.removeFilter(keep)
