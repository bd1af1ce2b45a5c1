"""Codes of bitsandbytes, as its files store them and its own code decodes them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from qaudit.core.linears import StoredWeight
from qaudit.errors import MachineError
from qaudit.support.keys import INSTALL
from qaudit.support.lazy import Tensor, torch

NESTED_BLOCK = 256
BLOCKSIZES = (32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, eq=False)
class NestedMaxima:
    """How block maxima in 8 bits become numbers: table[code] * absmax of 256 codes + offset."""

    absmax: Tensor  # float32, one for 256 block maxima
    table: Tensor  # the 256 values of a code
    offset: Tensor  # float32, the mean of all block maxima


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
        functional = library().functional
        # One long row: given a matrix whose columns are no multiple of the block size, the CPU
        # kernel for AVX512 of bitsandbytes 0.50 restores blocks with the maxima of others (its
        # quantizer, its CUDA kernels and its other CPU code do not).
        restored: Tensor = functional.dequantize_4bit(self.packed, self.state((1, self._padded)))
        return restored.reshape(-1)[: math.prod(self.shape)].reshape(self.shape)

    def state(self, shape: tuple[int, ...]) -> Any:
        """Return bitsandbytes' own description of these codes, as a tensor of a shape."""
        state_of = library().functional.QuantState
        inner = None
        if self.nested is not None:
            inner = state_of(
                absmax=self.nested.absmax,
                code=self.nested.table,
                blocksize=NESTED_BLOCK,
                dtype=self.nested.absmax.dtype,
            )
        return state_of(
            absmax=self.absmax,
            shape=shape,
            dtype=self.dtype,
            blocksize=self.blocksize,
            code=self.table,
            quant_type=self.kind,
            offset=self.nested and self.nested.offset,
            state2=inner,
        )

    @property
    def nbits(self) -> int:
        nested = () if self.nested is None else (self.nested.absmax, self.nested.offset)
        parts: tuple[Tensor, ...] = (self.packed, self.absmax, *nested)
        return sum(8 * part.nbytes for part in parts)

    @property
    def _padded(self) -> int:
        return 2 * self.packed.numel()


@dataclass(frozen=True, eq=False)
class Int8Codes(StoredWeight):
    """Signed codes, and the largest magnitude of every row, as `Linear8bitLt` stores them."""

    codes_RC: Tensor  # int8
    absmax_R: Tensor  # float32

    def decode(self) -> Tensor:
        functional = library().functional
        restored: Tensor = functional.int8_vectorwise_dequant(self.codes_RC, self.absmax_R)
        return restored

    @property
    def nbits(self) -> int:
        return 8 * (self.codes_RC.nbytes + self.absmax_R.nbytes)


def library() -> Any:
    """Import bitsandbytes without its remark on a CPU kernel that is not used here."""
    try:
        with without_warning("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit"):
            import bitsandbytes
    except ImportError as error:
        raise MachineError(
            f"bitsandbytes cannot be imported: {error}",
            hint=f"{INSTALL}, or leave the bnb schemes out",
        ) from error
    return bitsandbytes


@contextmanager
def without_warning(logger: str, start: str) -> Iterator[None]:
    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(start)

    target = logging.getLogger(logger)
    target.addFilter(keep)
    try:
        yield
    finally:
        target.removeFilter(keep)
