"""Regenerate the series that ships as `qaudit scan demo`, and its training log.

    python -m experiments demo OUT

An OLMo-2-shaped model of about one million parameters, trained on the standard library's
sources and reference topics: a held learning rate (stage 1), then three linear decays to zero
from the same state with different data orders (the ingredients of stage 2). Evaluation
documents are held out by name; their hashes are written to `heldout.txt` and a test asserts
that no training document is among them.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from experiments.run import TrainingRun
from experiments.shapes import ModelShape
from experiments.text import TokenStream, train_tokenizer
from experiments.train import train
from qaudit.core.schedules import Constant, Linear
from qaudit.text.documents import part_of, python_documents
from qaudit.types import Document, digest

SHAPE = ModelShape(hidden=128, ffn=384, layers=4, heads=4, kv_heads=2, vocabulary=2048, context=256)
BATCH = 32
PEAK = 3e-3
HELD, DECAY, WARMUP = 5000, 1000, 100

STAGE1 = TrainingRun(
    name="stage1",
    shape=SHAPE,
    schedule=Constant(peak=PEAK, warmup=WARMUP),
    steps=HELD,
    save_at=(500, 1000, 1750, 2500, 3250, 4000, 4500, 5000),
    batch=BATCH,
    seed=1,
)
INGREDIENTS = tuple(
    TrainingRun(
        name=f"stage2-ingredient{k}",
        shape=SHAPE,
        schedule=Linear(peak=PEAK, end=DECAY),
        steps=DECAY,
        save_at=(250, 500, 750, 1000) if k == 1 else (1000,),
        batch=BATCH,
        seed=10 + k,
        parent=STAGE1,
        fork_at=HELD,
    )
    for k in (1, 2, 3)
)


def split() -> tuple[list[Document], list[Document]]:
    """Return the training documents, and the evaluation documents that are held out."""
    documents = list(python_documents(tests=True))
    training = [d for d in documents if part_of(d.name) != "evaluation"]
    return training, [d for d in documents if part_of(d.name) == "evaluation"]


def regenerate(
    out: Path,
    *,
    threads: int = 1,
    compiled: bool = False,
    progress: Callable[[str, int, int, float], None],
) -> None:
    """Train the series into `out`, or resume it; `progress` receives run, step, steps, loss."""
    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    training, heldout = split()
    head = f"# sha256 of the evaluation documents of Python {platform.python_version()}\n"
    lines = [f"{d.sha256}  {d.name}\n" for d in heldout]
    (out / "heldout.txt").write_text(head + "".join(lines), encoding="utf-8")
    # Not `prepare`: the series was first trained on this stream, without hashing by name.
    folder = out / "tokenizer"
    if not folder.exists():
        train_tokenizer((d.text for d in training), SHAPE.vocabulary).save_pretrained(folder)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    tokens = [np.array([0, *tokenizer.encode(d.text)], dtype=np.uint16) for d in training]
    text = TokenStream(
        tokens=np.concatenate(tokens),
        tokenizer=tokenizer,
        key=digest([d.sha256 for d in training]),
        tokenizer_key=digest(tokenizer.get_vocab()),
    )
    for run in (STAGE1, *INGREDIENTS):

        def show(step: int, loss: float, rate: float, run: TrainingRun = run) -> None:
            progress(run.name, step, run.steps, loss)

        train(run, text, out, device="cpu", compiled=compiled, progress=show)
