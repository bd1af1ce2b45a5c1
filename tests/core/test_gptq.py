import numpy as np
import pytest
import torch

from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import Inputs, Linears
from qaudit.errors import SchemeError, SourceError
from tests.reference.plain_gptq import gptq

torch.set_num_threads(1)


def correlated_inputs(columns, tokens=None, seed=0):
    """Inputs as a trained model's are: correlated, and of very different sizes."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((tokens or 3 * columns, columns))
    x *= np.exp(generator.standard_normal(columns))
    mix = np.eye(columns) + 0.5 * generator.standard_normal((columns, columns)) / columns**0.5
    return x @ mix


def problem(rows, columns, dtype=torch.float64, seed=0, dead=()):
    weight = np.random.default_rng(seed + 1).standard_normal((rows, columns)) * 0.02
    x = correlated_inputs(columns, seed=seed)
    x[:, list(dead)] = 0
    gram = torch.from_numpy(x.T @ x).to(dtype)
    inputs = Inputs(gram, torch.from_numpy(np.abs(x).mean(0)).to(dtype), len(x))
    return Linears({"linear": torch.from_numpy(weight).to(dtype)}, inputs)


def solve(spec, linears):
    return parse_scheme(spec).quantize(linears).weights["linear"].double().numpy()


def objective(linears, quantized):
    error = linears.weights["linear"].double().numpy() - quantized
    return float(np.sum((error @ linears.inputs.gram_CC.double().numpy()) * error))


ORDERS = {
    "natural": {"act_group_aware": False},
    "act_order": {"act_order": True, "act_group_aware": False},
    "group_aware": {"act_group_aware": True},
}


@pytest.mark.parametrize("static_groups", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("columns", "group"),
    [(256, 128), (320, 128), (300, 64), (200, 48), (330, 192), (96, 128), (200, -1)],
    ids=["even", "ragged", "small", "unaligned", "wide", "larger-than-row", "channel"],
)
def test_codes_equal_the_published_loop_in_double_precision(
    columns, group, symmetric, order, static_groups
):
    linears = problem(24, columns, seed=columns + group)
    options = {**ORDERS[order], "static_groups": static_groups}
    spec = ":".join(
        [f"gptq-3bit:group={group}:sym={symmetric}", *(f"{k}={v}" for k, v in options.items())]
    )
    _, expected = gptq(
        linears.weights["linear"].numpy(),
        linears.inputs.gram_CC.numpy(),
        bits=3,
        group=group,
        symmetric=symmetric,
        **options,
    )
    # A different code would differ by a whole step, 1e-3 and more here; what is left is the
    # rounding of scales that come from two ways to the same compensated weights.
    assert np.abs(solve(spec, linears) - expected).max() < 1e-12
