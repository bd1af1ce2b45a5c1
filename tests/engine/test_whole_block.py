"""What a scheme sees of a whole block, against two whole models run by the library."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from qaudit.core.linears import Quantized
from qaudit.core.registry import parse_schemes
from qaudit.core.scheme import Calibration
from qaudit.core.schemes.nearest import RoundToNearest
from qaudit.engine.batches import backwards, make_batches
from tests.support import passes, tiny
from tests.support.filled import filled
from tests.support.passes import (
    CALIBRATION,
    CONTEXT,
    feed,
    on_llama,
    opened,
    plain_model,
    run,
    tallies_of,
)


@dataclass(frozen=True, kw_only=True)
class Watching(RoundToNearest):
    """Round to nearest, and keep what each block showed."""

    calibration = Calibration.WHOLE_BLOCK
    seen: list = field(default_factory=list, compare=False)
    weights: dict = field(default_factory=dict, compare=False)
    look: object = field(default=lambda block: list(block.batches), compare=False)

    @property
    def spec(self):
        return "watching"

    def quantize(self, linears):
        quantized = super().quantize(linears)
        for name, weight in quantized.weights.items():
            self.weights[linears.block, name] = weight.clone()
        return quantized

    def train(self, block):
        self.seen.append(self.look(block))
        return self.quantize


def watched(folder, tmp_path, given, limit=10**9, dtype=torch.float32, **options):
    scheme = Watching(bits=3, group=32, **options)
    tallies_of(opened(folder, dtype), [scheme], tmp_path, given, limit)
    return scheme


@torch.no_grad()
def hidden_states(model):
    """Return what enters each layer of a whole model, and what leaves it, by window."""
    states = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, args, out: states[-1].append((args[0], out)))
    for window in CALIBRATION:
        states.append([])
        model(input_ids=torch.from_numpy(window.tokens.astype("int64"))[None], use_cache=False)
    return states


@pytest.mark.parametrize(
    ("make", "family", "limit"),
    [
        (passes.save, "llama", 0),
        (passes.save, "olmo2", 10**9),
        (tiny.make, "gemma4_text", 0),  # keys of earlier blocks are in mini-batches
        (tiny.make, "gemma4_text", 10**9),
    ],
)
def test_batches_are_those_of_two_whole_models(make, family, limit, once, tmp_path, monkeypatch):
    checkpoint = once(make, family)
    monkeypatch.setattr("qaudit.engine.tokens.STEP_TOKENS", 100)
    scheme = watched(checkpoint, tmp_path, feed(), limit)
    assert not list(tmp_path.glob("*"))  # nothing that was spilled is left
    assert len(scheme.seen) == (4 if make is tiny.make else 3)
    full, own = plain_model(checkpoint), plain_model(checkpoint)
    for (block, name), weight in scheme.weights.items():
        own.model.layers[block].get_submodule(name).weight.data = weight
    targets, entering = hidden_states(full), hidden_states(own)
    ordered = sorted(range(len(CALIBRATION)), key=lambda w: (-len(CALIBRATION[w].tokens), w))
    for block, batches in filled(enumerate(scheme.seen)):
        rows = [
            (batch.hidden_BTD[row, :length, :64], batch.target_BTD[row, :length])
            for batch in batches
            for row, length in enumerate(batch.valid_BT.sum(1).tolist())
        ]
        assert len(batches) > 2
        assert len(rows) == len(ordered)
        for window, (hidden, target) in zip(ordered, rows, strict=True):
            # Batches of other shapes round otherwise: sums of up to 256 terms, each off by a unit
            # of float32 at random, in every block so far.
            units = 256**0.5 * (block + 1) * torch.finfo(torch.float32).eps
            for found, expected in (
                (hidden, entering[window][block][0][0]),
                (target, targets[window][block][1][0]),
            ):
                most = units * float(expected.abs().max())
                torch.testing.assert_close(found, expected, rtol=0, atol=most)


@on_llama
def test_a_pass_that_rounds_otherwise_learns_on_the_same_windows(checkpoint, tmp_path):
    plain = watched(checkpoint, tmp_path, feed()).seen
    fed = backwards(make_batches(CALIBRATION, CONTEXT, 80))
    moved = watched(checkpoint, tmp_path, replace(feed(), calibration=fed, perturbed=True)).seen
    for batch, same in filled(zip(plain[0], moved[0], strict=True)):
        assert torch.equal(batch.valid_BT, same.valid_BT)
        valid = batch.valid_BT
        for name in ("hidden_BTD", "target_BTD"):
            values, others = (getattr(some, name)[valid] for some in (batch, same))
            torch.testing.assert_close(values, others, atol=1e-5, rtol=0)


def slope_by_hand_and_by_autograd(block):
    """Return how fast the output moves along a random direction of all weights and inputs."""
    generator = torch.Generator().manual_seed(0)
    start, ways = {}, {}
    for group in block.groups:
        for name, weight in group.weights.items():
            start[name] = weight.clone().requires_grad_()
            ways[name] = 0.02 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        scale = torch.ones(weight.shape[1], dtype=weight.dtype)
        start[group] = scale.requires_grad_()
        ways[group] = torch.randn(scale.shape, generator=generator, dtype=weight.dtype)

    def output(step):
        moved = {key: one + step * ways[key] for key, one in start.items()}
        quantized = [
            Quantized({n: moved[n] for n in g.weights}, 0, inputs=lambda x, g=g: x * moved[g])
            for g in block.groups
        ]
        out = block.run(block.batches[0].hidden_BTD, quantized)
        return (out * torch.linspace(-1, 1, out.numel()).to(out).view_as(out)).sum()

    with torch.enable_grad():
        slopes = torch.autograd.grad(output(0.0), list(start.values()))
    by_autograd = sum(float((s * w).sum()) for s, w in zip(slopes, ways.values(), strict=True))
    step = 3e-3
    return float(output(step) - output(-step)) / (2 * step), by_autograd


@on_llama
def test_gradients_are_the_slopes_of_the_output(checkpoint, tmp_path):
    seen = watched(
        checkpoint, tmp_path, feed(), dtype=torch.float64, look=slope_by_hand_and_by_autograd
    ).seen
    for by_hand, by_autograd in filled(seen):
        # Norms compute in float32, which is 1e-7 of the output over a step of 3e-3; a central
        # difference is off by its square.
        assert by_hand == pytest.approx(by_autograd, rel=1e-3)
        assert abs(by_hand) > 1e-3


def as_it_is(block):
    """Return the output of a block, with its own weights and forwards too, and its groups."""
    hidden = block.batches[0].hidden_BTD
    plain = [Quantized(group.weights, 0, inputs=lambda x: 1 * x) for group in block.groups]
    by_forwards = [
        replace(one, forwards={n: partial(linear, weight=w) for n, w in one.weights.items()})
        for one in plain
    ]
    return [block.run(hidden, one) for one in ((), plain, by_forwards)], block.calibrated()


@on_llama
def test_a_block_with_its_own_weights_is_itself_and_is_left_as_it_was(checkpoint, tmp_path):
    scheme = watched(checkpoint, tmp_path, feed(), look=as_it_is)
    for (untouched, by_weights, by_forwards), groups in scheme.seen:
        assert torch.equal(untouched, by_weights)
        assert torch.equal(untouched, by_forwards)
        tokens = sum(len(window.tokens) for window in CALIBRATION)
        assert all(group.inputs.tokens == tokens for group in filled(groups))
    plain = watched(checkpoint, tmp_path, feed()).weights
    assert all(torch.equal(weight, plain[at]) for at, weight in filled(scheme.weights.items()))


@pytest.mark.slow
def test_learning_on_blocks_brings_the_whole_model_nearer(checkpoint, tmp_path):
    text = "flatquant-3bit:steps=0,flatquant-3bit:steps=12,ostquant-3bit:steps=3:kv=int4"
    kept, tallies = run(checkpoint, text, tmp_path)
    start, learned, _ = (
        float(torch.cat([kl.flatten() for kl in tallies[one.spec].kl]).mean())
        for one in parse_schemes([text])
    )
    assert learned < 0.95 * start
    spilled, _ = run(checkpoint, text, tmp_path, limit=0)
    assert all(np.array_equal(kept[name], spilled[name]) for name in kept)  # not a bit is another
