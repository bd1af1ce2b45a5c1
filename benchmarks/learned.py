"""Schemes learned on what a block returns, beside QuaRot: W4A4KV4, loss and divergence.

    python -m benchmarks.learned [MODEL] [--shape 15M] [--documents 64] [--steps 150] [--out FOLDER]

One scan of a checkpoint, by default the last of the demo's third ingredient, on the text that a
scan takes by default, the same for all. `--shape` makes a model of random weights with the demo's
vocabulary. Each scheme is compared with `quarot`, paired by document.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

import qaudit
from benchmarks.mixtures import DEMO, DOCUMENT_TOKENS, print_paired
from benchmarks.models import SHAPES, make_model
from qaudit.core.registry import parse_scheme

CHECKPOINT = DEMO / "stage2-ingredient3-step1000"
FIRST = "quarot-4bit:kv=int4"
LEARNED = ("spinquant-4bit", "flatquant-4bit", "ostquant-4bit", "base-q-w4a4")


def random_model(shape: str, folder: Path) -> Path:
    """Write a model of a shape that reads the demo's tokens."""
    if not folder.exists():
        make_model(folder, replace(SHAPES[shape], vocabulary=2048, windows=1), "float32")
        for tokenizer in CHECKPOINT.glob("*token*"):
            shutil.copy(tokenizer, folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default=str(CHECKPOINT))
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("qaudit-out/learned"))
    options = parser.parse_args()
    model = options.model
    if options.shape is not None:
        model = str(random_model(options.shape, options.out.with_name(f"random-{options.shape}")))
    steps = [f"{name}:steps={options.steps}:kv=int4" for name in LEARNED]
    schemes = [parse_scheme(text).short for text in (FIRST, *steps)]
    audit = qaudit.scan(
        model,
        schemes=schemes,
        evaluation_documents=options.documents,
        document_tokens=DOCUMENT_TOKENS,
        arithmetic=False,
        out=options.out,
    )
    print_paired(audit, [(schemes[0], schemes[1:])])


if __name__ == "__main__":
    main()
