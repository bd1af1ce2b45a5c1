"""The fused kernel of GPTQ's column loop against the plain loop, on a CUDA device.

    python -m benchmarks.kernel [--rows 4096] [--columns 11008] [--bits 4] [--group 128]

Both are warmed up (the kernel compiles) and taken in turns, best of n, with the device awaited.
First one block alone, for several tiles; then whole linears, factorization included. Beside
each ratio stands what the results differ by. In one block a row may only part at a tie: see
`tests/core/test_gptq_triton.py`, which `make gpu` runs on the same device. Through a whole
linear one such tie moves the rest of its row, so there the output error is what must agree.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping

import torch

from qaudit.core.column_loops import TILE, obstacle, quantize_block_fused
from qaudit.core.gptq_solver import BLOCK, quantize_block
from qaudit.core.grid import fit
from qaudit.core.linears import Inputs, Linears
from qaudit.core.registry import parse_scheme

TILES = [(rows, warps) for rows in (8, 16, 32) for warps in (1, 2, 4, 8)]
LINEAR = "down_proj"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rows", 4096), ("columns", 11008), ("bits", 4), ("group", 128)):
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--repeats", type=int, default=5)
    asked = options.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: this times a CUDA device and there is none\nhint: run it where one is")
    device = torch.device("cuda")
    if reason := obstacle(torch.zeros(1, device=device)):
        sys.exit(f"error: the fused kernel cannot run: {reason}\nhint: pip install triton")

    import triton

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    compare_blocks(asked.rows, asked.bits, asked.repeats, device)
    compare_linears(asked, device)


def compare_blocks(rows: int, bits: int, repeats: int, device: torch.device) -> None:
    """Print the plain loop's time for one block, and the kernel's with each tile."""
    generator = torch.Generator(device).manual_seed(0)
    weight_BR = 0.02 * torch.randn(BLOCK, rows, generator=generator, device=device)
    target_BR = weight_BR + 0.004 * torch.randn(BLOCK, rows, generator=generator, device=device)
    lower_BB = torch.randn(BLOCK, BLOCK, generator=generator, device=device).tril_(-1)
    lower_BB.mul_(2 / BLOCK**0.5).diagonal().fill_(1)
    grid_1R = fit(target_BR, bits, symmetric=True, dim=0)

    def run(quantize: Callable[..., None], **tile: tuple[int, int]) -> torch.Tensor:
        error, quantized = weight_BR.clone(), target_BR.clone()
        quantize(error, quantized, lower_BB, grid_1R, [0] * BLOCK, **tile)
        return quantized

    runs: dict[str, Callable[[], object]] = {"plain": lambda: run(quantize_block)}
    for tile in TILES:
        name = "rows={} warps={}".format(*tile)
        runs[name] = lambda t=tile: run(quantize_block_fused, tile=t)
    seconds = best_of(runs, repeats)
    plain, fused = run(quantize_block), run(quantize_block_fused)
    parted_BR = ((plain - fused) / grid_1R.scale).abs() > 0.5
    print(f"\none block of {BLOCK} columns, {rows} rows, {bits} bits (default {TILE})")
    for name, value in seconds.items():
        print(f"  {name:16} {1e6 * value:10.0f} us {seconds['plain'] / value:8.1f} x")
    print(
        f"  codes that differ: {parted_BR.float().mean():.2e}, "
        f"rows with one: {int(parted_BR.any(0).sum())}, "
        f"largest difference of a value: {(plain - fused).abs().max():.3e}"
    )


def compare_linears(asked: argparse.Namespace, device: torch.device) -> None:
    """Print the time of quantizing a whole linear with either loop, and how the results differ."""
    linears = example(asked.rows, asked.columns, device)
    plain = parse_scheme(f"gptq:bits={asked.bits}:group={asked.group}")
    fused = parse_scheme(f"{plain.spec}:fused=true")
    seconds = best_of(
        {"plain": lambda: plain.quantize(linears), "fused": lambda: fused.quantize(linears)},
        min(asked.repeats, 3),
    )
    print(f"\none linear of {asked.rows}x{asked.columns}, {fused.short}, factorization included")
    for name, value in seconds.items():
        print(f"  {name:16} {1e3 * value:10.1f} ms {seconds['plain'] / value:8.1f} x")
    results = [scheme.quantize(linears) for scheme in (plain, fused)]
    if "rounded by the fused kernel" not in results[1].notes:
        sys.exit(f"error: the kernel did not run: {'; '.join(results[1].notes)}")
    first, second = (result.weights[LINEAR] for result in results)
    largest = first.abs().max()
    apart = (first - second).abs()
    print(
        f"  values more than 1e-4 of the largest apart: "
        f"{(apart > 1e-4 * largest).float().mean():.2e}, largest difference: {apart.max():.3e}"
    )
    errors = [output_error(linears, weight) for weight in (first, second)]
    print(f"  output error, fused over plain: {errors[1] / errors[0]:.8f}")


def example(rows: int, columns: int, device: torch.device) -> Linears:
    """Return a random linear and correlated inputs of very different sizes."""
    generator = torch.Generator(device).manual_seed(0)
    tokens = 2 * columns
    x_TC = torch.randn(tokens, columns, generator=generator, device=device)
    x_TC *= torch.exp(torch.randn(columns, generator=generator, device=device))
    mix_CC = torch.randn(columns, columns, generator=generator, device=device)
    x_TC = x_TC + 0.5 / columns**0.5 * (x_TC @ mix_CC)
    weight_RC = 0.02 * torch.randn(rows, columns, generator=generator, device=device)
    inputs = Inputs(x_TC.T @ x_TC, x_TC.abs().mean(0), tokens)
    return Linears({LINEAR: weight_RC}, inputs)


def output_error(linears: Linears, quantized_RC: torch.Tensor) -> float:
    """Return the squared output error over the calibration inputs."""
    assert linears.inputs is not None
    error_RC = linears.weights[LINEAR] - quantized_RC
    return float(((error_RC @ linears.inputs.gram_CC).double() * error_RC.double()).sum())


def best_of(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the least wall seconds of each run, all of them taken in turns after a warm-up."""
    best = dict.fromkeys(runs, float("inf"))
    for turn in range(repeats + 1):
        for name, run in runs.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if turn:
                best[name] = min(best[name], time.perf_counter() - began)
    return best


if __name__ == "__main__":
    main()
