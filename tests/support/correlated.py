"""Weights and correlated inputs to solve, and the orders in which GPTQ solves them."""

import numpy as np
import torch

from qaudit.core.linears import Inputs, Linears

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
