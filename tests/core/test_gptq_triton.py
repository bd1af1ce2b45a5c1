"""The fused kernel against the plain loop and against a walk through the columns in numpy.

    make kernels    in Triton's interpreter, on the CPU (an environment of its own)
    make gpu        on a CUDA device, where Triton comes with torch

Both run everything marked here; where the kernel cannot run these tests fail, they never skip.
"""

import os
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import example as shape
from hypothesis import given, settings
from hypothesis import strategies as st

from qaudit.core.column_loops import _difference, quantize_block_fused
from qaudit.core.gptq_solver import Pull, quantize_block
from qaudit.core.grid import Grid, fit
from qaudit.core.linears import Inputs, Linears
from qaudit.core.registry import parse_scheme
from tests.support.filled import filled
from tests.support.schemes import example

pytestmark = [pytest.mark.kernels, pytest.mark.gpu]
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
PARTS = [field.name for field in fields(Grid)]


class Block:
    """Arguments of `quantize_block`: a block in the middle of a matrix, feedback included."""

    def __init__(self, columns, rows, group, bits, symmetric, seed=0, pulls=False):
        generator = torch.Generator().manual_seed(seed)
        self.weight = 0.02 * torch.randn(columns, rows, generator=generator)
        self.target = self.weight + 0.004 * torch.randn(columns, rows, generator=generator)
        # A view into a larger triangle, as the scheme passes it, with feedback as large as the
        # errors themselves (a row of a unit triangle in a trained model sums to about one).
        whole = torch.randn(columns + 9, columns + 9, generator=generator).tril_()
        whole *= 2 / columns**0.5
        self.lower = whole[5 : columns + 5, 5 : columns + 5]
        self.lower.fill_diagonal_(1)
        drawn = torch.randn(columns, columns, generator=generator)
        self.pulled = drawn.tril(-1) / (2 * columns**0.5) if pulls else None
        starts = range(0, columns, group)
        grids = [fit(self.target[a : a + group], bits, symmetric=symmetric, dim=0) for a in starts]
        self.grid = Grid(*(torch.cat([getattr(g, k) for g in grids]) for k in PARTS))
        self.grid_of = [column // group for column in range(columns)]

    def run(self, quantize, device="cpu", **options):
        """Return the quantized weights, the errors and what columns pulled with, as numpy."""
        error, quantized = self.weight.to(device).clone(), self.target.to(device).clone()
        grid = Grid(*(getattr(self.grid, k).to(device) for k in PARTS))
        made, pull = [quantized, error], None
        if self.pulled is not None:
            pull = Pull(self.pulled.to(device), torch.zeros_like(quantized))
            made.append(pull.target_BR)
        quantize(error, quantized, self.lower.to(device), grid, self.grid_of, pull, **options)
        return [tensor.cpu().numpy() for tensor in made]


def fused_multiply_add(a, b, c):
    """Return a * b + c in float32 with one rounding, by way of rounding to odd in float64."""
    a, b, c = np.broadcast_arrays(*(np.float64(x) for x in (a, b, c)))
    product = a * b  # exact: 24 bits times 24 bits
    total = product + c
    back = total - product
    rest = (product - (total - back)) + (c - back)  # what the sum lost
    inexact_and_even = (rest != 0) & (total.view(np.int64) % 2 == 0)
    away = np.nextafter(total, np.where(rest > 0, np.inf, -np.inf))
    return np.where(inexact_and_even, away, total).astype(np.float32)


def walk(block):
    """Round one column after the other, in float32 numpy, each feeding all later ones."""
    weight, target = block.weight.numpy(), block.target.numpy().copy()
    lower = block.lower.numpy()
    scale, low, high = (getattr(block.grid, k).numpy() for k in ("scale", "low", "high"))
    quantized, error = np.empty_like(weight), np.empty_like(weight)
    pulled = None if block.pulled is None else block.pulled.numpy()
    for j, p in enumerate(block.grid_of):
        code = np.clip(np.rint(target[j] / scale[p]), low[p], high[p])
        quantized[j] = code * scale[p]
        error[j] = weight[j] - quantized[j]
        later = fused_multiply_add(lower[j + 1 :, j : j + 1], error[j], target[j + 1 :])
        if pulled is not None:
            later = fused_multiply_add(pulled[j + 1 :, j : j + 1], target[j], later)
        target[j + 1 :] = later
    return [quantized, error, *([] if pulled is None else [target])]


def agrees_with_a_walk(block, **options):
    """Hold what the kernel makes of a block against a walk in numpy, bit for bit."""
    solution = block.run(quantize_block_fused, DEVICE, **options)
    for found, expected in zip(solution, walk(block), strict=True):
        np.testing.assert_array_equal(found, expected)
    return solution


@given(
    columns=st.integers(1, 128),
    rows=st.integers(1, 50),
    group=st.integers(1, 128),
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    tile=st.sampled_from([(4, 1), (8, 1), (8, 8), (16, 4), (32, 2)]),
    pulls=st.booleans(),
    seed=st.integers(0, 2**16),
)
@shape(columns=128, rows=37, group=32, bits=8, symmetric=True, tile=(16, 4), pulls=True, seed=0)
@shape(columns=128, rows=32, group=128, bits=2, symmetric=False, tile=(16, 4), pulls=False, seed=0)
@shape(columns=77, rows=17, group=32, bits=4, symmetric=True, tile=(16, 4), pulls=True, seed=0)
@shape(columns=16, rows=16, group=16, bits=3, symmetric=False, tile=(8, 8), pulls=False, seed=0)
@shape(columns=1, rows=1, group=1, bits=5, symmetric=True, tile=(4, 1), pulls=True, seed=0)
@settings(max_examples=20, deadline=None)
def test_any_shape_and_tile_give_the_bits_of_a_walk_in_numpy(tile, **shape):
    agrees_with_a_walk(Block(**shape), tile=tile)


@pytest.mark.parametrize("width", [1, 3, 77, 128, 300])
def test_codes_are_those_of_the_plain_loop_except_on_ties(width):
    assert _difference(quantize_block_fused, [width], torch.device(DEVICE)) is None


def test_feedback_is_summed_in_the_order_of_columns_with_one_rounding_each():
    # Codes of few bits hide the last bits of a target; on a grid this fine they are codes.
    block = Block(128, 32, 128, 8, symmetric=True)
    block.lower.mul_(0.1).fill_diagonal_(1)
    block.grid.scale.fill_(2**-25)
    block.grid.low.fill_(-(2**22))
    block.grid.high.fill_(2**22)
    quantized, _ = agrees_with_a_walk(block)
    assert np.abs(quantized).max() < 2**-3  # nothing was clamped


def test_ties_go_to_the_even_code_and_what_is_not_a_number_stays_visible():
    block = Block(1, 8, 1, 4, symmetric=True)
    block.grid.scale.fill_(0.25)
    block.target = 0.25 * torch.tensor([[-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 40.0]])
    quantized, _ = block.run(quantize_block_fused, DEVICE)
    assert (quantized / 0.25).tolist() == [[-2, -2, 0, 0, 2, 2, 4, 7]]
    block = Block(10, 6, 5, 4, symmetric=True)
    block.target[4, 2] = float("nan")
    quantized, _ = block.run(quantize_block_fused, DEVICE)
    plain, _ = block.run(quantize_block)
    np.testing.assert_array_equal(np.isnan(quantized), np.isnan(plain))


def test_nothing_else_is_touched_and_another_layout_is_rounded_alike():
    # Rows beside the last tile and columns behind the block belong to others.
    block = Block(20, 19, 8, 4, symmetric=True)
    whole = torch.full((30, 19), 7.0, device=DEVICE)
    error, quantized = whole.clone(), whole.clone()
    error[5:25], quantized[5:25] = block.weight.to(DEVICE), block.target.to(DEVICE)
    grid = Grid(*(getattr(block.grid, k).to(DEVICE) for k in PARTS))
    lower, before = block.lower.to(DEVICE), block.lower.clone()
    quantize_block_fused(error[5:25], quantized[5:25], lower, grid, block.grid_of)
    for array in (error, quantized):
        assert (array[:5] == 7).all() and (array[25:] == 7).all()
    assert torch.equal(lower.cpu(), before)
    np.testing.assert_array_equal(quantized[5:25].cpu().numpy(), walk(block)[0])
    block = Block(8, 9, 8, 4, symmetric=True)
    block.weight = block.weight.T.contiguous().T
    agrees_with_a_walk(block)


def linears_there(dtype=torch.float32):
    linears = example(dtype, rows=(23, 23))
    moments = {k: getattr(linears.inputs, k) for k in ("gram_CC", "absmean_C", "drift_CC")}
    inputs = Inputs(tokens=600, **{name: moment.to(DEVICE) for name, moment in moments.items()})
    return Linears({name: weight.to(DEVICE) for name, weight in linears.weights.items()}, inputs)


@pytest.mark.parametrize("order", ["act_group_aware=true", "act_group_aware=false"])
@pytest.mark.parametrize("static_groups", ["true", "false"], ids=["static", "dynamic"])
@pytest.mark.parametrize("symmetric", ["true", "false"], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("group", [32, 64, 128, 192])
def test_gptq_is_the_same_with_either_loop(group, symmetric, static_groups, order):
    spec = f"gptq-3bit:group={group}:sym={symmetric}:static_groups={static_groups}:{order}"
    linears = linears_there()  # a ragged last block of 32 columns
    plain = parse_scheme(spec).quantize(linears)
    fused = parse_scheme(f"{spec}:fused=true").quantize(linears)
    assert fused.notes == (*plain.notes, "rounded by the fused kernel")
    assert fused.bits == plain.bits
    for name, weight in plain.weights.items():
        # Scales come from weights that differ in their last bits, so that every value may,
        # by 1e-5 of the largest; a code apart is a thousand times that.
        apart = (fused.weights[name] - weight).abs() > 1e-5 * weight.abs().max()
        assert apart.any(1).sum() <= 1


@pytest.mark.parametrize("name", ["gptaq", "qronos"])
def test_what_reads_both_streams_is_the_same_with_either_loop(name):
    linears = linears_there()
    spec = f"{name}-4bit:group=64:fused="
    plain, fused = (parse_scheme(spec + is_).quantize(linears) for is_ in ("false", "true"))
    for linear, weight in filled(plain.weights.items()):
        apart = (fused.weights[linear] - weight).abs() > 1e-4 * weight.abs().max()
        assert apart.any(1).sum() <= 1


def test_weights_of_bfloat16_are_rounded_in_float32():
    linears = linears_there(torch.bfloat16)
    fused = parse_scheme("gptq-4bit:group=32:fused=true").quantize(linears)
    plain = parse_scheme("gptq-4bit:group=32").quantize(linears)
    assert {weight.dtype for weight in fused.weights.values()} == {torch.bfloat16}
    for name, weight in plain.weights.items():
        assert (fused.weights[name] != weight).any(1).sum() <= 1


# What Triton's compiler makes of the kernel can be read without a device.
PROGRAM = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from qaudit.core import column_loops

kernel, width = column_loops._kernel(), int(sys.argv[1])
floats = ("weight", "target", "upper", "pulled", "pulling", "scale", "low", "high")
types = {f"{name}_ptr": "*fp32" for name in floats} | {"grid_of_ptr": "*i32"}
types |= {"size": "i32", "rows": "i32"} | dict.fromkeys(("WIDTH", "TILE", "PULLS"), "constexpr")
tile_rows, warps = column_loops.TILE
source = ASTSource(kernel, types, constexprs={"WIDTH": width, "TILE": tile_rows, "PULLS": True})
options = {"num_warps": warps, **column_loops.EXACT}
print(compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""


@pytest.mark.parametrize("width", [1, 16, 128])
def test_division_is_exact_and_nothing_but_feedback_is_fused(width, tmp_path):
    # In a process of its own: a process that interprets cannot compile.
    outside = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(width)],
        env=os.environ | outside | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    code = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("\t")]
    arithmetic = {word for word in code if ".f32" in word and word.split(".")[0] != "mov"}
    # `.rn` written out is a promise ptxas keeps: round to nearest and contract nothing.
    exact = {"div.rn.f32", "mul.rn.f32", "sub.rn.f32", "add.rn.f32", "fma.rn.f32"}
    assert exact - ({"fma.rn.f32"} if width == 1 else set()) <= arithmetic
    assert {w for w in arithmetic if w.split(".")[0] in ("div", "mul", "sub", "fma")} <= exact
    assert not any("approx" in word or "full" in word or "ftz" in word for word in code)
