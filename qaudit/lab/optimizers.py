"""AdamW as the papers run it, and the ascent step of sharpness-aware minimization.

Weight decay applies to matrices only. SAM (2010.01412) moves the weights by `rho` along the
gradient, takes the gradient there, and moves back before the optimizer steps: twice the work of a
step. The weights are restored from a copy and not by subtraction, so that nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from qaudit.lab.run import Run


def adamw(model: nn.Module, run: Run) -> torch.optim.AdamW:
    """Return the optimizer of a run."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": run.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=run.schedule.peak, betas=run.betas, fused=True)


def load_moments(optimizer: torch.optim.AdamW, state: dict[str, object], run: Run) -> None:
    """Load an optimizer's moments; a fork keeps its own weight decay and betas."""
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
