"""`--cross-check N`: let GPTQModel quantize N linears too, and note how far it agrees.

GPTQModel is the maintained successor of auto-gptq, an implementation of GPTQ that shares no
line with ours. It is given the same weights, and one batch of inputs X made so that X^T X is
the very Gram matrix our scheme saw: a transposed Cholesky factor of it, or, where it has none,
the roots of its eigenvalues times its eigenvectors. GPTQ sees its inputs through X^T X alone,
so that this tells it as much as the calibration tokens would. X is scaled so that the mean
diagonal of a living column is GPTQModel's 1 for dead ones: the damping is then the same too.

It runs in a process of its own, on the CPU, because importing it changes other libraries
(safetensors' writer, triton, transformers' quantizers) and writes to the standard output.

GPTQModel chooses codes on scales in float32. A scheme with scales in bfloat16 is solved once more
with such scales, so that the check is of the algorithm.

Two weights are counted as equal when they lie less than half a step of the grid apart. They
all should be, but for one thing: the most negative weight of a symmetric group lies exactly
between two codes, the last bit of the scale decides, and later columns of that row follow.
With `act_order` a column without inputs comes last here and somewhere in the middle there.

Shapes: R rows, C columns, G groups.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qaudit.core.linears import Linears, Quantized
from qaudit.core.scheme import Scheme
from qaudit.errors import MachineError

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class PeerAnswer:
    """What GPTQModel made of one linear."""

    version: str
    weight_RC: Array  # dequantized
    step_RC: Array  # the scale each weight was rounded with
    damp: float


class CrossCheck:
    """Quantizes the first `count` linears of each scheme that GPTQModel has, a second time.

    Where there are experts, as many of their linears are checked beside.
    """

    def __init__(self, count: int) -> None:
        if find_spec("gptqmodel") is None:
            raise MachineError(
                "`--cross-check` needs the library `gptqmodel`, which is not installed",
                hint="pip install 'qaudit-llm[gptqmodel]', or leave out --cross-check",
            )
        self._count = count
        self._checked: dict[tuple[str, bool], int] = {}  # by scheme, and if of experts
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> CrossCheck:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def observe(self, scheme: Scheme, linears: Linears, quantized: Quantized) -> str | None:
        """Check what a scheme made of linears while its count lasts; return the note about it."""
        if linears.inputs is None:
            return None
        settings = scheme.gptqmodel_settings(len(linears.inputs.gram_CC))
        if settings is None:
            return None
        kind = scheme.spec, linears.inputs.seen is not None
        remaining = self._count - self._checked.get(kind, 0)
        names = list(linears.weights)[: max(remaining, 0)]
        if not names:
            return None
        self._checked[kind] = self._checked.get(kind, 0) + len(names)
        notes = []
        if getattr(scheme, "scale_dtype", "float32") != "float32":
            changed: Any = {"scale_dtype": "float32"}
            quantized = replace(scheme, **changed).quantize(linears)
            notes.append("checked with float32 scales, as GPTQModel computes them")
        gram_CC = linears.inputs.gram_CC.detach().cpu().double()
        x_CC = inputs_with_gram(gram_CC)
        for name in names:
            weight_RC = linears.weights[name].detach().cpu().float()
            answer = self._ask(settings, weight_RC, x_CC)
            notes.append(_compare(name, weight_RC, quantized.weights[name], answer, gram_CC))
        return "; ".join(notes)

    def _ask(self, config: dict[str, Any], weight_RC: Tensor, x_CC: Tensor) -> PeerAnswer:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(max_workers=1, mp_context=context)
        return self._pool.submit(solve, config, weight_RC.numpy(), x_CC.numpy()).result()


def inputs_with_gram(gram_CC: Tensor) -> Tensor:
    """Return C inputs X with X^T X proportional to the Gram matrix, living columns of mean 1/2.

    GPTQModel's Hessian is 2 X^T X / C, so its living diagonal then has mean 1.
    """
    alive_C = gram_CC.diagonal() > 0
    columns = len(gram_CC)
    if not bool(alive_C.any()):
        return torch.zeros(columns, columns)
    gram_CC = gram_CC * (columns / 2 / gram_CC.diagonal()[alive_C].mean())
    lower_CC, failed = torch.linalg.cholesky_ex(gram_CC)
    if failed:
        values_C, vectors_CC = torch.linalg.eigh(gram_CC)
        lower_CC = vectors_CC * values_C.clamp(min=0).sqrt()
    x_CC: Tensor = lower_CC.T.float()
    x_CC[:, ~alive_C] = 0  # exactly: a dead column is known by a zero on the diagonal
    return x_CC.contiguous()


def solve(config: dict[str, Any], weight_RC: Array, x_TC: Array) -> PeerAnswer:
    """Quantize one linear with GPTQModel; runs in the other process."""
    with contextlib.redirect_stdout(sys.stderr):
        os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # on two cores it asks for more
        import gptqmodel
        from gptqmodel.quantization import GPTQ
        from gptqmodel.quantization.config import GPTQConfig

        rows, columns = weight_RC.shape
        linear = torch.nn.Linear(columns, rows, bias=False)
        linear.weight.data = torch.from_numpy(weight_RC)
        peer = GPTQ(linear, GPTQConfig(offload_to_disk=False, **config))
        peer.quantizer.configure(perchannel=True)
        peer.add_batch(torch.from_numpy(x_TC), None, batch_index=0)
        quantized_RC, scale_RG, _, group_of_C, _, _, damp, _ = peer.quantize()
    return PeerAnswer(
        str(gptqmodel.__version__),
        quantized_RC.detach().float().numpy(),
        scale_RG.detach().float()[:, group_of_C.long()].numpy(),
        float(damp),
    )


def _compare(
    name: str, weight_RC: Tensor, ours_RC: Tensor, answer: PeerAnswer, gram_CC: Tensor
) -> str:
    ours_RC = ours_RC.detach().cpu().float()
    theirs_RC = torch.from_numpy(answer.weight_RC)
    equal_RC = (ours_RC - theirs_RC).abs() < torch.from_numpy(answer.step_RC).abs() / 2
    agreed = float(equal_RC.double().mean())
    ours, theirs = (_output_error(weight_RC - q, gram_CC) for q in (ours_RC, theirs_RC))
    ratio = f"{ours / theirs:.4f}" if theirs > 0 else "-"
    return (
        f"GPTQModel {answer.version} agrees on {100 * agreed:.2f} % of `{name}`, "
        f"output error {ratio} of its own"
    )


def _output_error(error_RC: Tensor, gram_CC: Tensor) -> float:
    """Return the squared error of the linear's output over the calibration tokens."""
    error_RC = error_RC.double()
    return float(torch.sum((error_RC @ gram_CC) * error_RC))
