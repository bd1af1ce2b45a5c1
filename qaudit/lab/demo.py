"""Regenerate the series that ships as `qaudit scan demo`, and its training log.

    qaudit lab demo OUT

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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from qaudit.core.schedules import Constant, Linear
from qaudit.lab.train import Run, Shape, train
from qaudit.sources.python_text import part_of, python_documents
from qaudit.types import Document

SHAPE = Shape(hidden=128, ffn=384, layers=4, heads=4, kv_heads=2, vocabulary=2048, context=256)
BATCH = 32
PEAK = 3e-3
HELD, DECAY, WARMUP = 5000, 1000, 100
END = "<|endoftext|>"

STAGE1 = Run(
    name="stage1",
    shape=SHAPE,
    schedule=Constant(peak=PEAK, warmup=WARMUP),
    steps=HELD,
    save_at=(500, 1000, 1750, 2500, 3250, 4000, 4500, 5000),
    batch=BATCH,
    seed=1,
)
INGREDIENTS = tuple(
    Run(
        name=f"stage2-ingredient{k}",
        shape=SHAPE,
        schedule=Linear(peak=PEAK, end=DECAY),
        steps=DECAY,
        save_at=(250, 500, 750, 1000) if k == 1 else (1000,),
        batch=BATCH,
        seed=10 + k,
    )
    for k in (1, 2, 3)
)


def split() -> tuple[list[Document], list[Document]]:
    """Return the training documents and the evaluation documents held out of them."""
    documents = list(python_documents(tests=True))
    training = [d for d in documents if part_of(d.name) != "evaluation"]
    return training, [d for d in documents if part_of(d.name) == "evaluation"]


def train_tokenizer(documents: list[Document]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the documents."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE.vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((d.text for d in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        model_max_length=SHAPE.context,
        clean_up_tokenization_spaces=False,
    )


def regenerate(
    out: Path,
    *,
    threads: int = 1,
    compiled: bool = False,
    progress: Callable[[str, int, int, float], None],
) -> None:
    """Train the series into `out`; the same call again goes on from where it stopped.

    `progress` is told (run, step, steps, loss).
    """
    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    training, heldout = split()
    (out / "heldout.txt").write_text(
        f"# sha256 of the evaluation documents of Python {platform.python_version()}\n"
        + "".join(f"{d.sha256}  {d.name}\n" for d in heldout),
        encoding="utf-8",
    )
    tokenizer = _load_or_train_tokenizer(out, training)
    stream = np.concatenate(
        [np.array([0, *tokenizer.encode(d.text)], dtype=np.uint16) for d in training]
    )

    def go(run: Run, fork: Path | None) -> Path:
        def tell(step: int, loss: float, rate: float) -> None:
            progress(run.name, step, run.steps, loss)

        return train(run, stream, tokenizer, out, fork=fork, compiled=compiled, progress=tell)

    held = go(STAGE1, None)
    for run in INGREDIENTS:
        go(run, held)


def _load_or_train_tokenizer(out: Path, documents: list[Document]) -> PreTrainedTokenizerFast:
    folder = out / "tokenizer"
    if not folder.exists():
        train_tokenizer(documents).save_pretrained(folder)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer
