"""Rotations that are fixed and learned, DuQuant and BASE-Q, beside plain linear algebra."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard

from qaudit.core.linears import FoldSource, Inputs, Linears, MiniBatch, Rows, WholeBlock, alone
from qaudit.core.registry import parse_scheme
from qaudit.core.rotation import (
    LearningCourse,
    Transform,
    cayley_step,
    descend,
    learn,
    rotate,
    rotated,
    rotation,
    total_error,
)
from qaudit.core.scheme import Calibration
from qaudit.core.schemes.duquant import Clips, DualTurn, even_rotation, greedy_rotation, zigzag
from qaudit.core.schemes.quarot import BaseQ, Basis, Turns, round_columns
from tests.support.filled import filled
from tests.support.reference.plain_gptq import gptq, stored_scale
from tests.support.schemes import COLUMNS, LEARNED, TRANSFORMS, example, output_error


@given(st.integers(1, 300), st.integers(0, 99))
def test_rotations_are_orthogonal_symmetric_and_flat_and_made_of_two_small_products(n, seed):
    matrix = rotation(n)
    assert torch.allclose(matrix @ matrix.T, torch.eye(n).double(), atol=1e-13)
    assert torch.allclose(matrix, matrix.T, atol=1e-13)
    assert float(matrix.abs().max()) <= (2 / n) ** 0.5 + 1e-12
    x = torch.randn(3, n, generator=torch.Generator().manual_seed(seed)).double()
    assert torch.allclose(rotate(x), x @ matrix, atol=1e-11)
    assert np.allclose(rotation(64).numpy() * 8, hadamard(64))


def test_second_moments_are_those_of_rotated_inputs():
    x = torch.randn(400, COLUMNS, generator=torch.Generator().manual_seed(0))
    linears = example()
    inputs = replace(linears.inputs, gram_CC=x.T @ x)
    gram = rotated(replace(linears, inputs=inputs)).inputs.gram_CC
    expected = rotate(x.double()).T @ rotate(x.double())
    assert torch.allclose(gram.double(), expected, atol=1e-2)  # of 400 in float32
    assert torch.equal(gram, gram.T)


def test_activations_are_cut_and_rounded_as_published():
    x = torch.randn(6, COLUMNS, generator=torch.Generator().manual_seed(1))
    quantized = parse_scheme("quarot-rtn-4bit:rotate=false").quantize(example())
    scale = 0.9 * x.abs().amax(1, keepdim=True) / 7
    assert torch.allclose(quantized.inputs(x), (x / scale).round().clamp(-8, 7) * scale)


def test_turning_helps_where_columns_stand_out():
    linears = example()
    x = torch.randn(200, COLUMNS, generator=torch.Generator().manual_seed(1))
    x *= linears.inputs.absmax_C / 3
    specs = "quarot-rtn-4bit:rotate=false", "quarot-rtn-4bit", "quarot-4bit"
    without, nearest, gptq = (output_error(linears, spec, x) for spec in specs)
    assert nearest < without / 2
    assert gptq < nearest
    for spec in ("duquant-4bit", "duquant-4bit:block=32"):
        assert output_error(linears, spec, x) < without / 2


# --------------------------------------------------------------------------------------------------
# Learned transformations: exact in themselves, repeatable, and better than where they start.


@cache
def learned(name):
    """Return a scheme and what it learns of the example."""
    scheme = parse_scheme(f"{name}-4bit:steps=20")
    (turn,) = learn(alone(example(), name), scheme._start, scheme._goal, 20)
    return scheme, turn


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_transformation_alone_leaves_the_product(name):
    linears = example()
    scheme, turn = learned(name)
    x = linears.inputs.sample_TC
    assert not torch.equal(turn.right_BB, scheme._start(linears).right_BB)
    for weight in linears.weights.values():
        product, exact = turn.of_inputs(x) @ turn.of_weights(weight).T, x @ weight.T
        assert float((product - exact).norm() / exact.norm()) < 1e-5
    gram = turn.of_inputs(x).double()
    assert torch.allclose(turn.of_gram(x.T @ x).double(), gram.T @ gram, rtol=1e-3, atol=1e-2)
    if name != "flatquant":
        for one in (turn.left_AA, turn.right_BB):
            assert torch.allclose(one @ one.T, torch.eye(len(one)), atol=1e-5)
    scaled = not torch.equal(turn.scale_C, torch.ones(COLUMNS))
    assert scaled == (name != "spinquant")  # where none is learned, none is stored


def in_double(turn, linears):
    """Return the matrix of a transformation, and each turned weight, by plain linear algebra."""
    factors = (one.double().numpy() for one in (turn.left_AA, turn.right_BB))
    matrix = np.kron(*factors) / turn.scale_C.double().numpy()[:, None]
    inverse = np.linalg.inv(matrix)
    turned = {n: w.double().numpy() @ inverse.T for n, w in linears.weights.items()}
    return matrix, turned


def test_flatquant_is_plain_rounding_behind_its_matrix():
    linears = example()
    scheme, turn = learned("flatquant")
    quantized = scheme._apply(linears, turn)
    matrix, turned = in_double(turn, linears)
    for name, weight in turned.items():
        share = turn.row_clips[name].double().numpy()
        largest = np.abs(weight).max(1, keepdims=True)
        scale = stored_scale(share * np.where(largest == 0, 1, largest) / 7, "bf16")
        expected = np.clip(np.round(weight / scale), -8, 7) * scale
        off = np.abs(quantized.weights[name].numpy() - expected) / scale
        # Weights are turned in float32, 1e-6 of a step off: about one in 1e5 is that near to a tie.
        assert (off > 1e-4).sum() <= 2
    x = linears.inputs.sample_TC.double().numpy() @ matrix
    scale = float(turn.token_clip) * np.abs(x).max(1, keepdims=True) / 7
    expected = np.clip(np.round(x / scale), -8, 7) * scale
    off = np.abs(quantized.inputs(linears.inputs.sample_TC).numpy() - expected) / scale
    assert (off > 1e-3).mean() < 1e-4


@pytest.mark.parametrize("name", ["spinquant", "ostquant"])
def test_rotated_weights_are_plain_gptq_behind_their_matrix(name):
    linears = example(torch.float64)
    scheme, turn = learned(name)
    parts = turn.left_AA, turn.right_BB, turn.scale_C, turn.token_clip
    wide = Transform(*(one.double() for one in parts), {})
    gram_CC = linears.inputs.gram_CC.double()
    inputs = Inputs(gram_CC, linears.inputs.absmean_C.double(), linears.inputs.tokens)
    given_weights = {n: wide.of_weights(w) for n, w in linears.weights.items()}
    stored, _ = scheme._round(replace(linears, inputs=inputs), given_weights, wide)
    matrix, turned = in_double(wide, linears)
    for key, weight in turned.items():
        scale = stored[key].scales_RG.double().numpy()[:, 0]
        options = {"bits": 4, "group": -1, "damp": 0.01, "find": lambda _, scale=scale: (scale, 8)}
        _, expected = gptq(weight, matrix.T @ gram_CC.numpy() @ matrix, **options)
        np.testing.assert_allclose(stored[key].decode().numpy(), expected, atol=1e-12)


@given(st.integers(2, 20), st.floats(0.01, 1.0), st.integers(0, 99))
def test_a_cayley_step_is_orthogonal_and_goes_down(size, angle, seed):
    generator = torch.Generator().manual_seed(seed)
    start = torch.linalg.qr(torch.randn(size, size, generator=generator).double()).Q
    target = torch.randn(size, size, generator=generator).double()
    moved = cayley_step(start, -target, angle)  # the gradient of -(turn * target).sum()
    assert torch.allclose(moved @ moved.T, torch.eye(size).double(), atol=1e-10)
    small = cayley_step(start, -target, 1e-4)
    assert float((small * target).sum()) >= float((start * target).sum())


def test_what_is_learned_with_is_what_is_made():
    linears = example()
    scheme, turn = learned("flatquant")
    course = LearningCourse(linears, turn, replace(scheme._goal, clipping=False))
    expected, made = course.quantized(), scheme._apply(linears, turn)
    x = linears.inputs.sample_TC
    torch.testing.assert_close(expected.inputs(x), made.inputs(x), rtol=0, atol=1e-5)
    for name, weight in filled(made.weights.items()):
        # The inverse of the same matrix with a gradient and without: equal but for its rounding.
        assert torch.isclose(expected.weights[name], weight, atol=1e-6).float().mean() > 0.999


@pytest.mark.parametrize("name", LEARNED)
def test_learning_helps_on_text_that_was_not_seen(name):
    linears = example()
    # Other tokens with the same second moments.
    x = torch.randn(600, COLUMNS, generator=torch.Generator().manual_seed(3)).double()
    gram = linears.inputs.gram_CC.double() / linears.inputs.tokens
    x = (x @ torch.linalg.cholesky(gram).T).float()
    spec = name if name.startswith("base-q") else f"{name}-4bit"
    start, end = (output_error(linears, f"{spec}:steps={n}", x) for n in (0, 60))
    assert end < start
    if name == "flatquant":
        assert end < 0.8 * output_error(linears, "quarot-rtn-4bit", x)


def test_the_start_is_kept_where_steps_only_do_harm():
    linears = example()
    scheme = parse_scheme("flatquant-4bit")
    goal = replace(scheme._goal, rate=1e3)
    start = scheme._start(linears)
    course = LearningCourse(linears, start, goal)
    assert not descend(alone(linears, "flatquant"), [course], 6)
    assert torch.equal(course.transform().right_BB, start.right_BB)
    assert torch.equal(course.transform().scale_C, start.scale_C)


@pytest.mark.parametrize("columns", [1, 7, 97, 96])
def test_every_width_has_a_kronecker_product(columns):
    start = Transform.start(torch.ones(columns), {}, 4)
    assert len(start.left_AA) * len(start.right_BB) == columns
    x = torch.randn(4, columns)
    assert torch.allclose(start.of_inputs(x).norm(dim=1), x.norm(dim=1), atol=1e-4)


# --------------------------------------------------------------------------------------------------
# DuQuant's parts against their definitions.


@given(st.integers(1, 60))
def test_the_even_rotation_is_the_published_product_of_givens_matrices(size):
    turn = np.eye(size)
    for i in range(size - 1):
        givens = np.eye(size)
        givens[i, i] = givens[i + 1, i + 1] = 1 / np.sqrt(i + 2)
        givens[i, i + 1], givens[i + 1, i] = -np.sqrt((i + 1) / (i + 2)), np.sqrt((i + 1) / (i + 2))
        turn = givens @ turn
    order = np.arange(size)
    order[[0, size - 1]] = order[[size - 1, 0]]
    expected = turn[order][:, order]
    np.testing.assert_allclose(even_rotation(size).numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(np.abs(expected[0]), 1 / np.sqrt(size), atol=1e-12)


def test_a_greedy_step_spreads_the_largest_column_and_zigzag_goes_forth_and_back():
    x = torch.zeros(1, 8, dtype=torch.float64)
    x[0, 3] = 4.0
    assert float((x @ greedy_rotation(x)).abs().max()) <= 4 / 8**0.5 + 1e-12
    assert zigzag(torch.tensor([9.0, 8, 7, 6, 5, 4]), 2).tolist() == [0, 5, 1, 4, 2, 3]


@given(st.integers(1, 70), st.integers(1, 40), st.integers(0, 9))
def test_zigzag_deals_every_column_once_and_blocks_are_alike(columns, block, seed):
    size = torch.rand(columns, generator=torch.Generator().manual_seed(seed))
    order = zigzag(size, block)
    assert sorted(order.tolist()) == list(range(columns))
    if columns % block == 0:
        means = size[order].reshape(-1, block).mean(1)
        # As the paper's bound: blocks differ by no more than one gap of the sorted sizes each deal.
        assert float(means.max() - means.min()) <= float(size.max() - size.min()) / block * 2 + 1e-6


@given(st.integers(2, 90), st.sampled_from([-1, 7, 16, 128]), st.integers(0, 9))
@settings(max_examples=10)
def test_the_whole_transformation_is_orthogonal(columns, block, seed):
    sample = torch.randn(12, columns, generator=torch.Generator().manual_seed(seed)).double()
    identity = torch.eye(columns).double()
    turn = DualTurn.of(sample, block)(identity)
    assert torch.allclose(turn @ turn.T, identity, atol=1e-9)


def test_learned_shares_are_plain_rounding_and_come_nearer():
    scheme, linears = parse_scheme("duquant-4bit:lwc=true"), example()
    assert "lwc" not in parse_scheme("duquant-4bit").spec
    assert parse_scheme(scheme.spec) == scheme
    assert scheme.calibration is Calibration.WHOLE_BLOCK
    block, clips = alone(linears, "duquant"), Clips(scheme, linears)
    before = total_error(block, [clips])
    assert descend(block, [clips], 30)
    assert total_error(block, [clips]) < 0.9 * before
    scale_C, sample_TC = clips._scale_C.double(), linears.inputs.sample_TC
    turn = DualTurn.of(sample_TC / clips._scale_C, scheme.block)
    matrix = turn(torch.eye(COLUMNS)).double()
    for name, weight in linears.weights.items():
        turned = (weight.double() * scale_C @ matrix).numpy()
        below, above = torch.sigmoid(clips._ends[name]).double().detach().numpy()
        low = np.minimum(below * turned.min(1, keepdims=True), 0)
        high = np.maximum(above * turned.max(1, keepdims=True), 0)
        high[low == high] += 1
        scale = stored_scale((high - low) / 15, "bf16")
        zero = np.round(-low / scale)
        expected = (np.clip(np.round(turned / scale) + zero, 0, 15) - zero) * scale
        alive = turned.any(1)  # a row of zeros is zero on any grid
        off = np.abs(clips.stored(name).decode().numpy() - expected) / scale
        # Turned in float32: about one weight in 1e5 is so near to a tie that it falls otherwise.
        assert (off[alive] > 1e-4).sum() <= 2
        assert not clips.stored(name).decode()[~torch.from_numpy(alive)].any()


# --------------------------------------------------------------------------------------------------
# BASE-Q: folds, biases at run time, and stages.


HEADS, VALUES, WIDTH, HIDDEN, INNER, TOKENS = 4, 2, 6, 16, 20, 300


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def small_block():
    """Linears of a block whose heads share values, in double precision, and what it returns."""
    shared = HEADS // VALUES
    of_value = torch.arange(VALUES).repeat_interleave(shared)[:, None] * WIDTH
    norm_C = 1 + 0.3 * drawn(HIDDEN, seed=1)
    weights = {
        "v": drawn(VALUES * WIDTH, HIDDEN, seed=2),
        "o": drawn(HIDDEN, HEADS * WIDTH, seed=3),
        "up": drawn(INNER, HIDDEN, seed=4),
        "down": drawn(HIDDEN, INNER, seed=5),
    }
    rows = {"v": Rows(0, VALUES * WIDTH, WIDTH)}
    rows |= dict.fromkeys(("o", "down"), Rows(0, HIDDEN, HIDDEN))
    norm = FoldSource("norm", is_norm=True)
    folds = {
        "v": {"norm_C": norm_C, "fold_source": norm, "fold_is_norm": True},
        "o": {
            "fold_C": (of_value + torch.arange(WIDTH)).flatten(),
            "fold_source": FoldSource("v", is_norm=False),
        },
        "up": {"norm_C": norm_C, "fold_source": norm, "fold_is_norm": True},
        "down": {"fold_C": torch.arange(INNER), "fold_source": FoldSource("up", is_norm=False)},
    }
    x = drawn(TOKENS, HIDDEN, seed=6) * torch.linspace(0.3, 3, HIDDEN).double() + 0.5
    reads = {}

    def run(hidden, quantized):
        now, changed = dict(weights), {}
        for part in quantized:
            now |= part.weights
            changed |= dict.fromkeys(part.weights, part.inputs)

        def linear(name, x):
            reads.setdefault(name, x[0])  # the first run is that of full precision
            return changed.get(name, lambda x: x)(x) @ now[name].to(x).T

        v, up = linear("v", hidden * norm_C), linear("up", hidden * norm_C)
        heads = v.unflatten(-1, (VALUES, WIDTH)).repeat_interleave(shared, -2).flatten(-2)
        down = linear("down", torch.tanh(v).sum(-1, keepdim=True) * up)
        return linear("o", heads) + down

    batch = MiniBatch(x[None], run(x[None], ()), torch.ones(1, TOKENS, dtype=torch.bool))
    groups = ()
    for name, weight in weights.items():
        x = reads[name]
        inputs = Inputs((x.T @ x).float(), x.abs().mean(0).float(), len(x))
        groups += (Linears({name: weight}, inputs, rows=rows, **folds[name]),)
    return WholeBlock(groups, (batch,), lambda: groups, run), reads


def test_folds_and_rotations_leave_every_product_whatever_was_learned():
    block, reads = small_block()
    by_name = {name: linears for linears in block.groups for name in linears.weights}
    turns = {"v": Turns.start(by_name["o"], Rows(0, VALUES * WIDTH, WIDTH))}
    for k, turn in enumerate(turns["v"].each):
        turn.data = torch.linalg.qr(drawn(WIDTH, WIDTH, seed=k)).Q
    for name, linears in filled(by_name.items()):
        basis = Basis(linears, turns)
        for scale, _ in basis.free:
            scale.data = 0.3 * drawn(len(scale), seed=9)
        assert len(basis.free) == (name in ("o", "down"))
        x, weight = reads[name].numpy(), linears.weights[name].numpy()
        with torch.no_grad():
            turned = basis.of_weight(name)
            back = basis.outwards(name, turned).numpy()
            read = basis.inputs(reads[name]).numpy()
        np.testing.assert_allclose(read @ back.T, x @ weight.T, rtol=1e-9, atol=1e-9)
        assert not np.allclose(turned, weight)
    # What values are rounded as: each head's rows behind the rotation that was learned of it.
    basis = Basis(by_name["v"], turns)
    inner = (by_name["v"].weights["v"] * by_name["v"].norm_C) @ rotation(HIDDEN)
    expected = [turn @ inner[k * WIDTH : (k + 1) * WIDTH] for k, turn in enumerate(turns["v"].each)]
    torch.testing.assert_close(basis.of_weight("v"), torch.cat(expected), rtol=0, atol=1e-6)


def test_a_bias_at_run_time_gives_what_the_inputs_give():
    block, reads = small_block()
    scheme, down = BaseQ(), block.groups[-1]
    basis = Basis(down, {})
    reading = scheme._rounded(basis)
    reading.bias_C.data = drawn(INNER, seed=1).float()
    reading.log_scale_C.data = 0.1 * drawn(INNER, seed=2).float()
    reading.clip.data = torch.tensor(1.5)
    quantized = reading.end()
    bias = reading._unit * reading.bias_C.double().numpy()
    moved = reads["down"].numpy() @ rotation(INNER).numpy()
    moved = moved * np.exp(reading.log_scale_C.double().numpy()) - bias
    low, high = (f(moved, axis=1, keepdims=True) / (1 + np.exp(-1.5)) for f in (np.min, np.max))
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    scale = (high - low) / 15
    zero = np.round(-low / scale)
    codes = np.clip(np.round(moved / scale) + zero, 0, 15)
    weight = quantized.weights["down"].numpy()
    at_run_time = ((codes - zero) * scale) @ weight.T + weight @ bias
    given = (quantized.inputs(reads["down"]) @ quantized.weights["down"].T).numpy()
    off = np.abs(given - at_run_time).max(1) / np.abs(at_run_time).max()
    assert (off > 1e-6).sum() <= 2  # a share in float32 can move a tie
    assert quantized.bits == 16 * (4 * INNER + 16) + 2 * 16 * INNER


@pytest.mark.parametrize("steps", [0, 1])
def test_without_steps_weights_are_those_of_gptq_behind_the_rotation(steps):
    linears = example()
    basis = rotated(linears)
    rounded = round_columns(basis, 4, damp=0.01, act_order=True)
    quantized = BaseQ(steps=steps).quantize(linears)
    for name, weight in filled(rounded.weights.items()):
        torch.testing.assert_close(quantized.weights[name], weight, rtol=0, atol=1e-6)


def test_each_stage_lowers_the_error_of_the_block():
    block, _ = small_block()

    def error(scheme):
        quantize = scheme.train(block)
        (batch,) = block.batches
        with torch.no_grad():
            out = block.run(batch.hidden_BTD, [quantize(linears) for linears in block.groups])
        return float((out - batch.target_BTD).square().sum())

    start, half, both = (error(BaseQ(steps=steps)) for steps in (0, 1, 60))
    assert both < half <= start
