"""GPTAQ and Qronos in double precision against their definitions, over two streams that differ."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from qaudit.core.linears import Inputs, InputsAccumulator, Linears
from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import Calibration
from qaudit.errors import SchemeError
from tests.support.correlated import ORDERS, correlated_inputs, problem
from tests.support.reference.plain_gptq import gptq, qronos

torch.set_num_threads(1)


def streams(rows, columns, seed=0, dead=()):
    """Return linears with a drift, and the inputs of both streams."""
    linears = problem(rows, columns, seed=seed, dead=dead)
    own = correlated_inputs(columns, seed=seed)
    own[:, list(dead)] = 0.0
    generator = np.random.default_rng(seed + 2)
    mix = np.eye(columns) + 0.1 * generator.standard_normal((columns, columns)) / columns**0.5
    full = own @ mix + 0.05 * generator.standard_normal(own.shape)
    drift = torch.from_numpy((full - own).T @ own)
    inputs = dataclasses.replace(linears.inputs, drift_CC=drift)
    return dataclasses.replace(linears, inputs=inputs), own, full


def objective(linears, own, full, quantized):
    """Squared distance of the output to that of the unquantized linear in its own model."""
    weight = linears.weights["linear"].numpy()
    return float(np.square(own @ quantized.T - full @ weight.T).sum())


def solved(spec, linears):
    return parse_scheme(spec).quantize(linears).weights["linear"].double().numpy()


@pytest.mark.parametrize("static_groups", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("columns", "group"), [(256, 128), (300, 64), (200, -1)])
@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_gptaq_codes_equal_the_published_loop(columns, group, order, static_groups, alpha):
    linears, _, _ = streams(16, columns, seed=columns)
    options = {**ORDERS[order], "static_groups": static_groups}
    spec = ":".join(
        [
            f"gptaq-3bit:group={group}:scale_dtype=float32:alpha={alpha}",
            *(f"{key}={value}" for key, value in options.items()),
        ]
    )
    codes, expected = gptq(
        linears.weights["linear"].numpy(),
        linears.inputs.gram_CC.numpy(),
        bits=3,
        group=group,
        drift_CC=linears.inputs.drift_CC.numpy(),
        alpha=alpha,
        **options,
    )
    quantized = parse_scheme(spec).quantize(linears)
    # Two ways to the same sums in float64, from which scales are taken.
    assert np.abs(quantized.weights["linear"].numpy() - expected).max() < 1e-11
    np.testing.assert_array_equal(quantized.stored["linear"].codes_RC.numpy(), codes)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(
    ("columns", "group", "dead"), [(96, 32, ()), (150, -1, ()), (96, 32, (5,))]
)
@pytest.mark.parametrize("damp", [1e-6, 1e-3])
def test_qronos_equals_least_squares_before_and_after_every_column(
    columns, group, dead, act_order, damp
):
    linears, own, full = streams(8, columns, seed=columns, dead=dead)
    expected = qronos(
        linears.weights["linear"].numpy(),
        own,
        full,
        bits=3,
        group=group,
        symmetric=False,
        act_order=act_order,
        damp=damp,
    )
    spec = (
        f"qronos-3bit:group={group}:sym=false:static_groups=true:damp={damp}"
        f":act_group_aware=false:act_order={act_order}:scale_dtype=float32"
    )
    result = solved(spec, linears)
    # Thirty steps of power iteration come within 1e-3 of the largest eigenvalue, of which the
    # damping is a part: that turns a code over only where a target is that near to a tie.
    assert np.mean(np.isclose(result, expected, rtol=0, atol=1e-10).all(1)) > 0.7
    reached = objective(linears, own, full, result)
    assert reached == pytest.approx(objective(linears, own, full, expected), rel=0.02)


@pytest.mark.parametrize("bits", [4, 3])
def test_both_come_nearer_to_the_unquantized_output_than_gptq(bits):
    linears, own, full = streams(32, 256, seed=3)
    errors = {
        name: objective(linears, own, full, solved(f"{name}-{bits}bit:group=64", linears))
        for name in ("gptq", "gptaq", "qronos")
    }
    assert errors["gptaq"] < errors["gptq"]
    assert errors["qronos"] < errors["gptaq"]


@pytest.mark.parametrize("name", ["gptaq", "qronos"])
def test_without_drift_they_are_gptq(name):
    linears = problem(16, 160, seed=9)
    none = parse_scheme(f"{name}-4bit:damp=0.05").quantize(linears)
    zero = dataclasses.replace(linears.inputs, drift_CC=torch.zeros(160, 160).double())
    still = parse_scheme(f"{name}-4bit:damp=0.05").quantize(
        dataclasses.replace(linears, inputs=zero)
    )
    assert torch.equal(none.weights["linear"], still.weights["linear"])
    if name == "gptaq":
        plain = parse_scheme("gptq-4bit").quantize(linears)
        assert torch.equal(none.weights["linear"], plain.weights["linear"])


@pytest.mark.parametrize("name", ["gptaq", "qronos"])
def test_the_unit_of_the_inputs_does_not_matter(name):
    linears, _, _ = streams(16, 160, seed=9, dead=(5,))
    factor = 2.0**40
    scaled = dataclasses.replace(
        linears.inputs,
        gram_CC=linears.inputs.gram_CC * factor,
        drift_CC=linears.inputs.drift_CC * factor,
    )
    after = dataclasses.replace(linears, inputs=scaled)
    assert np.array_equal(solved(f"{name}-4bit", linears), solved(f"{name}-4bit", after))


def test_the_drift_is_summed_from_differences():
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(300, 70, generator=generator)
    full = own + 1e-3 * torch.randn(300, 70, generator=generator)
    inputs = InputsAccumulator(70)
    inputs.add(own[:100].reshape(4, 25, 70), full[:100].reshape(4, 25, 70))
    inputs.add(own[100:], full[100:])
    drift_CC = inputs.result().drift_CC
    expected = (full.double() - own.double()).T @ own.double()
    # Sums of 300 float32 products; the difference itself is rounded to 2^-24 of an input.
    assert torch.allclose(drift_CC.double(), expected, rtol=0, atol=1e-4 * expected.abs().max())
    alone = InputsAccumulator(70)
    alone.add(own)
    assert alone.result().drift_CC is None


def test_what_they_read_and_bad_settings():
    for name in ("gptaq", "qronos"):
        assert parse_scheme(f"{name}-4bit").calibration is Calibration.BOTH_STREAMS
        with pytest.raises(SchemeError, match="two orders"):
            parse_scheme(f"{name}-4bit:act_order=true")
        with pytest.raises(SchemeError, match="behind those quantized before"):
            parse_scheme(f"{name}-4bit:true_sequential=false")


def test_few_tokens_raise_the_damping_of_qronos_and_say_so():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 64, generator=generator)
    inputs = Inputs(x.T @ x, x.abs().mean(0), 20, drift_CC=0.01 * x.T @ x)
    weight = torch.randn(4, 64, generator=generator)
    quantized = parse_scheme("qronos-4bit:damp=0.0000000001").quantize(
        Linears({"linear": weight}, inputs)
    )
    assert any("damping raised" in note for note in quantized.notes)
    assert bool(quantized.weights["linear"].isfinite().all())
