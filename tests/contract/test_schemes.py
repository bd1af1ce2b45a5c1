"""What every registered scheme must keep. A new file in `core/schemes` is tested by being there.

What a scheme measures is what a file can hold: weights are decoded codes, bits are theirs.
"""

import dataclasses
import logging
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core.bnb_codes import FourBitCodes, Int8Codes
from qaudit.core.linears import Inputs, IntegerCodes, Linears
from qaudit.core.registry import parse_scheme, schemes
from qaudit.core.scheme import Calibration
from qaudit.core.schemes import duquant
from qaudit.engine.kept_weights import WeightKeeper, kept_groups
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


@pytest.fixture(autouse=True, scope="module")
def _few_steps():
    """Take few steps of a search where a contract holds after any number of them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(duquant, "STEPS", 8)
        yield


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
def test_double_precision_is_kept(scheme):
    for weight in filled(scheme.quantize(example(torch.float64)).weights.values()):
        assert weight.dtype == torch.float64
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
    return -(-count // size)


# Bytes of 32 values: 256 divides the columns of none of the examples. Of the one block of a model,
# values have 8 bits in a mix, queries the fallback of most linears.
GGUF_NBYTES = {"q8_0": 34, "q6_k": 34, "q5_k": 24, "q4_k": 22, "q4_0": 18, "q3_k": 18}
MIXED_NBYTES = {"q4_k_m": {12: 22, 7: 34}, "q3_k_m": {12: 18, 7: 24}}


def nbits_of(scheme, rows, columns):
    """Count the storage of one linear from the parameters of its scheme."""
    name, bits = scheme.name, getattr(scheme, "bits", 4)
    scale = 16 if getattr(scheme, "scale_dtype", "bf16") == "bf16" else 32
    group = getattr(scheme, "group", -1)
    groups = _ceil(columns, columns if group == -1 else group)
    kept = min(getattr(scheme, "keep", 0), columns // 16)
    if name in ("rtn", "gptq", "gptaq", "qronos", "awq", "quarot", "quarot-rtn"):
        symmetric = not getattr(scheme, "zero_point", not getattr(scheme, "sym", True))
        moved = getattr(scheme, "act_order", False) and not scheme.static_groups and groups > 1
        each = scale + (0 if symmetric else bits)
        return rows * (columns * bits + groups * each) + (32 * columns if moved else 0)
    if name.startswith("gguf-"):
        kind = name.removeprefix("gguf-")
        nbytes = MIXED_NBYTES[kind][rows] if kind in MIXED_NBYTES else GGUF_NBYTES[kind]
        return rows * columns // 32 * nbytes * 8
    if name == "quik":
        return rows * (bits * (columns - kept) + 16) + (rows * 16 + 32) * kept
    if name == "atom":
        groups = _ceil(columns - kept, columns if group == -1 else group)
        each = bits * (columns - kept) + 16 * groups + 8 * kept + (16 if scheme.keep else 0)
        return rows * each + 32 * columns
    if name == "fp8":
        blocks = _ceil(rows, 128) * _ceil(columns, 128) if scheme.blocks else rows
        return 8 * rows * columns + scale * blocks
    if name in ("mxfp4", "mxfp4a16") or getattr(scheme, "format", "") == "mxfp4":
        return rows * (4 * columns + 8 * _ceil(columns, 32))
    if name in ("nvfp4", "nvfp4a16", "mr-gptq"):
        whole = 64 if name == "nvfp4" or getattr(scheme, "act", 16) == 4 else 32
        return rows * (4 * columns + 8 * _ceil(columns, 16)) + whole
    if name in ("bnb-nf4", "bnb-fp4"):
        blocks = _ceil(rows * columns, scheme.blocksize)
        nested = 8 * blocks + 32 * _ceil(blocks, 256) + 32
        return 4 * rows * columns + (nested if scheme.double_quant else 32 * blocks)
    each = {"bnb-int8": 8 * columns + 32, "hqq": bits * columns + groups * 2 * scale}
    each |= dict.fromkeys(("int8", "smoothquant"), 8 * columns + scale)
    each |= dict.fromkeys(LEARNED, bits * columns + 16)
    return rows * ({"duquant": bits * (columns + 1) + scale} | each)[name]


def recount(scheme, linears, quantized):
    """Count storage from parameters: of all linears, and of what is in front of them."""
    if scheme.mixes_bits:  # without a table all linears have the whole bits of the budget
        scheme = scheme.member(int(scheme.budget))
    shapes = [weight.shape for weight in linears.weights.values()]
    total = sum(nbits_of(scheme, *shape) for shape in shapes)
    if any("unfolded" in note for note in quantized.notes):
        total += (16 if scheme.scale_dtype == "bf16" else 32) * shapes[0][1]
    return total + transform_nbits(scheme, shapes[0][1])


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
def test_inputs_that_are_needed_or_no_numbers_are_refused_by_name(scheme):
    for bad in (float("nan"), -float("inf")):
        linears = example()
        linears.weights["attn.v_proj"][2, 9] = bad
        with pytest.raises(SourceError, match=r"`attn\.v_proj`"):
            scheme.quantize(linears)
    linears = example()
    linears.inputs.gram_CC[4, 5] = float("inf")
    with pytest.raises(SourceError, match=r"`attn\.q_proj`, `attn\.v_proj`"):
        scheme.quantize(linears)
    bare = Linears(example().weights)
    if scheme.calibration is Calibration.NONE:
        assert scheme.quantize(bare).weights
    else:
        with pytest.raises(SourceError, match=r"`attn\.q_proj`"):
            scheme.quantize(bare)


@every_grouped_scheme
def test_groups_that_do_not_fit_a_row_are_noted_and_one_larger_is_the_row(scheme):
    ragged, wide, whole = (
        dataclasses.replace(scheme, group=group).quantize(example()) for group in (48, 1024, -1)
    )
    assert "leave a last group" in " ".join(ragged.notes)
    assert "become one group per row" in " ".join(wide.notes)
    assert "leave a last group" not in " ".join(wide.notes + whole.notes)
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


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def group_of(stored):
    """Return the group of every column, counted one by one."""
    if stored.group_of_C is not None:
        return stored.group_of_C.numpy()
    return np.array([column // stored.group for column in range(stored.codes_RC.shape[1])])


def decoded(stored):
    """Decode in numpy, in double precision, where the form is one of those known here."""
    if isinstance(stored, IntegerCodes):
        codes, scales = stored.codes_RC.double().numpy(), stored.scales_RG.double().numpy()
        assert stored.codes_RC.dtype == torch.uint8
        assert codes.max() < 2**stored.bits
        zeros = np.full_like(scales, 2 ** (stored.bits - 1))
        if stored.zeros_RG is not None:
            assert stored.zeros_RG.dtype == torch.uint8
            zeros = stored.zeros_RG.double().numpy()
            assert zeros.max() < 2**stored.bits
        groups = group_of(stored)
        assert set(groups) == set(range(scales.shape[1]))
        return (codes - zeros[:, groups]) * scales[:, groups]
    if isinstance(stored, Int8Codes):
        # Two products in float32, as in bitsandbytes.
        products = stored.codes_RC.float().numpy() * stored.absmax_R.numpy()[:, None]
        return products * np.float32(1 / 127)
    if not isinstance(stored, FourBitCodes):
        return stored.decode().double().numpy()
    codes = np.stack([stored.packed.numpy() >> 4, stored.packed.numpy() & 15], axis=1).flatten()
    maxima = stored.absmax.numpy()
    if (nested := stored.nested) is not None:
        coarse = np.repeat(nested.absmax.numpy(), 256)[: len(maxima)]
        # In float32, where bitsandbytes rounds the product and the sum.
        maxima = (nested.table.numpy()[maxima] * coarse) + nested.offset.numpy()
    blocks = np.repeat(maxima, stored.blocksize)[: len(codes)]
    values = stored.table.double().numpy()[codes] * blocks.astype(np.float64)
    return values[: int(np.prod(stored.shape))].reshape(stored.shape)


def stored_nbits(stored):
    """Count by the number of values in each tensor, where the form is one of those known here."""
    if isinstance(stored, IntegerCodes):
        rows, groups = stored.scales_RG.shape
        each = 8 * stored.scales_RG.element_size() + (0 if stored.zeros_RG is None else stored.bits)
        index = 0 if stored.group_of_C is None else 32 * stored.group_of_C.numel()
        return stored.codes_RC.numel() * stored.bits + rows * groups * each + index
    if isinstance(stored, Int8Codes):
        tensors = [stored.codes_RC, stored.absmax_R]
    elif isinstance(stored, FourBitCodes):
        tensors = [stored.packed, stored.absmax]
        if stored.nested is not None:
            tensors += [stored.nested.absmax, stored.nested.offset]
    else:
        return stored.nbits
    return sum(8 * tensor.element_size() * tensor.numel() for tensor in tensors)


def check(scheme, linears):
    """Hold a scheme's weights and bits against its stored forms, decoded in another way."""
    quantized = scheme.quantize(linears)
    assert list(quantized.stored) == list(linears.weights)
    total = sum(stored_nbits(stored) for stored in quantized.stored.values())
    assert sum(stored.nbits for stored in quantized.stored.values()) == total
    if any("unfolded" in note for note in quantized.notes):
        width = 16 if scheme.scale_dtype == "bf16" else 32
        total += width * len(quantized.column_scale_C)
    columns = next(iter(linears.weights.values())).shape[1]
    assert quantized.bits == total + transform_nbits(scheme, columns)
    for name, stored in filled(quantized.stored.items()):
        wide = torch.from_numpy(decoded(stored)).float()  # one rounding of the exact product
        assert torch.equal(stored.decode().float(), wide.to(stored.decode().dtype).float())
        if quantized.column_scale_C is not None:
            wide /= quantized.column_scale_C
        weight = quantized.weights[name]
        assert torch.equal(weight, wide.to(weight.dtype))
        assert weight.dtype == linears.weights[name].dtype
        assert torch.isfinite(weight).all()
        if isinstance(stored, IntegerCodes) and getattr(scheme, "scale_dtype", "") == "bf16":
            scales = stored.scales_RG
            assert scales.dtype == torch.bfloat16
            assert torch.equal(scales.half().float(), scales.float())  # float16 holds them too
            assert scales.min() >= 2.0**-17


@every_scheme
def test_weights_are_decoded_from_what_is_stored(scheme):
    check(scheme, example(torch.bfloat16, fold=True))
    for dtype in (torch.float32, torch.float16) if scheme in PLAIN else ():
        check(scheme, example(dtype))


SPECS = st.sampled_from(["rtn", "gptq", "awq"])


@given(
    name=SPECS,
    rows=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    columns=st.integers(1, 70),
    group=st.one_of(st.just(-1), st.integers(1, 80)),
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    order=st.sampled_from([{}, {"act_order": True}, {"act_group_aware": False}]),
    static_groups=st.booleans(),
    scale_dtype=st.sampled_from(["bf16", "float32"]),
    dtype=st.sampled_from(DTYPES),
    fold=st.booleans(),
    magnitude=st.sampled_from([1e-7, 1e-3, 1.0, 100.0]),
    seed=st.integers(0, 2**16),
)
def test_any_shape_group_and_order(
    name, rows, columns, group, bits, symmetric, order, static_groups, scale_dtype, dtype, fold,
    magnitude, seed,
):  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(columns + 20, columns, generator=generator)
    x *= torch.exp(torch.randn(columns, generator=generator))
    weights = {
        f"attn.{role}_proj": (magnitude * torch.randn(count, columns, generator=generator)).to(
            dtype
        )
        for role, count in zip("qv", rows, strict=True)
    }
    inputs = Inputs(x.T @ x, x.abs().mean(0), len(x))
    fold_C = torch.arange(columns) // 2 if fold else None
    scheme = parse_scheme(f"{name}-{bits}bit:group={group}:scale_dtype={scale_dtype}")
    if name == "gptq":
        order = {"act_group_aware": False, **order} if order.get("act_order") else order
        scheme = dataclasses.replace(scheme, static_groups=static_groups, **order)
    flag = "zero_point" if name == "awq" else "sym"
    value = not symmetric if name == "awq" else symmetric
    check(dataclasses.replace(scheme, **{flag: value}), Linears(weights, inputs, fold_C))


@pytest.mark.parametrize("shape", [(3, 64), (5, 13), (7, 33)])
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("table", ["nf4", "fp4"])
def test_blocks_of_the_flattened_weight(table, double_quant, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    scheme = parse_scheme(f"bnb-{table}:blocksize=32:double_quant={double_quant}")
    check(scheme, Linears({"w": weight}))


def test_the_index_of_groups_says_where_each_column_is():
    spec = "gptq-4bit:group=16:act_order=true:act_group_aware=false"
    linears = example()
    stored = parse_scheme(spec).quantize(linears).stored["attn.q_proj"]
    largest_first = torch.argsort(linears.inputs.gram_CC.diagonal(), descending=True)
    expected = torch.empty(160, dtype=torch.int32)
    expected[largest_first] = torch.arange(160, dtype=torch.int32) // 16
    assert torch.equal(stored.group_of_C, expected)


@every_plain_scheme
def test_what_is_kept_of_a_scheme_is_read_as_the_weights_that_were_measured(scheme, tmp_path):
    linears = example(torch.bfloat16)
    quantized = scheme.quantize(linears)
    WeightKeeper({scheme.spec: tmp_path}, None).observe(scheme, linears, quantized)
    ((_, read),) = kept_groups(tmp_path)
    assert read.bits == quantized.bits
    for name, weight_RC in filled(quantized.weights.items()):
        assert torch.equal(read.weights[name], weight_RC)
        assert read.stored[name].nbits == quantized.stored[name].nbits
