"""What every registered scheme must keep. A new file in `core/schemes` is tested by being there."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from functools import cache

import pytest
import torch

from qaudit.core.linears import Linears
from qaudit.core.registry import parse_scheme, schemes
from qaudit.core.scheme import Calibration
from qaudit.errors import SchemeError, SourceError
from qaudit.settings import DEFAULT_SCHEMES
from tests.support.filled import filled
from tests.support.schemes import (
    ALL,
    COLUMNS,
    LEARNED,
    PLAIN,
    every_grouped_scheme,
    every_plain_scheme,
    every_scheme,
    example,
    transform_nbits,
)

TURNING = ("duquant", "mr-gptq", *LEARNED)


def output_error(linears, quantized):
    """Squared output error on the calibration inputs, summed over linears."""
    total = 0.0
    for name, weight in linears.weights.items():
        error = (quantized.weights[name] - weight).double()
        total += float(((error @ linears.inputs.gram_CC.double()) * error).sum())
    return total


def drifted_error(linears, quantized):
    """The same against the output that the unquantized model has, up to what no weight changes."""
    total = output_error(linears, quantized)
    for name, weight in linears.weights.items():
        error = (quantized.weights[name] - weight).double()
        total -= 2 * float(((weight.double() @ linears.inputs.drift_CC.double()) * error).sum())
    return total


def weight_error(linears, quantized):
    return sum(
        float((quantized.weights[name] - weight).double().square().sum())
        for name, weight in linears.weights.items()
    )


@cache
def made(scheme, *, fold=False):
    """Quantize the example; what is returned is shared by tests, which leave it as it is."""
    return scheme.quantize(example(fold=fold))


@every_scheme
def test_names_shapes_and_rows_of_zeros_are_kept_and_bits_are_counted(scheme):
    for fold in (False, True):
        linears, quantized = example(fold=fold), made(scheme, fold=fold)
        assert list(quantized.weights) == list(linears.weights)
        for name, weight in filled(linears.weights.items()):
            assert quantized.weights[name].shape == weight.shape
            assert quantized.weights[name].dtype == weight.dtype
            assert torch.isfinite(quantized.weights[name]).all()
            assert not torch.equal(quantized.weights[name], weight)
            assert not quantized.weights[name][3].any()
        assert quantized.bits == recount(scheme, linears, quantized)


@every_plain_scheme
def test_the_dtype_is_kept(scheme):
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        for weight in filled(scheme.quantize(example(dtype)).weights.values()):
            assert weight.dtype == dtype
            assert torch.isfinite(weight).all()


@every_plain_scheme
def test_the_input_is_not_touched_and_nothing_is_logged(scheme, caplog):
    linears, copy = example(fold=True), example(fold=True)
    with caplog.at_level(logging.WARNING):
        quantized = scheme.quantize(linears)
        for forward in quantized.forwards.values():
            forward(torch.ones(2, COLUMNS))
    assert not caplog.records
    assert torch.equal(linears.inputs.gram_CC, copy.inputs.gram_CC)
    assert torch.equal(linears.inputs.absmean_C, copy.inputs.absmean_C)
    for name, weight in filled(copy.weights.items()):
        assert torch.equal(linears.weights[name], weight)
        quantized.weights[name].add_(1.0)  # the result shares no memory with the input
        assert torch.equal(linears.weights[name], weight)


@every_plain_scheme
def test_the_same_input_in_any_layout_gives_the_same_bits(scheme):
    first, turned = made(scheme, fold=True), example(fold=True)
    weights = {
        name: torch.nn.Parameter(weight.T.contiguous()).T for name, weight in turned.weights.items()
    }
    second = scheme.quantize(dataclasses.replace(turned, weights=weights))
    for name, weight in filled(first.weights.items()):
        assert torch.equal(weight, second.weights[name])
        assert not second.weights[name].requires_grad
    assert (first.bits, first.notes) == (second.bits, second.notes)


@pytest.mark.parametrize(
    "scheme",
    [scheme for scheme in ALL if scheme.name == "rtn" or scheme.name.startswith("bnb-")],
    ids=lambda scheme: scheme.short,
)
def test_zeros_stay_zero(scheme):
    for name, weight in filled(example().weights.items()):
        assert not made(scheme).weights[name][weight == 0].any()


@pytest.mark.parametrize(
    "scheme",
    [
        s
        for s in PLAIN
        if s.name not in ("awq", "smoothquant", "duquant", "hqq", *LEARNED)
        and not s.name.startswith("gguf-")
        and not getattr(s, "double_quant", False)
    ],
    ids=lambda scheme: scheme.short,
)
def test_weights_scaled_by_a_power_of_two_scale_the_result(scheme):
    # Not awq, whose published scales hold the constants 1e-4 and 1e-6, not smoothquant and those
    # that smooth, whose scales hold a root of the weights, not hqq, whose steps hold the constant
    # 10, not gguf, whose scales in float16 lose bits below 6e-5, and not nested maxima, whose 8-bit
    # table is rebuilt around their mean. int8 goes through float16, so the weights are numbers that
    # float16 holds exactly before and after.
    example_weights = {n: torch.round(w * 1024) / 1024 for n, w in example().weights.items()}
    linears = Linears(example_weights, example().inputs)
    factor = 2.0**-3
    scaled = dataclasses.replace(
        linears, weights={n: w * factor for n, w in example_weights.items()}
    )
    first, second = scheme.quantize(linears), scheme.quantize(scaled)
    for name, weight in filled(first.weights.items()):
        assert torch.equal(weight * factor, second.weights[name])


def turns(scheme):
    return getattr(scheme, "rotate", False) or scheme.name in TURNING


def _ceil(count, size):
    return len(range(0, count, size))


def _scale_bits(scheme):
    return 16 if scheme.scale_dtype == "bf16" else 32


def _kept(columns, scheme):
    return min(scheme.keep, columns // 16)


NUMBERS_OF_BITS = {
    "quik": lambda rows, columns, scheme: (
        rows * (scheme.bits * (columns - _kept(columns, scheme)) + 16)
        + (rows * 16 + 32) * _kept(columns, scheme)
    ),
    "atom": lambda rows, columns, scheme: (
        rows * scheme.bits * (columns - _kept(columns, scheme))
        + rows
        * 16
        * _ceil(columns - _kept(columns, scheme), scheme.group if scheme.group > 0 else columns)
        + rows * (8 * _kept(columns, scheme) + (16 if scheme.keep else 0))
        + 32 * columns
    ),
    **dict.fromkeys(LEARNED, lambda rows, columns, scheme: rows * (scheme.bits * columns + 16)),
    "base-q-w4a4": lambda rows, columns, scheme: rows * (4 * columns + 16),
    "duquant": lambda rows, columns, scheme: (
        rows * (scheme.bits * (columns + 1) + _scale_bits(scheme))
    ),
    "bnb-int8": lambda rows, columns, scheme: rows * (8 * columns + 32),
    "hqq": lambda rows, columns, scheme: (
        rows
        * (
            scheme.bits * columns
            + _ceil(columns, columns if scheme.group == -1 else scheme.group)
            * (32 if scheme.scale_dtype == "bf16" else 64)
        )
    ),
    "int8": lambda rows, columns, scheme: rows * (8 * columns + _scale_bits(scheme)),
    "smoothquant": lambda rows, columns, scheme: rows * (8 * columns + _scale_bits(scheme)),
    "fp8": lambda rows, columns, scheme: (
        8 * rows * columns
        + (16 if scheme.scale_dtype == "bf16" else 32)
        * (_ceil(rows, 128) * _ceil(columns, 128) if scheme.blocks else rows)
    ),
    # Blocks of 32: 256 divides the columns of none of the examples.
    "gguf-q8_0": lambda rows, columns, scheme: rows * columns // 32 * 34 * 8,
    "gguf-q6_k": lambda rows, columns, scheme: rows * columns // 32 * 34 * 8,
    "gguf-q5_k": lambda rows, columns, scheme: rows * columns // 32 * 24 * 8,
    "gguf-q4_k": lambda rows, columns, scheme: rows * columns // 32 * 22 * 8,
    "gguf-q4_0": lambda rows, columns, scheme: rows * columns // 32 * 18 * 8,
    "gguf-q3_k": lambda rows, columns, scheme: rows * columns // 32 * 18 * 8,
    # Of the one block of a model, values have 8 bits, queries the fallback of most linears.
    "gguf-q4_k_m": lambda rows, columns, scheme: rows * columns // 32 * {12: 22, 7: 34}[rows] * 8,
    "gguf-q3_k_m": lambda rows, columns, scheme: rows * columns // 32 * {12: 18, 7: 24}[rows] * 8,
    "mxfp4": lambda rows, columns, scheme: rows * (4 * columns + 8 * _ceil(columns, 32)),
    "mxfp4a16": lambda rows, columns, scheme: rows * (4 * columns + 8 * _ceil(columns, 32)),
    "nvfp4": lambda rows, columns, scheme: rows * (4 * columns + 8 * _ceil(columns, 16)) + 64,
    "mr-gptq": lambda rows, columns, scheme: (
        rows * (4 * columns + 8 * _ceil(columns, 32))
        if scheme.format == "mxfp4"
        else rows * (4 * columns + 8 * _ceil(columns, 16)) + (64 if scheme.act == 4 else 32)
    ),
    "nvfp4a16": lambda rows, columns, scheme: rows * (4 * columns + 8 * _ceil(columns, 16)) + 32,
}


def recount(scheme, linears, quantized):
    """Count storage the slow way: number by number, group by group."""
    if scheme.mixes_bits:  # without a table all linears have the whole bits of the budget
        scheme = scheme.member(int(scheme.budget))
    total = 0
    for weight in linears.weights.values():
        rows, columns = weight.shape
        if scheme.name in ("rtn", "gptq", "gptaq", "qronos", "awq", "quarot", "quarot-rtn"):
            group = columns if scheme.group == -1 else scheme.group
            scale_bits = 16 if getattr(scheme, "scale_dtype", "bf16") == "bf16" else 32
            symmetric = not getattr(scheme, "zero_point", not getattr(scheme, "sym", True))
            for _ in range(rows):
                for column in range(columns):
                    total += scheme.bits
                    if column % group == 0:
                        total += scale_bits + (0 if symmetric else scheme.bits)
            if getattr(scheme, "act_order", False) and not scheme.static_groups:
                total += 32 * columns if group < columns else 0
        elif scheme.name in NUMBERS_OF_BITS:
            total += NUMBERS_OF_BITS[scheme.name](rows, columns, scheme)
        else:
            blocks = len(weight.flatten().split(scheme.blocksize))
            total += 4 * weight.numel()
            if scheme.double_quant:
                total += 8 * blocks + 32 * len(torch.zeros(blocks).split(256)) + 32
            else:
                total += 32 * blocks
    if any("unfolded" in note for note in quantized.notes):
        total += scale_bits * columns
    return total + transform_nbits(scheme, next(iter(linears.weights.values())).shape[1])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("name", "flag", "error"),
    [
        ("rtn", "sym", weight_error),
        ("gptq", "sym", output_error),
        ("gptaq", "sym", drifted_error),
        ("qronos", "sym", drifted_error),
        ("awq", "zero_point", output_error),
    ],
)
def test_more_bits_are_closer_in_the_schemes_own_objective(name, flag, error, symmetric):
    linears = example(fold=True)
    errors = [
        error(linears, parse_scheme(f"{name}-{bits}bit:{flag}={symmetric}").quantize(linears))
        for bits in (8, 6, 4, 3, 2)
    ]
    assert errors == sorted(errors)
    assert errors[0] < errors[2] / 50  # each bit is worth a factor of 4 in squared error


@every_plain_scheme
def test_weights_and_inputs_that_are_no_numbers_are_refused_by_name(scheme):
    for bad in (float("nan"), -float("inf")):
        linears = example()
        linears.weights["attn.v_proj"][2, 9] = bad
        with pytest.raises(SourceError, match=r"`attn\.v_proj`"):
            scheme.quantize(linears)
    linears = example()
    linears.inputs.gram_CC[4, 5] = float("inf")
    with pytest.raises(SourceError, match=r"`attn\.q_proj`, `attn\.v_proj`"):
        scheme.quantize(linears)


@every_plain_scheme
def test_inputs_are_needed_exactly_where_the_scheme_says_so(scheme):
    bare = Linears(example().weights)
    if scheme.calibration is Calibration.NONE:
        assert scheme.quantize(bare).weights
    else:
        with pytest.raises(SourceError, match=r"`attn\.q_proj`"):
            scheme.quantize(bare)


@every_grouped_scheme
def test_groups_that_do_not_fit_a_row_are_noted(scheme):
    for group, note in ((48, "leave a last group"), (1024, "become one group per row"), (-1, "")):
        notes = " ".join(dataclasses.replace(scheme, group=group).quantize(example()).notes)
        assert note in notes
        assert ("leave a last group" in notes) == (group == 48)


@every_grouped_scheme
def test_a_group_larger_than_a_row_is_one_group_per_row(scheme):
    wide = dataclasses.replace(scheme, group=1024).quantize(example())
    whole = dataclasses.replace(scheme, group=-1).quantize(example())
    assert wide.bits == whole.bits
    for name, weight in filled(whole.weights.items()):
        assert torch.equal(wide.weights[name], weight)


@every_scheme
def test_forwards_and_changed_inputs_belong_to_the_weights(scheme):
    linears, quantized = example(fold=True), made(scheme, fold=True)
    x = torch.randn(3, 5, COLUMNS, generator=torch.Generator().manual_seed(1))
    for name, forward in quantized.forwards.items():
        before = x.clone()
        output, plain = forward(x), x @ quantized.weights[name].T
        assert torch.equal(x, before)
        assert output.shape == plain.shape
        assert output.dtype == x.dtype
        # 8-bit activations: errors of 1/254 of a token's maximum per product, averaging out.
        assert float((output - plain).norm() / plain.norm()) < 0.02
    if quantized.inputs is None:
        assert scheme.act_bits is None or quantized.forwards
        return
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(3, 5, COLUMNS, generator=torch.Generator().manual_seed(1)).to(dtype)
        x[1, 2] = 0
        before = x.clone()
        changed = quantized.inputs(x)
        assert torch.equal(x, before)
        assert changed.shape == x.shape
        assert changed.dtype == dtype
        assert torch.equal(quantized.inputs(x), changed)
        assert not torch.equal(changed, x)
        # A token is rounded by itself, but for scales that were fixed beforehand. Rotations are
        # products, whose last bit depends on the shape and can move a tie by a step.
        alone, steps = quantized.inputs(x[1:2]), 0.02 if turns(scheme) else 0.0
        assert float((alone != changed[1:2]).float().mean()) <= steps
    x = torch.randn(40, COLUMNS, generator=torch.Generator().manual_seed(1))
    x *= linears.inputs.absmax_C / 4
    for name, weight in linears.weights.items():
        exact, output = x @ weight.T, quantized.inputs(x) @ quantized.weights[name].T
        # Relative errors of a rounding are 2^-9 on 8-bit integer grids of a token's maximum,
        # 2^-5 for e4m3 and up to 1/4 for e2m1; they average out over columns, but for
        # integers of four bits beside large columns.
        bound = (
            0.05 if scheme.bit_class == "w8a8" else 0.3 if getattr(scheme, "rotate", True) else 0.5
        )
        assert float((output - exact).norm() / exact.norm()) < bound


def test_the_text_forms_read_back_as_the_scheme():
    for scheme in ALL:
        for one in (scheme, dataclasses.replace(scheme, kv="int4")):
            assert parse_scheme(one.spec) == one
            assert parse_scheme(one.short) == one


@pytest.mark.parametrize("name", schemes())
def test_a_scheme_is_documented_and_versioned_and_refuses_an_unknown_cache(name):
    plugin = schemes()[name]
    assert plugin.name == name
    first = (plugin.__doc__ or "").strip().splitlines()[0]
    assert first.endswith(".")
    assert not first.startswith(plugin.__name__ + "(")  # what a dataclass writes by itself
    assert plugin.version >= 1
    bits = "-4bit" if any(f.name == "bits" for f in dataclasses.fields(plugin)) else ""
    for preset in plugin.presets:
        assert parse_scheme(f"{name}{bits}:preset={preset}")
    with pytest.raises(SchemeError, match="`int3` is not supported"):
        parse_scheme(f"{name}{bits}:kv=int3")


def test_names_and_parameters_are_known_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['bitsandbytes'] = None\n"
        "from qaudit.core.registry import merges, parse_schemes, schemes\n"
        "from qaudit.settings import DEFAULT_SCHEMES\n"
        "print(len(parse_schemes(DEFAULT_SCHEMES)), len(schemes()), sorted(merges()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{len(DEFAULT_SCHEMES)} {len(schemes())} ")
