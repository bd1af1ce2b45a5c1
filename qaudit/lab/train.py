"""Train one small causal model along one schedule and leave ordinary Hugging Face checkpoints.

The loop is plain on purpose: AdamW with decoupled weight decay, gradient clipping, bf16
autocast over fp32 master weights, and a learning rate read from `core/schedules.py` at every
step. The batch of step `s` is a function of (seed, s) alone, so a run that was killed goes on
from its last state and sees the batches it would have seen, to the same bits.

A run may fork from a step of another whose state was kept: weights and optimizer state go on,
the schedule and the data order are its own. Three forks of one held run are the ingredients of
a soup.

A loss or gradient that is not finite stops the run before anything of it is written. Losses are
looked at every ten steps and before every file, so that a GPU need not wait at each step.

What was given up: several devices, and batches of more than one text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qaudit.errors import TrainingError, UsageError
from qaudit.lab.averaging import Average, averages_of
from qaudit.lab.checkpoints import write_checkpoint
from qaudit.lab.devices import choose_device, deterministic, environment
from qaudit.lab.family import write_family
from qaudit.lab.log import forget_after, log_line
from qaudit.lab.optimizers import adamw, climbed, load_moments
from qaudit.lab.records import FOLDER, write_record
from qaudit.lab.run import Run
from qaudit.lab.states import (
    kept_path,
    latest_path,
    own_state,
    parent_state,
    write_state,
)
from qaudit.lab.text import TokenStream
from qaudit.lab.turns import in_turn

LOG_EVERY = 10

Progress = Callable[[int, float, float], None]
"""Is told the step, its loss, and the tokens per second since the start."""


def _silent(step: int, loss: float, rate: float) -> None:
    """Say nothing."""


def train(  # noqa: PLR0913 - the run is one value; the rest is where and how to watch
    run: Run,
    text: TokenStream,
    out: Path,
    *,
    fork: Path | None = None,
    device: str = "auto",
    compiled: bool = False,
    state_every: int = 250,
    progress: Progress = _silent,
) -> Path:
    """Run `run` over `text`, writing checkpoints under `out`; return the path of the last state.

    `fork` is where the parent's state lies: a folder of runs, or the state; by default `out`.
    The same call again goes on from the latest state of this run; where another process trains
    it, that one is waited for.
    """
    where = choose_device(device)
    _must_fit(run, text, fork)
    with in_turn(out / FOLDER / f".{run.name}.lock"), deterministic(where):
        going = begin(run, _latest(run, text, out, fork or out), where)
        write_record(out, run, text.key, environment(where, compiled=compiled))
        write_family(out)
        forget_after(out, run.name, going.step)
        forward = torch.compile(going.model) if compiled else going.model
        began, first = time.monotonic(), going.step
        for step in range(going.step + 1, run.steps + 1):
            advance(going, forward, run, text, where)
            if step % LOG_EVERY == 0 or _is_written(run, step, state_every):
                loss = going.look(run)
                rate = (step - first) * run.tokens_per_step / (time.monotonic() - began)
                _log(out, run, step, loss, going)
                progress(step, loss, rate)
                _write(going, run, text, out, state_every)
    return latest_path(out, run)


@dataclass
class Going:
    """A run under way: what changes from step to step."""

    model: PreTrainedModel
    optimizer: torch.optim.AdamW
    averages: tuple[Average, ...]
    step: int = 0
    norm: float = 0.0  # of the gradient, when it was last looked at
    unseen: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights by name, shared ones once."""
        return dict(self.model.named_parameters())

    def look(self, run: Run) -> float:
        """Return the latest loss, once all losses and gradients since the last look are finite."""
        for step, loss, norm in self.unseen:
            for what, value in (("loss", loss), ("gradient's norm", norm)):
                if not torch.isfinite(value):
                    raise TrainingError(
                        f"run `{run.name}`: the {what} is {value.item()} at step {step}",
                        hint="everything up to the last checkpoint is kept; lower the peak, "
                        "lengthen the warm-up, or clip lower, under another name",
                    )
        latest = float(self.unseen[-1][1].item())
        self.norm = float(self.unseen[-1][2].item())
        self.unseen.clear()
        return latest


# ---------------------------------------------------------------------------------- the beginning


def _must_fit(run: Run, text: TokenStream, fork: Path | None) -> None:
    if len(text.tokenizer) > run.shape.vocabulary:
        raise UsageError(
            f"the tokenizer has {len(text.tokenizer)} entries and run `{run.name}` a vocabulary "
            f"of {run.shape.vocabulary}",
            hint=f"give it `--vocabulary {len(text.tokenizer)}` or more",
        )
    if len(text.tokens) <= run.context:
        raise UsageError(
            f"the text has {len(text.tokens)} tokens, and a window is {run.context}",
            hint="give more text, or a shorter `--context`",
        )
    if fork is not None and run.parent is None:
        raise UsageError(f"run `{run.name}` has no parent to fork from", hint="name its parent")


def _latest(run: Run, text: TokenStream, out: Path, fork: Path) -> dict[str, Any] | None:
    """Return the state to go on from: the run's own, its parent's, or none."""
    state = own_state(run, text, out)
    if state is None and run.parent is not None:
        return parent_state(run, text, fork)
    return state


def begin(run: Run, state: dict[str, Any] | None, device: torch.device) -> Going:
    """Return the run at a state of its own, at its parent's, or at its first weights."""
    model = run.shape.build(run.seed, run.attention)
    if state is not None:
        model.load_state_dict(state["model"])
    nn.Module.to(model, device)  # transformers' own is not typed
    going = Going(model, adamw(model, run), averages_of(run.ema_decay, run.lawa))
    if state is not None:
        load_moments(going.optimizer, state["optimizer"], run)
    if state is not None and state["run"]["name"] == run.name:
        going.step = int(state["step"])
        for average in going.averages:
            average.load(state["averages"][average.name], device)
    return going


# ---------------------------------------------------------------------------------------- a step


def advance(
    going: Going,
    forward: Callable[..., Any],
    run: Run,
    text: TokenStream,
    device: torch.device,
) -> None:
    """Take one step."""
    going.step += 1
    for group in going.optimizer.param_groups:
        group["lr"] = run.schedule.at(going.step)
    tokens_BT = batch_of(run, text, going.step).to(device)
    parameters = list(going.model.parameters())

    def gradients() -> Tensor:
        return _gradients(forward, run, tokens_BT)

    loss = climbed(parameters, run.sam_rho, gradients) if run.sam_rho else gradients()
    norm = nn.utils.clip_grad_norm_(parameters, run.clip)
    going.optimizer.step()
    going.optimizer.zero_grad(set_to_none=True)
    going.unseen.append((going.step, loss, norm))
    for average in going.averages:
        average.after(going.step, going.weights)


def batch_of(run: Run, text: TokenStream, step: int) -> Tensor:
    """Return the windows of a step: a function of the order's seed and the step alone."""
    seed = run.seed if run.order is None else run.order
    generator = np.random.default_rng([seed, step])
    starts = generator.integers(0, len(text.tokens) - run.context, size=run.batch)
    windows = np.stack([text.tokens[s : s + run.context] for s in starts])
    return torch.from_numpy(windows.astype(np.int64))


def _gradients(forward: Callable[..., Any], run: Run, tokens_BT: Tensor) -> Tensor:
    """Add up the gradients of the batch, part by part; return its mean loss."""
    total = torch.zeros((), device=tokens_BT.device)
    for part_BT in tokens_BT.chunk(run.accumulation):
        with torch.autocast(
            tokens_BT.device.type, dtype=torch.bfloat16, enabled=run.precision == "bf16"
        ):
            loss = forward(input_ids=part_BT, labels=part_BT, use_cache=False).loss
        loss = loss / run.accumulation
        loss.backward()
        total += loss.detach()
    return total


# --------------------------------------------------------------------------------- what is written


def _is_written(run: Run, step: int, state_every: int) -> bool:
    return step in (*run.save_at, *run.keep_at, run.steps) or step % state_every == 0


def _write(going: Going, run: Run, text: TokenStream, out: Path, state_every: int) -> None:
    """Write what is due at a step: the checkpoint and its averages, then states."""
    step = going.step
    if step in run.save_at:
        write_checkpoint(run, going.weights, text, out / run.label(step))
        for average in going.averages:
            if (mean := average.mean(step)) is not None:
                write_checkpoint(run, mean, text, out / run.label(step, average.name))
    if step in run.keep_at:
        write_state(kept_path(out, run, step), _state(going, run, text))
    if step % state_every == 0 or step == run.steps:
        write_state(latest_path(out, run), _state(going, run, text))


def _state(going: Going, run: Run, text: TokenStream) -> dict[str, Any]:
    return {
        "run": run.table(),
        "text": text.key,
        "tokenizer": text.tokenizer_key,
        "step": going.step,
        "model": going.model.state_dict(),
        "optimizer": going.optimizer.state_dict(),
        "averages": {average.name: average.state() for average in going.averages},
    }


def _log(out: Path, run: Run, step: int, loss: float, going: Going) -> None:
    log_line(
        out,
        {
            "run": run.name,
            "step": step,
            "tokens": step * run.tokens_per_step,
            "loss": round(loss, 4),
            "learning_rate": going.optimizer.param_groups[0]["lr"],
            "gradient_norm": round(going.norm, 4),
        },
    )
