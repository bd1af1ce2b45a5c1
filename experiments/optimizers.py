"""AdamW as the papers run it, sharpness-aware minimization, and averages of the weights.

Weight decay applies to matrices only. SAM (2010.01412) moves the weights by `rho` along the
gradient, takes the gradient there, and moves back before the optimizer steps: twice the work of a
step. The weights are restored from a copy and not by subtraction, so that nothing is rounded.

Averages are formed in fp32 from the fp32 weights, change nothing in the run itself, and are part of
its state, so that a run that was killed resumes to the same averages.
EMA: m(1) = x(1), m(t) = decay * m(t-1) + (1 - decay) * x(t), over every step, as the merge `ema`
has it over checkpoints. The random first weights are not in it.
LAWA (2209.14981): the mean of the latest `window` weights, `every` steps apart; the weights
before the first step are not in it, and a window that is not yet full has no average.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from experiments.run import TrainingRun

Weights = dict[str, Tensor]


def adamw(model: nn.Module, run: TrainingRun) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": run.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=run.schedule.peak, betas=run.betas, fused=True)


def load_moments(optimizer: torch.optim.AdamW, state: dict[str, object], run: TrainingRun) -> None:
    optimizer.load_state_dict(state)
    for group, decay in zip(optimizer.param_groups, (run.weight_decay, 0.0), strict=True):
        group["weight_decay"], group["betas"] = decay, run.betas


def ascend(parameters: list[nn.Parameter], rho: float, gradients: Callable[[], Tensor]) -> Tensor:
    """Leave the gradients of the point `rho` up the slope; return the loss at the weights."""
    loss = gradients()
    slopes = [p.grad for p in parameters if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in slopes]))
    here = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p in parameters:
            if p.grad is not None:
                p.add_(p.grad * (rho / (norm + 1e-12)))
            p.grad = None
    gradients()
    with torch.no_grad():
        torch._foreach_copy_([p.detach() for p in parameters], here)
    return loss


class WeightEma:
    """The exponential moving average over steps."""

    name = "ema"

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._mean: Weights = {}

    def add(self, step: int, weights: Mapping[str, Tensor]) -> None:
        if not self._mean:
            self._mean = {name: weight.detach().clone() for name, weight in weights.items()}
            return
        latest = [weights[name].detach() for name in self._mean]
        torch._foreach_lerp_(list(self._mean.values()), latest, 1 - self._decay)

    def mean(self, step: int) -> Weights | None:
        return self._mean or None

    def state(self) -> dict[str, Any]:
        return {"mean": self._mean}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._mean = {name: weight.to(device) for name, weight in state["mean"].items()}


class WeightLawa:
    """The mean of the latest weights, some steps apart; they are held on the CPU."""

    name = "lawa"

    def __init__(self, window: int, every: int) -> None:
        self._window, self._every = window, every
        self._latest: dict[int, Weights] = {}

    def add(self, step: int, weights: Mapping[str, Tensor]) -> None:
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
        return {"latest": self._latest}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._latest = dict(state["latest"])


Average = WeightEma | WeightLawa


def averages_of(ema_decay: float, lawa: tuple[int, int] | None) -> tuple[Average, ...]:
    ema = (WeightEma(ema_decay),) if ema_decay else ()
    return (*ema, *((WeightLawa(*lawa),) if lawa else ()))
