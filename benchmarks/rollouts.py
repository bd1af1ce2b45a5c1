"""What scoring rollouts costs beside evaluating as many tokens of documents.

    python -m benchmarks.rollouts [--models demo,15M] [--dtype float32] [--windows 8]
        [--repeats 3]

The same windows go through one pass as documents and as rollouts with marks, under each sampler:
full precision, rtn-4bit and rtn-3bit, with the sums over documents and samples. `demo` is the
demo's last checkpoint on its text, others are random models on random tokens, with a head that
predicts with an entropy of three nats. Processor seconds of one thread, taken in turns, less those
of a pass without these windows; the least of `--repeats`. Memory is the peak of a process of its
own above what the imports take, beside what the plan says.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from benchmarks.clock import best_of, print_machine, run_apart
from benchmarks.models import SHAPES, make_model
from qaudit.checkpoints.folder import shipped_series
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.registry import parse_schemes
from qaudit.engine.batches import make_batches, make_rollout_batches
from qaudit.engine.block_pass import run_blocks
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.read_out import evidence_of
from qaudit.engine.tokens import Feed
from qaudit.model.blocks import BlockModel
from qaudit.planning.machine import Footprint
from qaudit.planning.sizes import Load, TextSize
from qaudit.text.documents import python_part
from qaudit.types import FULL_PRECISION, Corpus, EvaluationDocument, Protocol, RolloutText, Window
from tests.support.tiny import header_sizes

Ints = npt.NDArray[np.int32]
Sampler = tuple[float, int | None, float]

CPU = torch.device("cpu")
GOAL = 0.1
CONTEXT, PROMPT = 256, 64
SAMPLERS: dict[str, Sampler | None] = {
    "as the model writes": None,
    "temperature 0.8": (0.8, None, 1.0),
    "top-k 50": (0.8, 50, 1.0),
    "top-p 0.95": (0.8, None, 0.95),
    "top-k 20, top-p 0.95": (0.6, 20, 0.95),
}
SCHEMES = "rtn-4bit:group=32", "rtn-3bit:group=32"
HEAD = 0.28  # standard deviation of a random head
LIMIT_NBYTES = 2**33


def main() -> None:
    if sys.argv[1:2] == ["--peak"]:
        place, dtype, windows, rollouts = sys.argv[2:]
        print(json.dumps(peak(Path(place), dtype, int(windows), rollouts=rollouts == "rollouts")))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="demo,15M")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print_machine()
    with TemporaryDirectory() as temporary:
        for name in options.models.split(","):
            place = opened(name, Path(temporary) / name)
            print(f"\n{name} {options.dtype}, {options.windows} windows of {CONTEXT}")
            measure(place, options.dtype, options.windows, options.repeats)


def opened(name: str, place: Path) -> Path:
    """Return the folder of a model."""
    if name == "demo":
        return shipped_series() / "stage2-ingredient3-step1000"
    make_model(place, SHAPES[name], "float32")
    weights = load_file(place / "model.safetensors")
    weights["lm_head.weight"] = HEAD * torch.randn_like(weights["model.embed_tokens.weight"])
    save_file(weights, place / "model.safetensors", {"format": "pt"})
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return place


def tokens_of(place: Path, count: int) -> Ints:
    """Return windows of tokens."""
    if (place / "tokenizer.json").is_file():
        read = PreTrainedTokenizerFast.from_pretrained(place)
        texts = [document.text for document in python_part("evaluation")]
        ids = [token for text in texts for token in read.encode(text)]
        return np.array(ids[: count * CONTEXT], dtype=np.int32).reshape(count, CONTEXT)
    draw = np.random.default_rng(1)
    return draw.integers(3, header_sizes(place).vocabulary, (count, CONTEXT), dtype=np.int32)


def corpus_of(place: Path, count: int, sampler: Sampler | None, *, rollouts: bool) -> Corpus:
    """Return a document, and windows as further documents or as rollouts."""
    tokens = tokens_of(place, count)
    greedy = np.arange(count) % 4 == 0
    text = RolloutText(
        tuple(Window(k, row, PROMPT) for k, row in enumerate(tokens)),
        prompt=np.arange(count) // 4,
        greedy=greedy,
        ends=(("turn", (1, 2)), ("reasoning", (5,))),
        sha256="",
        mark=np.where(greedy, np.nan, 1.0),
        read=np.full(count, CONTEXT - PROMPT),
        sampler=sampler,
    )
    rows = [tokens[0], *(() if rollouts else tokens)]
    return Corpus(
        Protocol(CONTEXT),
        (),
        tuple(Window(k, row) for k, row in enumerate(rows)),
        tuple(EvaluationDocument(str(k), str(k), CONTEXT) for k in range(len(rows))),
        rollouts=text if rollouts and count else None,
    )


def run(place: Path, dtype: str, corpus: Corpus) -> None:
    """Send a corpus through one pass, and sum it up."""
    batches = (*make_batches(corpus.evaluation, CONTEXT), *make_rollout_batches(corpus))
    feed = Feed((), batches)
    weights, number = WeightFolder(place), getattr(torch, dtype)
    with TemporaryDirectory() as spill, HiddenStates(Path(spill), LIMIT_NBYTES, CPU) as states:
        model = BlockModel(place, weights, dtype=number, device=CPU)
        tallies = run_blocks(model, feed, parse_schemes(SCHEMES), states)
    for tally in tallies.values():
        evidence_of(corpus, feed, tally, tallies[FULL_PRECISION])


def measure(place: Path, dtype: str, windows: int, repeats: int) -> None:
    """Print the added share of each sampler, and what memory both take."""
    corpora = {
        name: corpus_of(place, windows, sampler, rollouts=True)
        for name, sampler in SAMPLERS.items()
    }
    corpora["documents"] = corpus_of(place, windows, None, rollouts=False)
    corpora["without"] = replace(corpora["top-p 0.95"], rollouts=None)
    runs = {name: partial(run, place, dtype, corpus) for name, corpus in corpora.items()}
    best = best_of(runs, repeats)
    documents = best["documents"] - best["without"]
    for name in SAMPLERS:
        rollouts = best[name] - best["without"]
        print(
            f"    {name:<22}{rollouts / documents - 1:+7.1%}   (goal {GOAL:+.0%})   "
            f"rollouts {rollouts:.2f} s, documents {documents:.2f} s",
            flush=True,
        )
    for what in ("documents", "rollouts"):
        found = run_apart(sys.executable, "rollouts", "--peak", place, dtype, windows, what)
        print(
            f"    {what:<22}peak {found['peak'] / 2**20:.0f} MiB, planned "
            f"{found['planned'] / 2**20:.0f} MiB",
            flush=True,
        )


def peak(place: Path, dtype: str, windows: int, *, rollouts: bool) -> dict[str, float]:
    """Return what a pass takes of memory in this process, and what a plan says, in bytes."""
    torch.set_num_threads(1)
    corpus = corpus_of(place, windows, SAMPLERS["top-p 0.95"], rollouts=rollouts)
    before = resident("VmRSS")
    run(place, dtype, corpus)
    nbytes = resident("VmHWM") - before
    text = TextSize(0, (windows + 1) * CONTEXT, CONTEXT)
    load = Load.of(parse_schemes(SCHEMES), text)
    itemsize = getattr(torch, dtype).itemsize
    planned = Footprint(header_sizes(place), load, itemsize, LIMIT_NBYTES).memory_nbytes
    return {"peak": nbytes, "planned": planned}


def resident(kind: str) -> int:
    """Return a memory of this process in bytes; a child's `getrusage` begins with its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(kind))


if __name__ == "__main__":
    main()
