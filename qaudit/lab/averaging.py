"""Averages of the weights along a run: EMA from step to step, LAWA over a window.

Both are formed in fp32 from the fp32 weights, and their state is part of the run's, so that a run
that was killed resumes to the same averages. They change nothing in the run itself.

EMA: m(1) = x(1), m(t) = decay * m(t-1) + (1 - decay) * x(t), over every step, as the merge `ema`
has it over checkpoints. The random first weights are not in it.
LAWA (2209.14981): the mean of the latest `window` weights, `every` steps apart; the weights
before the first step are not in it, and a window that is not yet full has no average.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]


class Ema:
    """The exponential moving average over steps."""

    name = "ema"

    def __init__(self, decay: float) -> None:
        """Start without an average."""
        self._decay = decay
        self._mean: Weights = {}

    def add(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Add the weights after a step."""
        if not self._mean:
            self._mean = {name: weight.detach().clone() for name, weight in weights.items()}
            return
        latest = [weights[name].detach() for name in self._mean]
        torch._foreach_lerp_(list(self._mean.values()), latest, 1 - self._decay)

    def mean(self, step: int) -> Weights | None:
        """Return the average after a step."""
        return self._mean or None

    def state(self) -> dict[str, Any]:
        """Return what is needed to resume."""
        return {"mean": self._mean}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Resume from a state."""
        self._mean = {name: weight.to(device) for name, weight in state["mean"].items()}


class Lawa:
    """The mean of the latest weights, some steps apart; they are held on the CPU."""

    name = "lawa"

    def __init__(self, window: int, every: int) -> None:
        """Start with an empty window."""
        self._window, self._every = window, every
        self._latest: dict[int, Weights] = {}

    def add(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Add the weights after a step, if the step is a multiple of `every`."""
        if step % self._every:
            return
        copied = {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()}
        earlier = sorted(self._latest)[-(self._window - 1) :]
        self._latest = {**{at: self._latest[at] for at in earlier}, step: copied}

    def mean(self, step: int) -> Weights | None:
        """Return the mean of a full window that ends at this very step."""
        if step not in self._latest or len(self._latest) < self._window:
            return None
        members = list(self._latest.values())
        return {
            name: torch.stack([member[name] for member in members]).mean(0) for name in members[0]
        }

    def state(self) -> dict[str, Any]:
        """Return what is needed to resume."""
        return {"latest": self._latest}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Resume from a state."""
        self._latest = dict(state["latest"])


Average = Ema | Lawa


def averages_of(ema_decay: float, lawa: tuple[int, int] | None) -> tuple[Average, ...]:
    """Return the averages of a run's settings."""
    ema = (Ema(ema_decay),) if ema_decay else ()
    return (*ema, *((Lawa(*lawa),) if lawa else ()))
