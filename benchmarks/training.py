"""Tokens per CPU second of the trainer, one setting against another.

    python -m benchmarks.training [--shape olmo2-1m] [--repeats 5]

One thread, random tokens, whole steps: windows, gradients, clipping, AdamW. Every setting is
compiled or warmed up by two steps of its own that are not counted; then all take turns and each
figure is the best of `--repeats`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.clock import best_of, print_machine
from experiments.run import TrainingRun
from experiments.shapes import preset
from experiments.text import TokenStream
from experiments.train import advance, begin
from qaudit.core.schedules import Constant

BATCH_TOKENS = 8192
SETTINGS = [  # context, tokens of a part, attention, precision, compiled
    (256, 8192, "sdpa", "fp32", False),
    (256, 8192, "sdpa", "bf16", False),
    (256, 8192, "eager", "bf16", False),
    (256, 2048, "eager", "bf16", False),
    (256, 8192, "sdpa", "bf16", True),
    (256, 8192, "eager", "bf16", True),
    (256, 2048, "eager", "fp32", True),
    (256, 2048, "eager", "bf16", True),
    (128, 2048, "eager", "bf16", False),
    (128, 2048, "eager", "bf16", True),
]


def a_step(
    shape: str, context: int, part: int, attention: Any, precision: Any, compiled: bool
) -> Callable[[], object]:
    """Return a function that takes one step of a run with these settings."""
    run = TrainingRun(
        name="timed",
        shape=preset(shape, context=context),
        schedule=Constant(peak=1e-3),
        steps=10**6,
        save_at=(10**6,),
        batch=BATCH_TOKENS // context,
        accumulation=BATCH_TOKENS // part,
        seed=1,
        attention=attention,
        precision=precision,
    )
    tokens = np.random.default_rng(0).integers(0, run.shape.vocabulary, 10**5).astype(np.uint16)
    text = TokenStream(tokens=tokens, tokenizer=None, key="", tokenizer_key="")  # type: ignore[arg-type]
    device = torch.device("cpu")
    going = begin(run, None, device)
    forward = torch.compile(going.model) if compiled else going.model
    return partial(advance, going, forward, run, text, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="olmo2-1m")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print_machine()
    steps, firsts = {}, {}
    for setting in SETTINGS:
        context, part, attention, precision, compiled = setting
        name = f"| {context} | {part} | {attention} | {precision} | {'yes' if compiled else 'no'} |"
        steps[name] = a_step(given.shape, *setting)
        began = time.process_time()
        for _ in range(2):
            steps[name]()
        firsts[name] = time.process_time() - began
    best = best_of(steps, given.repeats)
    print(f"\n{given.shape}, {BATCH_TOKENS} tokens a step\n")
    print(
        "| context | tokens of a part | attention | precision | compiled "
        "| tokens per CPU second | first two steps, CPU seconds |\n|---|---|---|---|---|--:|--:|"
    )
    for name, seconds in best.items():
        print(f"{name} {BATCH_TOKENS / seconds:,.0f} | {firsts[name]:.1f} |")


if __name__ == "__main__":
    main()
