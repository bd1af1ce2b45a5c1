"""Our curvature against PyHessian's and curvlinops': `make peers`.

One small Llama in float32, with GELU: curvlinops differentiates forward over reverse, which torch
cannot for SiLU, and its products differ by percents in the weights of a LayerNorm, where finite
differences in double precision side with us (`tests/diagnostics/curvature/test_hessian.py`).
PyHessian multiplies by two backward passes, as we do, without recomputing blocks. All three sum
the same float32 numbers in another order, so that products agree to a few units in the last place
of the largest entry; estimates agree within what their probes scatter.
"""
# ruff: noqa: E402

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import Tensor, nn

# A dependency of curvlinops brings it along, and one that was built for another torch than the
# one that is installed breaks transformers. Nobody here looks at pictures.
sys.modules["torchvision"] = None  # type: ignore[assignment]

from transformers import AutoConfig, AutoModelForCausalLM

from qaudit.core.spectrum import (
    Trace,
    estimate_trace,
    find_ends,
    signs,
)
from qaudit.diagnostics.curvature_measure import LossHessian, cut
from qaudit.types import Window

pytestmark = pytest.mark.peers

LENGTH = 12
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_act": "gelu",
    "vocab_size": 24,
    "max_position_embeddings": LENGTH,
    "attn_implementation": "eager",
}


class Logits(nn.Module):
    """The model as both peers want it: inputs to one row of logits for each target."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV = self.model(input_ids=tokens_BT, use_cache=False).logits[:, :-1]
        return logits_BTV.flatten(0, 1)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SHAPE)
    built = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return built


@pytest.fixture(scope="module")
def tokens_BT() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 24, (4, LENGTH), generator=generator)


@pytest.fixture(scope="module")
def ours(model: nn.Module, tokens_BT: Tensor) -> LossHessian:
    windows = [[Window(d, row.numpy().astype(np.int32))] for d, row in enumerate(tokens_BT)]
    return LossHessian(model, list(model.model.layers), cut(windows, LENGTH, LENGTH))


@pytest.fixture(scope="module")
def trace(ours: LossHessian) -> Trace:
    size = sum(ours.sizes)
    return estimate_trace(ours, size, ours.like, probes=60, tolerance=0.0, confidence=0.999)


def must_agree(found: Tensor, expected: Tensor) -> None:
    largest = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * largest)


def targets_of(tokens_BT: Tensor) -> Tensor:
    return tokens_BT[:, 1:].flatten()


# ------------------------------------------------------------------------------ curvlinops


@pytest.fixture(scope="module")
def operator(model: nn.Module, tokens_BT: Tensor) -> object:
    from curvlinops import HessianLinearOperator

    return HessianLinearOperator(
        Logits(model),
        nn.CrossEntropyLoss(),
        list(model.parameters()),
        [(tokens_BT, targets_of(tokens_BT))],
        check_deterministic=False,
    )


def test_a_product_is_that_of_curvlinops(ours: LossHessian, operator) -> None:
    vector_P = signs(sum(ours.sizes), 7, ours.like)
    must_agree(ours.multiply(vector_P), (operator @ vector_P).detach())


def test_the_trace_is_that_of_curvlinops(trace: Trace, operator) -> None:
    # Both estimate; theirs takes 60 probes too, so that the two differ by sqrt(2) errors.
    from curvlinops import hutchinson_trace

    torch.manual_seed(3)
    theirs = float(hutchinson_trace(operator, num_matvecs=60, distribution="rademacher"))
    assert abs(theirs - trace.interval.estimate) < 4 * 2**0.5 * trace.standard_error


def test_the_largest_eigenvalues_are_those_of_scipy_through_curvlinops(
    ours: LossHessian, operator
) -> None:
    from scipy.sparse.linalg import eigsh

    theirs = sorted(eigsh(operator.to_scipy(), k=3, which="LA", return_eigenvectors=False))
    search = {"count": 3, "steps": 120, "tolerance": 1e-3}
    found = find_ends(ours.multiply, sum(ours.sizes), ours.like, **search)
    assert [end.value for end in found.largest] == pytest.approx(theirs[::-1], rel=1e-4)


# ------------------------------------------------------------------------------- PyHessian


@pytest.fixture(scope="module")
def peer(model: nn.Module, tokens_BT: Tensor) -> object:
    from pyhessian import hessian

    for parameter in model.parameters():
        parameter.grad = None
    data = (tokens_BT, targets_of(tokens_BT))
    return hessian(Logits(model), nn.CrossEntropyLoss(), data=data, cuda=False)


def test_a_product_is_that_of_pyhessian(ours: LossHessian, model: nn.Module, peer) -> None:
    from pyhessian.utils import hessian_vector_product

    vector_P = signs(sum(ours.sizes), 8, ours.like)
    pieces = vector_P.split(ours.sizes)
    along = [piece.view_as(p) for piece, p in zip(pieces, peer.params, strict=True)]
    product = hessian_vector_product(peer.gradsH, peer.params, along)
    must_agree(ours.multiply(vector_P), torch.cat([part.detach().flatten() for part in product]))


def test_the_trace_is_that_of_pyhessian(trace: Trace, peer) -> None:
    torch.manual_seed(4)
    theirs = np.array(peer.trace(maxIter=60, tol=0.0))
    error = np.hypot(trace.standard_error, theirs.std(ddof=1) / len(theirs) ** 0.5)
    assert abs(theirs.mean() - trace.interval.estimate) < 4 * error


def test_the_eigenvalue_of_largest_magnitude_is_that_of_pyhessian(ours: LossHessian, peer) -> None:
    torch.manual_seed(5)
    (theirs,), _ = peer.eigenvalues(maxIter=500, tol=1e-6, top_n=1)
    search = {"count": 1, "steps": 120, "tolerance": 1e-3}
    found = find_ends(ours.multiply, sum(ours.sizes), ours.like, **search)
    farthest = max(found.largest[0].value, found.smallest.value, key=abs)
    assert farthest == pytest.approx(theirs, rel=1e-3)
