"""Train one small causal model along one schedule and write ordinary Hugging Face checkpoints.

The loop is plain on purpose: AdamW with decoupled weight decay, gradient clipping, bf16 autocast
over fp32 master weights, and a learning rate read from `core/schedules.py` at every step. The
batch of step `s` is a function of (seed, s) alone, so that a run that was killed resumes from its
last state, sees the batches it would have seen, and reaches the same bits.

A run may fork from a step of another whose state was kept: weights and optimizer state go on, the
schedule and the data order are its own. Three forks of one held run are the ingredients of a soup.

A loss or gradient that is not finite stops the run before anything of it is written. Losses are
read every ten steps and before every file, so that a GPU need not wait at each step.

Not supported: several devices, and batches of more than one text.

**The optimizer** is AdamW as the papers run it, with sharpness-aware minimization and averages of
the weights. Weight decay applies to matrices only. SAM (2010.01412) moves the weights by `rho`
along the gradient, takes the gradient there, and moves back before the optimizer steps: twice the
work of a step. The weights are restored from a copy and not by subtraction, so that nothing is
rounded.

Averages are formed in fp32 from the fp32 weights, change nothing in the run itself, and are part of
its state, so that a run that was killed resumes to the same averages.
EMA: m(1) = x(1), m(t) = decay * m(t-1) + (1 - decay) * x(t), over every step, as the merge `ema`
has it over checkpoints. The random first weights are not in it.
LAWA (2209.14981): the mean of the latest `window` weights, `every` steps apart; the weights
before the first step are not in it, and a window that is not yet full has no average.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from experiments.folder import (
    FOLDER,
    kept_path,
    latest_path,
    log_line,
    must_not_replace,
    own_state,
    parent_state,
    truncate_log,
    write_checkpoint,
    write_family,
    write_record,
    write_state,
)
from experiments.run import TrainingRun
from experiments.text import TokenStream
from qaudit.engine.tasks import open_device
from qaudit.errors import TrainingError, UsageError
from qaudit.planning.machine import choose_device
from qaudit.whole import locked

LOG_EVERY = 10

Progress = Callable[[int, float, float], None]
"""Receives the step, its loss, and the tokens per second since the start."""


def train(  # noqa: PLR0913 - the run is one value; the rest is where and how to watch
    run: TrainingRun,
    text: TokenStream,
    out: Path,
    *,
    fork: Path | None = None,
    device: str = "auto",
    threads: int | None = None,
    compiled: bool = False,
    state_every: int = 250,
    progress: Progress = lambda step, loss, rate: None,
) -> Path:
    """Run `run` over `text`, writing checkpoints under `out`; return the path of the last state.

    `fork` is a folder of runs that has the parent's state, or the state itself; by default `out`.
    The same call again resumes from the latest state of this run; where another process trains
    it, this one waits.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    target = open_device(*choose_device(device, "float32"))[0]
    _refuse_misfits(run, text, fork)
    with locked(out / FOLDER / f".{run.name}.lock"), deterministic(target):
        saved = own_state(run, text, out)
        if saved is None and run.parent is not None:
            saved = parent_state(run, text, fork or out)
        state = begin(run, saved, target)
        environment = {
            "torch": torch.__version__,
            "device": target.type,
            "threads": torch.get_num_threads(),
            "compiled": compiled,
        }
        must_not_replace(run, out)
        write_record(out, run, text.key, environment)
        write_family(out)
        truncate_log(out, run.name, state.step)
        forward = torch.compile(state.model) if compiled else state.model
        began, first = time.monotonic(), state.step
        for step in range(state.step + 1, run.steps + 1):
            advance(state, forward, run, text, target)
            is_saved = step in (*run.save_at, *run.keep_at, run.steps) or step % state_every == 0
            if step % LOG_EVERY == 0 or is_saved:
                loss = state.read_loss(run)
                rate = (step - first) * run.tokens_per_step / (time.monotonic() - began)
                log_line(
                    out,
                    {
                        "run": run.name,
                        "step": step,
                        "tokens": step * run.tokens_per_step,
                        "loss": round(loss, 4),
                        "learning_rate": state.optimizer.param_groups[0]["lr"],
                        "gradient_norm": round(state.norm, 4),
                    },
                )
                progress(step, loss, rate)
                _save(state, run, text, out, state_every)
    return latest_path(out, run)


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Make a GPU compute the same bits each time; CPUs do so for one number of threads."""
    if device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        # The memory-efficient kernel adds up in whatever order its blocks come.
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


@dataclass
class State:
    """What changes from step to step."""

    model: PreTrainedModel
    optimizer: torch.optim.AdamW
    averages: tuple[Average, ...]
    step: int = 0
    norm: float = 0.0  # of the gradient, when it was last read
    unread: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)  # step, loss, norm

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights by name, shared ones once."""
        return dict(self.model.named_parameters())

    def read_loss(self, run: TrainingRun) -> float:
        """Return the latest loss; refuse losses and gradients that are not finite."""
        for step, loss, norm in self.unread:
            for what, value in (("loss", loss), ("gradient's norm", norm)):
                if not torch.isfinite(value):
                    raise TrainingError(
                        f"run `{run.name}`: the {what} is {value.item()} at step {step}",
                        hint="everything up to the last checkpoint is kept; lower the peak, "
                        "lengthen the warm-up, or clip lower, under another name",
                    )
        latest = float(self.unread[-1][1].item())
        self.norm = float(self.unread[-1][2].item())
        self.unread.clear()
        return latest


def _refuse_misfits(run: TrainingRun, text: TokenStream, fork: Path | None) -> None:
    entries = len(text.tokenizer)
    if entries > run.shape.vocabulary:
        raise UsageError(
            f"the tokenizer has {entries} entries, and run `{run.name}` a vocabulary "
            f"of {run.shape.vocabulary}",
            hint=f"set `model.vocabulary` to {entries} or more",
        )
    if len(text.tokens) <= run.context:
        raise UsageError(
            f"the text has {len(text.tokens)} tokens, and a window is {run.context}",
            hint="give more text, or a smaller `model.context`",
        )
    if fork is not None and run.parent is None:
        raise UsageError(f"run `{run.name}` has no parent to fork from", hint="name its parent")


def begin(run: TrainingRun, saved: dict[str, Any] | None, device: torch.device) -> State:
    """Return the run at a saved state of its own, at its parent's, or at its first weights."""
    model = run.shape.build(run.seed, run.attention)
    if saved is not None:
        model.load_state_dict(saved["model"])
    nn.Module.to(model, device)  # the method of transformers has no types
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2]},
        {"params": [p for p in model.parameters() if p.dim() < 2]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=run.schedule.peak, fused=True)
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
    for group, decay in zip(optimizer.param_groups, (run.weight_decay, 0.0), strict=True):
        group["weight_decay"], group["betas"] = decay, run.betas
    ema = (WeightEma(run.ema_decay),) if run.ema_decay else ()
    lawa = (WeightLawa(*run.lawa),) if run.lawa else ()
    state = State(model, optimizer, (*ema, *lawa))
    if saved is not None and saved["run"]["name"] == run.name:
        state.step = int(saved["step"])
        for average in state.averages:
            average.load(saved["averages"][average.name], device)
    return state


def advance(
    state: State,
    forward: Callable[..., Any],
    run: TrainingRun,
    text: TokenStream,
    device: torch.device,
) -> None:
    state.step += 1
    for group in state.optimizer.param_groups:
        group["lr"] = run.schedule.at(state.step)
    tokens_BT = batch_of(run, text, state.step).to(device)
    parameters = list(state.model.parameters())

    def gradients() -> Tensor:
        """Add up the gradients of the batch, part by part; return its mean loss."""
        total = torch.zeros((), device=device)
        for part_BT in tokens_BT.chunk(run.accumulation):
            with torch.autocast(device.type, torch.bfloat16, enabled=run.precision == "bf16"):
                loss = forward(input_ids=part_BT, labels=part_BT, use_cache=False).loss
            loss = loss / run.accumulation
            loss.backward()
            total += loss.detach()
        return total

    loss = ascend(parameters, run.sam_rho, gradients) if run.sam_rho else gradients()
    norm = nn.utils.clip_grad_norm_(parameters, run.clip)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    state.unread.append((state.step, loss, norm))
    for average in state.averages:
        average.add(state.step, state.weights)


def batch_of(run: TrainingRun, text: TokenStream, step: int) -> Tensor:
    """Return the windows of a step: a function of the data seed and the step alone."""
    generator = np.random.default_rng([run.data_seed, step])
    starts = generator.integers(0, len(text.tokens) - run.context, size=run.batch)
    windows = np.stack([text.tokens[s : s + run.context] for s in starts])
    return torch.from_numpy(windows.astype(np.int64))


def _save(state: State, run: TrainingRun, text: TokenStream, out: Path, state_every: int) -> None:
    step = state.step
    if step in run.save_at:
        write_checkpoint(run, state.weights, text, out / run.label(step))
        for average in state.averages:
            if (mean := average.mean(step)) is not None:
                write_checkpoint(run, mean, text, out / run.label(step, average.name))
    kept = [kept_path(out, run, step)] if step in run.keep_at else []
    if step % state_every == 0 or step == run.steps:
        kept.append(latest_path(out, run))
    saved = {
        "run": run.table(),
        "text": text.key,
        "tokenizer": text.tokenizer_key,
        "step": step,
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "averages": {average.name: average.state() for average in state.averages},
    }
    for path in kept:
        write_state(path, saved)


Weights = dict[str, Tensor]


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
