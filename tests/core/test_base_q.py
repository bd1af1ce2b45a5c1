"""BASE-Q beside plain linear algebra in double precision: folds, biases at run time, and stages."""

import numpy as np
import pytest
import torch

from qaudit.core.linears import FoldSource, Inputs, Linears, MiniBatch, Rows, WholeBlock
from qaudit.core.rotation import rotated, rotation
from qaudit.core.schemes.quarot import BaseQ, Basis, Turns, round_columns
from tests.support.filled import filled
from tests.support.schemes import example

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

    def run(hidden, quantized):
        now, read = dict(weights), {}
        for part in quantized:
            now |= part.weights
            read |= dict.fromkeys(part.weights, part.inputs)

        def linear(name, x):
            return read.get(name, lambda x: x)(x) @ now[name].to(x).T

        v = linear("v", hidden * norm_C)
        o = linear("o", v.unflatten(-1, (VALUES, WIDTH)).repeat_interleave(shared, -2).flatten(-2))
        return o + linear(
            "down",
            torch.tanh(linear("v", hidden * norm_C)).sum(-1, keepdim=True)
            * linear("up", hidden * norm_C),
        )

    def inputs(x):
        return Inputs((x.T @ x).float(), x.abs().mean(0).float(), len(x))

    v = x * norm_C @ weights["v"].T
    reads = {
        "v": x * norm_C,
        "o": v.unflatten(-1, (VALUES, WIDTH)).repeat_interleave(shared, -2).flatten(-2),
        "up": x * norm_C,
        "down": torch.tanh(v).sum(-1, keepdim=True) * (x * norm_C @ weights["up"].T),
    }
    groups = tuple(
        Linears({name: weight}, inputs(reads[name]), rows=rows, **folds[name])
        for name, weight in weights.items()
    )
    batch = MiniBatch(x[None], run(x[None], ()), torch.ones(1, TOKENS, dtype=torch.bool))
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
