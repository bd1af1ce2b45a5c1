"""Weights and inputs as a trained model has them, and what two answers to them have in common.

Inputs are correlated, of very different sizes from column to column, and few directions carry
most of them. No group of weights has one sign only: that is the one case in which GPTQModel's
symmetric grid differs from everybody else's (see `qaudit/core/grid.py`), tested on its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qaudit.core.linears import Inputs, InputsAccumulator, Linears
from qaudit.core.registry import parse_scheme

torch.set_num_threads(1)


@dataclass(frozen=True)
class Problem:
    weight_RC: Tensor
    x_TC: Tensor

    @property
    def linears(self):
        inputs = InputsAccumulator(self.x_TC.shape[1])
        inputs.add(self.x_TC)
        return Linears({"linear": self.weight_RC.clone()}, inputs.result())

    def solve(self, spec):
        """Return the weights under scales as computed, as the peers have them."""
        return parse_scheme(f"{spec}:scale_dtype=float32").quantize(self.linears).weights["linear"]

    def objective(self, quantized_RC):
        """Squared error of the linear's output, in double precision."""
        error_RC = self.weight_RC.double() - quantized_RC.double()
        return float((error_RC @ self.x_TC.double().T).square().sum())


def make_problem(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden_TK = torch.randn(4 * columns, columns // 4, generator=generator)
    mix_KC = torch.randn(columns // 4, columns, generator=generator) / columns**0.5
    x_TC = hidden_TK @ mix_KC + 0.3 * torch.randn(4 * columns, columns, generator=generator)
    x_TC *= torch.exp(0.7 * torch.randn(columns, generator=generator))
    return Problem(0.02 * torch.randn(rows, columns, generator=generator), x_TC)


def rows_differing(a_RC, b_RC):
    """Number of rows in which any weight differs by more than the rounding of a scale."""
    return int((~torch.isclose(a_RC, b_RC, rtol=1e-4, atol=1e-8)).any(1).sum())


def symmetric(size, seed):
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return half + half.T


ORDERS = {
    "natural": {"act_group_aware": False},
    "act_order": {"act_order": True, "act_group_aware": False},
    "group_aware": {"act_group_aware": True},
}


def correlated_inputs(columns, tokens=None, seed=0):
    """Inputs as a trained model's are: correlated, and of very different sizes."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((tokens or 3 * columns, columns))
    x *= np.exp(generator.standard_normal(columns))
    mix = np.eye(columns) + 0.5 * generator.standard_normal((columns, columns)) / columns**0.5
    return x @ mix


def problem(rows, columns, dtype=torch.float64, seed=0, dead=()):
    generator = np.random.default_rng(seed + 1)
    weight = generator.standard_normal((rows, columns)) * 0.02
    # On a symmetric grid the largest weight of a group, if negative, lies half way between two
    # codes by construction, and the last bit of its scale decides. A positive one is clamped
    # to the same code either way: so every group gets a positive one.
    weight[:, ::8] = 0.15 + 0.02 * generator.standard_normal(weight[:, ::8].shape)
    x = correlated_inputs(columns, seed=seed)
    x[:, list(dead)] = 0.0
    gram = torch.from_numpy(x.T @ x).to(dtype)
    inputs = Inputs(gram, torch.from_numpy(np.abs(x).mean(0)).to(dtype), len(x))
    return Linears({"linear": torch.from_numpy(weight).to(dtype)}, inputs)
