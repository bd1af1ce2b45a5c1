"""Train one small causal model along one schedule and leave ordinary Hugging Face checkpoints.

The loop is plain on purpose: AdamW with decoupled weight decay, gradient clipping, bf16
autocast over fp32 master weights, and a learning rate read from `core/schedules.py` at every
step. The batch of step `s` is a function of (seed, s) alone, so a run that was killed goes on
from its last state and sees the batches it would have seen.

A run may fork from the end of another: weights and optimizer state are kept, the schedule and
the data order are its own. Three forks of one held run are the ingredients of a soup.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Olmo2Config, Olmo2ForCausalLM, PreTrainedTokenizerBase

from qaudit.core.schedules import Schedule


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of an OLMo-2-shaped model."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int

    def build(self, seed: int) -> Olmo2ForCausalLM:
        """Return a freshly initialized model of this shape."""
        torch.manual_seed(seed)
        config = Olmo2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.context,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=None,
        )
        return Olmo2ForCausalLM(config)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run: everything that changes its weights."""

    name: str
    shape: Shape
    schedule: Schedule
    steps: int
    save_at: tuple[int, ...]
    batch: int
    seed: int
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0

    def label(self, step: int) -> str:
        """Return the folder name of the checkpoint at `step`."""
        return f"{self.name}-step{step}"


Progress = Callable[[int, float, float], None]


def train(  # noqa: PLR0913 - the run is one value; the rest is where and how to watch
    run: Run,
    stream: np.ndarray[Any, np.dtype[np.uint16]],
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    *,
    fork: Path | None = None,
    compiled: bool = False,
    state_every: int = 250,
    progress: Progress = lambda step, loss, rate: None,
) -> Path:
    """Run `run` over the token `stream`, writing checkpoints under `out`; return the last state.

    `fork` is the last state of the run to start from. The same call again goes on from the
    latest state of this run.
    """
    state_path = out / f".state-{run.name}.pt"
    model = run.shape.build(run.seed)
    optimizer = _optimizer(model, run)
    start = _restore(model, optimizer, state_path if state_path.exists() else fork, state_path)
    forward = torch.compile(model) if compiled else model
    began, seen = time.monotonic(), 0
    for step in range(start + 1, run.steps + 1):
        loss = _step(model, forward, optimizer, run, _batch(run, stream, step), step)
        seen += run.batch * run.shape.context
        if step % 10 == 0:
            rate = seen / (time.monotonic() - began)
            _log(out, run, step, loss, optimizer)
            progress(step, loss, rate)
        if step in run.save_at:
            _write_checkpoint(model, tokenizer, out / run.label(step))
        if step % state_every == 0 or step == run.steps:
            _write_state(model, optimizer, step, state_path)
    return state_path


def _optimizer(model: nn.Module, run: Run) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": run.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=run.schedule.peak, betas=run.betas, fused=True)


def _batch(run: Run, stream: np.ndarray[Any, np.dtype[np.uint16]], step: int) -> torch.Tensor:
    generator = np.random.default_rng([run.seed, step])
    starts = generator.integers(0, len(stream) - run.shape.context, size=run.batch)
    windows = np.stack([stream[s : s + run.shape.context] for s in starts])
    return torch.from_numpy(windows.astype(np.int64))


def _step(
    model: nn.Module,
    forward: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    run: Run,
    tokens_BT: torch.Tensor,
    step: int,
) -> float:
    for group in optimizer.param_groups:
        group["lr"] = run.schedule.at(step)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = forward(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
    if not torch.isfinite(loss):
        raise FloatingPointError(f"run `{run.name}`: the loss is {loss.item()} at step {step}")
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), run.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.item())


def _restore(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Path | None, own: Path
) -> int:
    if state is None:
        return 0
    saved = torch.load(state, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"]) if state == own else 0


def _write_state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, path: Path) -> None:
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    partial = path.with_suffix(".partial")
    torch.save(saved, partial)
    partial.replace(path)


def _write_checkpoint(
    model: Olmo2ForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    copy = Olmo2ForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _log(out: Path, run: Run, step: int, loss: float, optimizer: torch.optim.Optimizer) -> None:
    line = {
        "run": run.name,
        "step": step,
        "tokens": step * run.batch * run.shape.context,
        "loss": round(loss, 4),
        "learning_rate": optimizer.param_groups[0]["lr"],
    }
    with (out / "training.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")


def read_log(out: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's training log."""
    with (out / "training.jsonl").open(encoding="utf-8") as log:
        yield from (json.loads(line) for line in log)
