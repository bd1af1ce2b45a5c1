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

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from qaudit.core.linears import Linears, Quantized, decoded, refuse_nonfinite
from qaudit.core.scheme import Scheme
from qaudit.core.stored import StoredWeight
from qaudit.errors import MachineError, SchemeError, SourceError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NESTED_BLOCK = 256
BLOCKSIZES = (32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, eq=False)
class NestedMaxima:
    """How block maxima in 8 bits become numbers: table[code] * absmax of 256 codes + offset."""

    absmax: Tensor  # float32, one for 256 block maxima
    table: Tensor  # the 256 values of a code
    offset: Tensor  # float32, the mean of all block maxima

    @property
    def nbits(self) -> int:
        return _bits_of(self.absmax) + _bits_of(self.offset)


@dataclass(frozen=True, eq=False)
class FourBitCodes(StoredWeight):
    """Codes of a 4-bit table in blocks of the flattened weight, as `Linear4bit` stores them."""

    packed: Tensor  # uint8, (bytes, 1); the earlier of two codes in the upper half
    absmax: Tensor  # one per block: float32, or uint8 codes of `nested`
    table: Tensor  # the 16 values of a code
    kind: str  # "nf4" or "fp4"
    blocksize: int
    shape: tuple[int, ...]
    dtype: torch.dtype  # to which bitsandbytes rounds the weights
    nested: NestedMaxima | None = None

    def decode(self) -> Tensor:
        functional = _bitsandbytes().functional
        # One long row: given a matrix whose columns are no multiple of the block size, the CPU
        # kernel for AVX512 of bitsandbytes 0.50 restores blocks with the maxima of others (its
        # quantizer, its CUDA kernels and its other CPU code do not).
        restored: Tensor = functional.dequantize_4bit(self.packed, self.state((1, self._padded)))
        return restored.reshape(-1)[: math.prod(self.shape)].reshape(self.shape)

    def state(self, shape: tuple[int, ...]) -> Any:
        """Return bitsandbytes' own description of these codes, as a tensor of a shape."""
        state_of = _bitsandbytes().functional.QuantState
        maxima = {}
        if self.nested is not None:
            inner = state_of(
                absmax=self.nested.absmax,
                code=self.nested.table,
                blocksize=NESTED_BLOCK,
                dtype=self.nested.absmax.dtype,
            )
            maxima = {"offset": self.nested.offset, "state2": inner}
        return state_of(
            absmax=self.absmax,
            shape=shape,
            dtype=self.dtype,
            blocksize=self.blocksize,
            code=self.table,
            quant_type=self.kind,
            **maxima,
        )

    @property
    def nbits(self) -> int:
        nested = 0 if self.nested is None else self.nested.nbits
        return _bits_of(self.packed) + _bits_of(self.absmax) + nested

    @property
    def fits(self) -> bool:
        """Return whether all parts are as long as the shape needs: kernels read unchecked."""
        count, maxima = math.prod(self.shape), -(-self._padded // self.blocksize)
        sizes = [(self._padded, count + count % 2), (self.absmax.numel(), maxima)]
        sizes.append((self.table.numel(), 2**4))
        if self.nested is not None:
            sizes.append((self.nested.absmax.numel(), -(-maxima // NESTED_BLOCK)))
            sizes.append((self.nested.table.numel(), 2**8))
        whole = self.blocksize in BLOCKSIZES and self.packed.element_size() == 1
        return whole and all(size == needed for size, needed in sizes)

    @property
    def _padded(self) -> int:
        return 2 * self.packed.numel()


@dataclass(frozen=True, eq=False)
class Int8Codes(StoredWeight):
    """Signed codes, and the largest magnitude of every row, as `Linear8bitLt` stores them."""

    codes_RC: Tensor  # int8
    absmax_R: Tensor  # float32

    def decode(self) -> Tensor:
        functional = _bitsandbytes().functional
        restored: Tensor = functional.int8_vectorwise_dequant(self.codes_RC, self.absmax_R)
        return restored

    @property
    def nbits(self) -> int:
        return _bits_of(self.codes_RC) + _bits_of(self.absmax_R)


@dataclass(frozen=True, kw_only=True)
class FourBit(Scheme):
    """Base of both 4-bit tables: blocks of the flattened weight, one maximum each."""

    code_bits: ClassVar[int | None] = 4
    blocksize: int = 64
    double_quant: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocksize not in BLOCKSIZES:
            raise SchemeError(
                f"a blocksize of {self.blocksize} does not exist in bitsandbytes",
                hint=f"use one of {', '.join(map(str, BLOCKSIZES))}",
            )

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        table = self.name.removeprefix("bnb-")
        stored = {
            name: _to_four_bits(weight_RC, table, self.blocksize, self.double_quant)
            for name, weight_RC in linears.weights.items()
        }
        return decoded(linears, stored)


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
        super().__post_init__()
        if self.threshold < 0:
            raise SchemeError(
                f"a threshold of {self.threshold} is out of range",
                hint="use 0 for no outlier columns, or a positive magnitude such as 6.0",
            )

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        stored = {name: _to_int8(name, weight) for name, weight in linears.weights.items()}
        forwards = {
            name: _int8_forward(codes.codes_RC, codes.absmax_R, self.threshold)
            for name, codes in stored.items()
        }
        notes = ("outlier columns are found per batch, as in bitsandbytes",)
        return decoded(linears, stored, notes if self.threshold else (), forwards=forwards)


def parts_of(codes: FourBitCodes) -> dict[str, Tensor]:
    """Return what bitsandbytes saves beside the codes."""
    parts: dict[str, Tensor] = codes.state(codes.shape).as_dict(packed=True)
    return parts


def _to_four_bits(weight_RC: Tensor, table: str, blocksize: int, nested: bool) -> FourBitCodes:
    import torch

    # Two codes share a byte: an odd number of weights would go through torch.compile, while a
    # zero behind the last one changes no block's maximum.
    flat = weight_RC.detach().reshape(1, -1)
    flat = torch.nn.functional.pad(flat, (0, flat.numel() % 2))
    packed, state = _bitsandbytes().functional.quantize_4bit(
        flat.float() if flat.dtype == torch.float64 else flat,
        blocksize=blocksize,
        compress_statistics=nested,
        quant_type=table,
    )
    maxima = None
    if nested:
        maxima = NestedMaxima(state.state2.absmax, state.state2.code, state.offset)
    return FourBitCodes(
        packed, state.absmax, state.code, table, blocksize, weight_RC.shape, state.dtype, maxima
    )


def _to_int8(name: str, weight_RC: Tensor) -> Int8Codes:
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
    return Int8Codes(codes_RC, absmax_R)


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


def _bits_of(values: Tensor) -> int:
    return 8 * values.nbytes


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
