"""What scoring tasks costs beside lm-eval with its own model class, once for each stream.

    python -m benchmarks.tasks [--shape 15M] [--items 20] [--schemes ...]

Items have the sizes of the twelve tasks at five shots, in random tokens, on a random model; those
of MMLU have the same examples, as those of one of its subjects do. Ours is one pass: full precision
and every scheme, what is equal fed once. Theirs is HFLM on the same (context, option) tokens,
measured on full precision and taken once for each stream: it needs a quantized model, whose making
is not counted. It feeds a context once for all of its single-token options, too. Tokens are those
that pass through the blocks of one stream, padding included. Seconds are the processor's, on one
thread; ours are those of a pass with items less those of one without, and the whole pass in
brackets.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.clock import print_machine
from benchmarks.models import SHAPES, make_model
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.registry import parse_schemes
from qaudit.engine.batches import make_batches, make_item_batches
from qaudit.engine.block_pass import run_blocks
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.tokens import Feed
from qaudit.items.harness import DEFAULT_SHOTS, KNOWN
from qaudit.model.blocks import BlockModel
from qaudit.settings import DEFAULT_SCHEMES
from qaudit.types import FULL_PRECISION, Window

CPU = torch.device("cpu")
GOAL = 3.0
Pair = tuple[list[int], list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="15M")
    parser.add_argument("--items", type=int, default=20)
    parser.add_argument("--schemes", default=",".join(DEFAULT_SCHEMES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = SHAPES[options.shape]
    print_machine()
    schemes = [
        f"{name}:group={shape.group}" if name.partition("-")[0] in ("rtn", "gptq", "awq") else name
        for name in options.schemes.split(",")
    ]
    pairs = requests(options.items, shape.vocabulary)
    with TemporaryDirectory() as temporary, contextlib.redirect_stderr(io.StringIO()):
        make_model(Path(temporary), shape, "float32")
        measure(Path(temporary), pairs, schemes)


def requests(items: int, vocabulary: int) -> list[Pair]:
    """Return (context, option) tokens of so many items of each of the twelve tasks."""
    draw = np.random.default_rng(2)

    def tokens(count: float) -> list[int]:
        return draw.integers(3, vocabulary, max(1, round(count))).tolist()

    pairs: list[Pair] = []
    for name, task in KNOWN.items():
        shown = DEFAULT_SHOTS * task.shown_characters / task.characters_per_token
        examples = tokens(shown)
        for _ in range(items):
            examples = examples if name == "mmlu" else tokens(shown)
            question = tokens(task.question_characters / task.characters_per_token)
            context, option = [*examples, *question], []
            length = 1 if task.single_token else task.option_characters / task.characters_per_token
            if name == "winogrande":  # the option is in the context, and what follows is the same
                option = tokens(length)
                pairs += [([*context, *tokens(2)], option) for _ in range(task.options)]
            else:
                pairs += [(context, tokens(length)) for _ in range(task.options)]
    return pairs


def measure(folder: Path, pairs: Sequence[Pair], schemes: Sequence[str]) -> None:
    """Print tokens and processor seconds of both."""
    windows = [
        Window(k, np.array([*context, *option], np.int32), len(context))
        for k, (context, option) in enumerate(pairs)
    ]
    fed = sum(batch.tokens_BT.numel() for batch in make_item_batches([windows], branches=True))
    hflm, (their_tokens, their_seconds) = theirs(folder, pairs)
    with_items, nll = ours(folder, windows, schemes)
    without, _ = ours(folder, [], schemes)
    streams = len(schemes) + 1
    mine = with_items - without
    print(
        f"{len(pairs)} requests, {streams} streams, largest difference {abs(nll + hflm).max():.1e}"
    )
    print(
        f"tokens of a stream   theirs {their_tokens:9,}   ours {fed:9,}   "
        f"{their_tokens / fed:.1f} times"
    )
    total = streams * their_seconds
    print(
        f"processor seconds    theirs {total:9.1f}   ours {mine:9.1f}   {total / mine:.1f} times "
        f"(goal {GOAL:g}), whole pass {with_items:.1f}, {total / with_items:.1f} times"
    )


def ours(
    folder: Path, windows: Sequence[Window], schemes: Sequence[str]
) -> tuple[float, np.ndarray]:
    tokens = np.load(folder / "tokens.npy")[:8]
    fed = [Window(k, row) for k, row in enumerate(tokens)]
    model = BlockModel(folder, WeightFolder(folder), dtype=torch.float32, device=CPU)
    feed = Feed(make_batches(fed, 512), (), compared=False, items=(windows,))
    began = time.process_time()
    with TemporaryDirectory() as spill, HiddenStates(Path(spill), 2**33, CPU) as states:
        tally = run_blocks(model, feed, parse_schemes(schemes), states)[FULL_PRECISION]
    seconds = time.process_time() - began
    return seconds, np.zeros(0) if tally.options is None else tally.options[0]


def theirs(folder: Path, pairs: Sequence[Pair]) -> tuple[np.ndarray, tuple[int, float]]:
    """Return HFLM's log-likelihoods, the tokens that it fed, and its processor seconds."""
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    words = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "<u>": 2}, unk_token="<u>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    lm = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=16)
    fed = 0

    def count(module: object, inputs: tuple[torch.Tensor, ...], kwargs: dict[str, object]) -> None:
        nonlocal fed
        tokens = kwargs.get("input_ids", inputs[0] if inputs else None)
        assert isinstance(tokens, torch.Tensor)
        fed += tokens.numel()

    model.register_forward_pre_hook(count, with_kwargs=True)
    named = [((f"context {k}", f"option {k}"), *pair) for k, pair in enumerate(pairs)]
    began = time.process_time()
    with torch.no_grad():
        values = lm._loglikelihood_tokens(named, disable_tqdm=True)
    seconds = time.process_time() - began
    return np.array([value for value, _ in values]), (fed, seconds)


if __name__ == "__main__":
    main()
