"""The GPTQ solve, factorization included, against the loop as published.

    python -m benchmarks.solve [REPEATS]

The loop is that of the paper's own code in the same float32 torch: three factorizations,
columns one by one, feedback to the rest of a block of 128 at each of them. Both take the scales
of a group from weights that make up for the blocks before, both start from the Gram matrix.
Goal: 3 times as fast on (1536 x 576) and (576 x 1536) at 4 bits and groups of 128. The last
columns say how many codes float32 decides otherwise than double precision, for either. The
rows at the end are linears of a 135M model that share their inputs: we solve them as one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.clock import best_of, print_machine
from qaudit.core.linears import Inputs, Linears
from qaudit.core.schemes.gptq import Gptq

SHAPES = ((1536, 576), (576, 1536), (576, 576), (2048, 2048))
GOALS = {(1536, 576): 3.0, (576, 1536): 3.0}
JOINED = {"gate, up": ((1536, 576),) * 2, "q, k, v": ((576, 576), (192, 576), (192, 576))}
BITS, GROUP, DAMP, BLOCK = 4, 128, 0.05, 128


def published_loop(weight_RC: Tensor, gram_CC: Tensor) -> Tensor:
    """Return the weights dequantized, operation by operation as the paper's code does it."""
    weight, hessian = weight_RC.clone(), gram_CC.clone()
    columns, highest, zero = weight.shape[1], 2**BITS - 1, 2 ** (BITS - 1)
    losses, result = torch.zeros_like(weight), torch.zeros_like(weight)
    hessian.diagonal().add_(DAMP * hessian.diagonal().mean())
    hessian = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    inverse = torch.linalg.cholesky(hessian, upper=True)
    scale = weight[:, :1]
    for i1 in range(0, columns, BLOCK):
        i2 = min(i1 + BLOCK, columns)
        inner, inner_inverse = weight[:, i1:i2].clone(), inverse[i1:i2, i1:i2]
        quantized, errors = torch.zeros_like(inner), torch.zeros_like(inner)
        inner_losses = torch.zeros_like(inner)
        for i in range(i2 - i1):
            column, diagonal = inner[:, i], inner_inverse[i, i]
            if (i1 + i) % GROUP == 0:
                largest = weight[:, i1 + i : i1 + i + GROUP].abs().amax(1, keepdim=True)
                scale = 2 * largest / highest
            code = torch.clamp(torch.round(column.unsqueeze(1) / scale) + zero, 0, highest)
            q = (scale * (code - zero)).flatten()
            quantized[:, i] = q
            inner_losses[:, i] = (column - q) ** 2 / diagonal**2
            error = (column - q) / diagonal
            inner[:, i:] -= error.unsqueeze(1).matmul(inner_inverse[i, i:].unsqueeze(0))
            errors[:, i] = error
        result[:, i1:i2] = quantized
        losses[:, i1:i2] = inner_losses / 2
        weight[:, i2:] -= errors.matmul(inverse[i1:i2, i2:])
    return result


def make_problem(shapes: Sequence[tuple[int, int]]) -> Linears:
    """Return weights, and statistics of correlated inputs of different sizes."""
    generator, columns = torch.Generator().manual_seed(shapes[0][0]), shapes[0][1]
    x_TC = torch.randn(4 * columns, columns, generator=generator)
    x_TC = x_TC @ (torch.eye(columns) + torch.randn(columns, columns, generator=generator) / 50)
    x_TC *= torch.exp(0.7 * torch.randn(columns, generator=generator))
    inputs = Inputs(x_TC.T @ x_TC, x_TC.abs().mean(0), len(x_TC))
    weights = {
        f"linear {k}": 0.02 * torch.randn(rows, columns, generator=generator)
        for k, (rows, columns) in enumerate(shapes)
    }
    return Linears(weights, inputs)


def print_row(name: str, linears: Linears, goal: object, repeats: int) -> None:
    """Time both ways on all linears given; the published one takes them one by one."""
    gram_CC = linears.inputs.gram_CC
    weights = list(linears.weights.values())
    scheme = Gptq(bits=BITS, group=GROUP, damp=DAMP, act_group_aware=False)
    seconds = best_of(
        {
            "published": lambda: [published_loop(weight_RC, gram_CC) for weight_RC in weights],
            "qaudit": lambda: scheme.quantize(linears),
        },
        repeats,
    )
    exact = torch.cat([published_loop(w.double(), gram_CC.double()) for w in weights])
    answers = {
        "published": torch.cat([published_loop(w, gram_CC) for w in weights]),
        "qaudit": torch.cat(list(scheme.quantize(linears).weights.values())),
    }
    differing = [
        float((~torch.isclose(answer.double(), exact, rtol=1e-4)).double().mean())
        for answer in answers.values()
    ]
    ratio = seconds["published"] / seconds["qaudit"]
    print(
        f"{name:>16}{1000 * seconds['published']:9.0f} ms{1000 * seconds['qaudit']:7.0f} ms"
        f"{ratio:8.2f}{goal:>6}   {differing[0]:.1e}, {differing[1]:.1e}"
    )


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    torch.set_num_threads(1)
    print_machine()
    print(f"{'rows x columns':>16}{'published':>12}{'qaudit':>10}{'ratio':>8}{'goal':>6}", end="")
    print("   differing from double precision: published, qaudit")
    for rows, columns in SHAPES:
        goal = GOALS.get((rows, columns), "-")
        print_row(f"{rows} x {columns}", make_problem([(rows, columns)]), goal, repeats)
    for name, shapes in JOINED.items():
        print_row(name, make_problem(shapes), "-", repeats)


if __name__ == "__main__":
    main()
