"""Sharpness-aware minimization against the paper's two lines, written out number by number."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from experiments.train import ascend, batch_of, train
from tests.support.training import HELD, SHAPE, equal, state

RHO = 0.07


def plain_sam(model, loss_of, rho):
    """Return the loss at w, and its gradient at w + rho * g / |g|, by autograd on a copy."""
    names = [name for name, _ in model.named_parameters()]
    here = [p.detach().clone().requires_grad_() for p in model.parameters()]
    loss = loss_of(torch.func.functional_call, dict(zip(names, here, strict=True)))
    slopes = torch.autograd.grad(loss, here)
    length = sum(float((g.double() ** 2).sum()) for g in slopes) ** 0.5
    there = [
        (p.double() + rho * g.double() / length).float().requires_grad_()
        for p, g in zip(here, slopes, strict=True)
    ]
    above = loss_of(torch.func.functional_call, dict(zip(names, there, strict=True)))
    return loss.item(), torch.autograd.grad(above, there)


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def test_the_gradient_is_that_of_the_point_up_the_slope():
    model, inputs, targets = small_model(), torch.randn(11, 5), torch.randn(11, 3)
    parameters = list(model.parameters())
    before = [p.detach().clone() for p in parameters]

    def gradients():
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss.detach()

    def loss_of(call, weights):
        return nn.functional.mse_loss(call(model, weights, (inputs,)), targets)

    loss = ascend(parameters, RHO, gradients)
    expected_loss, expected = plain_sam(model, loss_of, RHO)
    assert float(loss) == pytest.approx(expected_loss, rel=1e-6)
    for p, gradient in zip(parameters, expected, strict=True):
        # The point is formed in fp32 here and in float64 there: a unit in the last place apart.
        torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(p, was) for p, was in zip(parameters, before, strict=True))


def test_without_a_slope_it_stays_where_it_is():
    weight = nn.Parameter(torch.ones(3))

    def gradients():
        loss = (weight * 0).sum()
        loss.backward()
        return loss.detach()

    assert float(ascend([weight], RHO, gradients)) == 0
    assert torch.equal(weight.grad, torch.zeros(3))


def test_a_run_with_sam_is_the_plain_loop_with_it(tmp_path, text):
    run = replace(HELD, steps=3, save_at=(3,), sam_rho=RHO, precision="fp32")
    model = SHAPE.build(run.seed)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=run.betas)
    for step in range(1, 4):
        tokens_BT = batch_of(run, text, step)

        def loss_of(call, weights, tokens_BT=tokens_BT):
            given = {"input_ids": tokens_BT, "labels": tokens_BT, "use_cache": False}
            return call(model, weights, (), given).loss

        _, gradients = plain_sam(model, loss_of, RHO)
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient
        nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        for group in optimizer.param_groups:
            group["lr"] = run.schedule.at(step)
        optimizer.step()
    found = state(train(run, text, tmp_path))["model"]
    for name, weight in model.state_dict().items():
        # Adam divides by the root of squares: what differs in the gradients' last bits grows.
        torch.testing.assert_close(found[name], weight, atol=3e-4, rtol=1e-3)
    bare = state(train(replace(run, sam_rho=0.0), text, tmp_path / "bare"))["model"]
    assert not equal(found, bare)
    apart = max(float((found[name] - bare[name]).abs().max()) for name in bare)
    assert apart > 3e-3  # ten times what was allowed above
