"""Our curvature against PyHessian's and curvlinops': `make peers`.

One small Llama in float32, with GELU: curvlinops differentiates forward over reverse, which torch
cannot for SiLU, and its products differ by percents in the weights of a LayerNorm, where finite
differences in double precision side with us (`tests/diagnostics/curvature/test_hessian.py`).
PyHessian multiplies by two backward passes, as we do, without recomputing blocks. All three sum
the same float32 numbers in another order, so that products agree to a few units in the last place
of the largest entry; estimates agree within what their probes scatter.
"""
# ruff: noqa: E402

import sys

import numpy as np
import pytest
import torch
from torch import nn

# A dependency of curvlinops brings it along, and one that was built for another torch than the
# one that is installed breaks transformers. Nobody here looks at pictures.
sys.modules["torchvision"] = None  # type: ignore[assignment]

from transformers import AutoConfig, AutoModelForCausalLM

from qaudit.core.spectrum import estimate_trace, find_ends, signs
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

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens_BT):
        logits_BTV = self.model(input_ids=tokens_BT, use_cache=False).logits[:, :-1]
        return logits_BTV.flatten(0, 1)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SHAPE)
    built = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return built


@pytest.fixture(scope="module")
def tokens_BT():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 24, (4, LENGTH), generator=generator)


@pytest.fixture(scope="module")
def ours(model, tokens_BT):
    windows = [[Window(d, row.numpy().astype(np.int32))] for d, row in enumerate(tokens_BT)]
    return LossHessian(model, list(model.model.layers), cut(windows, LENGTH, LENGTH))


@pytest.fixture(scope="module")
def trace(ours):
    size = sum(ours.sizes)
    return estimate_trace(ours, size, ours.like, probes=60, tolerance=0.0, confidence=0.999)


def must_agree(found, expected):
    largest = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * largest)


def targets_of(tokens_BT):
    return tokens_BT[:, 1:].flatten()


def ends_of(ours, count):
    search = {"count": count, "steps": 120, "tolerance": 1e-3}
    return find_ends(ours.multiply, sum(ours.sizes), ours.like, **search)


def test_a_product_the_trace_and_the_largest_eigenvalues_are_those_of_curvlinops(
    ours, trace, model, tokens_BT
):
    """Its eigenvalues are scipy's."""
    from curvlinops import HessianLinearOperator, hutchinson_trace
    from scipy.sparse.linalg import eigsh

    data, loss = [(tokens_BT, targets_of(tokens_BT))], nn.CrossEntropyLoss()
    operator = HessianLinearOperator(
        Logits(model), loss, list(model.parameters()), data, check_deterministic=False
    )
    vector_P = signs(sum(ours.sizes), 7, ours.like)
    must_agree(ours.multiply(vector_P), (operator @ vector_P).detach())
    # Both estimate; theirs takes 60 probes too, so that the two differ by sqrt(2) errors.
    torch.manual_seed(3)
    theirs = float(hutchinson_trace(operator, num_matvecs=60, distribution="rademacher"))
    assert abs(theirs - trace.interval.estimate) < 4 * 2**0.5 * trace.standard_error
    largest = sorted(eigsh(operator.to_scipy(), k=3, which="LA", return_eigenvectors=False))
    found = [end.value for end in ends_of(ours, 3).largest]
    assert found == pytest.approx(largest[::-1], rel=1e-4)


def test_a_product_the_trace_and_the_farthest_eigenvalue_are_those_of_pyhessian(
    ours, trace, model, tokens_BT
):
    from pyhessian import hessian
    from pyhessian.utils import hessian_vector_product

    for parameter in model.parameters():
        parameter.grad = None
    data = (tokens_BT, targets_of(tokens_BT))
    peer = hessian(Logits(model), nn.CrossEntropyLoss(), data=data, cuda=False)
    vector_P = signs(sum(ours.sizes), 8, ours.like)
    pieces = vector_P.split(ours.sizes)
    along = [piece.view_as(p) for piece, p in zip(pieces, peer.params, strict=True)]
    product = hessian_vector_product(peer.gradsH, peer.params, along)
    must_agree(ours.multiply(vector_P), torch.cat([part.detach().flatten() for part in product]))
    torch.manual_seed(4)
    theirs = np.array(peer.trace(maxIter=60, tol=0.0))
    error = np.hypot(trace.standard_error, theirs.std(ddof=1) / len(theirs) ** 0.5)
    assert abs(theirs.mean() - trace.interval.estimate) < 4 * error
    torch.manual_seed(5)
    (value,), _ = peer.eigenvalues(maxIter=500, tol=1e-6, top_n=1)
    found = ends_of(ours, 1)
    farthest = max(found.largest[0].value, found.smallest.value, key=abs)
    assert farthest == pytest.approx(value, rel=1e-3)
