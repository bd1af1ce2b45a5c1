"""Gram matrices of calibration inputs: X^T X in float32, its products exact where they can be.

A calibrated scheme needs the second moments of what a linear reads, and nothing else of the
tokens. They cost about as much as a forward pass, so precision is chosen with care:

- only the upper block triangle is computed, in at most 8 panels: 9/16 of the work of the
  whole matrix, the same numbers;
- a product of two bf16 numbers is exact in float32. Activations in bf16 therefore go to the
  matrix units in bf16 with float32 sums, which loses nothing that plain float32 would keep:
  on CUDA by asking for a float32 output, on a CPU with bf16 instructions by letting float32
  products run in bf16 (2.1 times as fast as float32 on an AVX512-BF16 core, relative error
  9e-7 against 3e-7 of float32: both are the rounding of the sum).

A scheme that makes up for what quantization did to its inputs asks for the drift too: the moments
of x' - x beside x, where x' is what full precision reads (GPTAQ's matrix). It is no triangle, and
differences of bf16 numbers are not bf16: it costs about twice the Gram matrix.

Given up: sums in double precision. GPTQ damps the diagonal by percents.

Shapes: T tokens, C columns (features), R rows, S scales tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qaudit.core.linears import Inputs
from qaudit.support.lazy import Tensor, torch

SAMPLE = 256  # tokens at least, where there are as many
PANELS = 8
SMALLEST_PANEL = 64


class InputsAccumulator:
    """Second-order statistics of the inputs of a group of linears, summed batch by batch."""

    def __init__(self, columns: int, device: torch.device | str = "cpu") -> None:
        self._gram_CC = torch.zeros(columns, columns, dtype=torch.float32, device=device)
        self._magnitude_C = torch.zeros(columns, dtype=torch.float64, device=device)
        self._largest_C = torch.zeros(columns, dtype=torch.float32, device=device)
        self._drift_CC: Tensor | None = None
        self._tokens = 0
        self._sample: list[Tensor] = []
        self._stride = 1  # of the tokens that are in the sample
        self._panel = max(SMALLEST_PANEL, -(-columns // PANELS))

    def add(self, x: Tensor, full: Tensor | None = None) -> None:
        """Add the tokens of a batch, and what they are in full precision where that counts."""
        x_TC = x.detach().reshape(-1, x.shape[-1])
        # Every n-th token, n doubled whenever twice as many are there as needed.
        self._sample.append(x_TC[-self._tokens % self._stride :: self._stride].clone())
        while sum(map(len, self._sample)) >= 2 * SAMPLE:
            self._sample = [torch.cat(self._sample)[::2].clone()]
            self._stride *= 2
        self._tokens += len(x_TC)
        if not len(x_TC):
            return
        magnitude_TC = x_TC.abs()
        self._magnitude_C += magnitude_TC.sum(0, dtype=self._gram_CC.dtype)
        self._largest_C = torch.maximum(self._largest_C, magnitude_TC.amax(0).float())
        _add_gram(self._gram_CC, x_TC, self._panel)
        if full is not None:
            if self._drift_CC is None:
                self._drift_CC = torch.zeros_like(self._gram_CC)
            drift_TC = full.detach().reshape(x_TC.shape).float() - x_TC.float()
            self._drift_CC.addmm_(drift_TC.T, x_TC.float())

    def result(self) -> Inputs:
        """Return the statistics so far, as copies that later batches do not touch."""
        gram_CC = torch.triu(self._gram_CC)
        gram_CC += torch.triu(gram_CC, 1).T
        absmean_C = (self._magnitude_C / max(self._tokens, 1)).float()
        drift_CC = None if self._drift_CC is None else self._drift_CC.clone()
        sample_TC = torch.cat(self._sample) if self._sample else None
        largest_C = self._largest_C.clone()
        return Inputs(gram_CC, absmean_C, self._tokens, largest_C, drift_CC, sample_TC)


def _add_gram(gram_CC: Tensor, x_TC: Tensor, panel: int) -> None:
    """Add X^T X to the panels of the upper block triangle."""
    half = x_TC.dtype in (torch.bfloat16, torch.float16)
    if half and x_TC.is_cuda:
        for a, b in _panels(len(gram_CC), panel):
            gram_CC[a:b, a:] += torch.mm(x_TC[:, a:b].T, x_TC[:, a:], out_dtype=torch.float32)
        return
    with _bf16_products(x_TC):
        wide_TC = x_TC.float()
        for a, b in _panels(len(gram_CC), panel):
            gram_CC[a:b, a:].addmm_(wide_TC[:, a:b].T, wide_TC[:, a:])


def _panels(columns: int, panel: int) -> Iterator[tuple[int, int]]:
    for start in range(0, columns, panel):
        yield start, min(start + panel, columns)


@contextmanager
def _bf16_products(x_TC: Tensor) -> Iterator[None]:
    """Let a CPU multiply float32 tensors that hold bf16 numbers as the bf16 numbers they are."""
    settings: Any = getattr(torch.backends.mkldnn, "matmul", None)  # torch 2.8 has none
    exact = x_TC.dtype == torch.bfloat16 and x_TC.device.type == "cpu"
    if settings is None or not (exact and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        yield
        return
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def quadratic_forms(error_SRC: Tensor, upper_CC: Tensor) -> Tensor:
    """Return the sums over rows of e U e^T, skipping the blocks below the diagonal of U."""
    columns, error_NC = len(upper_CC), error_SRC.flatten(0, 1)
    panel = max(SMALLEST_PANEL, -(-columns // PANELS))
    total_S = error_SRC.new_zeros(len(error_SRC))
    for start, stop in _panels(columns, panel):
        product_NB = error_NC[:, :stop] @ upper_CC[:stop, start:stop]
        product_NB.mul_(error_NC[:, start:stop])
        total_S += product_NB.view(len(total_S), -1).sum(1)
    return total_S


@contextmanager
def tf32_products(weight_RC: Tensor) -> Iterator[None]:
    """Let a GPU multiply float32 with 10 bits of mantissa: it chooses a ratio, and rounds nothing.

    `python -m benchmarks.tf32` shows that no chosen ratio changes.
    """
    settings = torch.backends.cuda.matmul
    try:
        before = settings.allow_tf32
    except RuntimeError:  # torch refuses to read this after `fp32_precision` was set
        before = True
    if weight_RC.device.type != "cuda" or before:
        yield
        return
    settings.allow_tf32 = True
    try:
        yield
    finally:
        settings.allow_tf32 = False
