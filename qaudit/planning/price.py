"""Price an audit from names and headers alone, before the first byte of weights is read.

Nothing here imports torch, so that a plan is on the screen at once. Sizes are read from the
safetensors headers: the repeated numbered prefix is the blocks, everything else is embeddings,
norms and head. Time is the forward passes, the Hessians and the heads divided by a matrix rate
measured on this machine in a moment: an order of magnitude. Progress, and the status of parts, go
by the pace of what was measured instead.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.gram import SAMPLE
from qaudit.core.scheme import Calibration, Scheme
from qaudit.core.shipped import EMBEDDINGS_TOO, Shipped
from qaudit.core.whole_block import STEP_TOKENS
from qaudit.errors import ModelError
from qaudit.planning.text_size import TextSize
from qaudit.types import Protocol

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
ROUND_TOKENS = 1_000_000  # of items of tasks that go through blocks together
TREE_TOKENS = 2048  # of a window of items that is a tree, unless a single sequence is longer
MASKS_NBYTES = 2**29  # of the masks of trees; what is more is made again for every block
MODULES = 21  # passes through attention and the MLP: full precision and 20 candidates of scales
RETURNING = 1.75  # passes on top of one: to o_proj a third of a block, to gate_proj half, to down
SPREAD = 4.0  # of a time before anything is measured
SERIAL = 1 / 20  # of the work of one core, which other cores do not share
GPU_RATES = {2: 1e14, 4: 2e13}  # FLOP per second, by the bytes of a number
# What is no product of matrices, in operations of one in float32 that take as long.
ATTENTION = 1.5  # of the products with keys and values: softmax between them
ELEMENTWISE = 450.0  # norms, gates and residuals of an activation that a linear reads
LOGIT = 200.0  # its share of a loss
ROUNDING = 150.0  # of an activation
GRAM = 9 / 8  # of a square of a token's numbers: 9/16 of it are computed (`qaudit/core/gram.py`)
TRIAL = 240.0  # of a weight under one candidate of its scale
_WITHOUT_GRAM = {Calibration.NONE, Calibration.BOTH_STREAMS}
_WITHOUT_GRAM |= {Calibration.OWN_STREAM, Calibration.OWN_BLOCKS}


@dataclass(frozen=True)
class Sizes:
    """What the headers tell of a model's shape."""

    parameters: int
    blocks: int
    block_parameters: int  # of the largest block
    rest_parameters: int  # embeddings, final norm, head
    hidden: int
    widest: int  # the longest side of a matrix in a block
    vocabulary: int
    tensors: int = field(default=1 << 40, compare=False)  # unknown where no header was read
    # Of blocks, by block and name: empty where no header was read.
    matrices: Mapping[tuple[int, str], tuple[int, int]] = field(default_factory=dict, compare=False)

    @classmethod
    def read(cls, folder: Path, *, allow_pickle: bool = False) -> Sizes:
        """Read the sizes of the model in `folder` from its headers."""
        weights = WeightFolder(folder, allow_pickle=allow_pickle)
        return cls.of({name: weights.shape(name) for name in weights.names()}, str(folder))

    @classmethod
    def of_config(cls, config: Mapping[str, Any], name: str) -> Sizes:
        """Estimate the sizes from a model's configuration, where no header can be read."""
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
        sizes = [config.get(key) for key in names]
        if not all(isinstance(value, int) and value > 0 for value in sizes):
            raise ModelError(
                f"the size of `{name}` is not defined by its `config.json`",
                hint="convert its weights to safetensors: their headers say it",
            )
        hidden, inner, blocks, vocabulary = (int(value) for value in sizes if value)
        heads = config.get("num_attention_heads") or 1
        shared = config.get("num_key_value_heads") or heads
        attention = 2 * hidden**2 + 2 * hidden * hidden * shared // heads
        block = attention + 3 * hidden * inner + 2 * hidden
        rest = (1 if config.get("tie_word_embeddings") else 2) * vocabulary * hidden + hidden
        return cls(
            parameters=rest + blocks * block,
            blocks=blocks,
            block_parameters=block,
            rest_parameters=rest,
            hidden=hidden,
            widest=max(hidden, inner),
            vocabulary=vocabulary,
        )

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], name: str) -> Sizes:
        """Tell blocks from the rest by the most common numbered prefix."""
        numbered = [(m, tensor) for tensor in shapes if (m := re.match(r"(.*?)\.(\d+)\.", tensor))]
        if not numbered:
            raise ModelError(f"`{name}` holds no numbered blocks", hint="is it a causal LM?")
        prefix = Counter(m.group(1) for m, _ in numbered).most_common(1)[0][0]
        per_block: Counter[int] = Counter()
        widest, inner = 1, {}
        for match, tensor in numbered:
            if match.group(1) == prefix:
                block, shape = int(match.group(2)), shapes[tensor]
                per_block[block] += int(np.prod(shape))
                widest = max((widest, *shape))
                if len(shape) == 2:
                    name = tensor[match.end() :].removesuffix(".weight")
                    inner[block, name] = (int(shape[0]), int(shape[1]))
        total = sum(int(np.prod(shape)) for shape in shapes.values())
        matrices = [s for t, s in shapes.items() if len(s) == 2 and not t.startswith(prefix + ".")]
        embedding = max(matrices, key=lambda s: s[0] * s[1], default=[1, 1])
        return cls(
            parameters=total,
            blocks=len(per_block),
            block_parameters=max(per_block.values()),
            rest_parameters=total - sum(per_block.values()),
            hidden=min(embedding),
            widest=widest,
            vocabulary=max(embedding),
            tensors=len(shapes),
            matrices=inner,
        )


@dataclass(frozen=True)
class Load:
    """How much goes through the model."""

    calibration_tokens: int
    evaluation_tokens: int
    own_streams: int  # schemes that calibrate on their own past
    shared_calibration: bool  # some scheme calibrates on the full-precision stream
    schemes: int
    full_precision: int = 1  # streams of it that are evaluated too
    item_tokens: int = 0  # of tasks; few of them pass through the head
    drifts: int = 0  # schemes that calibrate on both streams
    modules: int = 0  # schemes that run the modules around groups under many weights
    rounded: int = 0  # schemes that round activations
    files: int = 0  # that are quantized already
    own_rests: int = 0  # files whose embeddings and head are quantized, so that none shares them
    learners: int = 0  # schemes that learn on what a block returns
    learning_steps: int = 0  # of all of them
    context: int = 0  # tokens that attend to one another
    shared_gram: bool = True  # whether the full-precision stream is more than lent to others
    trials: int = 0  # candidates of scales for each weight, of all schemes
    sampled: int = 0  # operations for each number of the sampled inputs
    step_tokens: int = 0  # of a mini-batch

    @property
    def streams(self) -> int:
        """How many models are evaluated."""
        return self.schemes + self.full_precision

    @classmethod
    def of(
        cls, protocol: Protocol, schemes: Sequence[Scheme], text: TextSize | None = None
    ) -> Load:
        """Return what goes through a model; without a count of the text, its bound."""
        size = text or TextSize.bound(protocol)
        files = [scheme for scheme in schemes if isinstance(scheme, Shipped)]
        return cls(
            calibration_tokens=size.calibration_tokens,
            evaluation_tokens=size.evaluation_tokens,
            own_streams=sum(s.calibration.has_stream for s in schemes),
            shared_calibration=any(s.calibration.reads_full_precision for s in schemes),
            drifts=sum(s.calibration is Calibration.BOTH_STREAMS for s in schemes),
            modules=sum(s.compares_modules for s in schemes),
            rounded=sum(s.bit_class.startswith("w") for s in schemes),
            schemes=len(schemes),
            item_tokens=size.item_tokens,
            files=len(files),
            own_rests=sum(file.format in EMBEDDINGS_TOO for file in files),
            learners=sum(s.calibration is Calibration.WHOLE_BLOCK for s in schemes),
            learning_steps=sum(s.learning_steps for s in schemes),
            step_tokens=min(max(STEP_TOKENS, protocol.context), size.calibration_tokens),
            context=protocol.context,
            shared_gram=not all(s.calibration in _WITHOUT_GRAM for s in schemes),
            trials=sum(s.trials for s in schemes),
            sampled=sum(s.sampled_operations for s in schemes),
        )


def flops(sizes: Sizes, load: Load, *, returning: bool = False) -> float:
    """Estimate the arithmetic of one subject: forward passes, Hessians, heads, rounding."""
    read = sizes.blocks * (3 * sizes.hidden + sizes.widest)  # activations of a token
    products = 2.0 * sizes.blocks * sizes.block_parameters
    attention = 4.0 * sizes.blocks * load.context * sizes.hidden
    blocks = products + ATTENTION * attention + ELEMENTWISE * read
    again = RETURNING * load.own_streams if returning else 0.0
    again += 3 * load.learners  # for statistics, and for the error before and behind
    calibrated = load.own_streams + load.shared_calibration + again + MODULES * load.modules
    evaluated = load.evaluation_tokens + load.item_tokens
    forward = blocks * (load.streams * evaluated + calibrated * load.calibration_tokens)
    shared_gram = load.shared_calibration and load.shared_gram
    hessians = (
        (GRAM * (load.own_streams + shared_gram + load.learners) + 2.0 * load.drifts)
        * load.calibration_tokens
        * sizes.blocks
        * (3 * sizes.hidden**2 + sizes.widest**2)
    )
    logits = load.streams * load.evaluation_tokens * sizes.vocabulary
    head = (2.0 * sizes.hidden + LOGIT) * logits
    rounding = ROUNDING * load.rounded * evaluated * read
    searching = TRIAL * load.trials * sizes.blocks * sizes.block_parameters
    searching += load.sampled * min(2 * SAMPLE, load.calibration_tokens) * read
    # Gradients take twice what a product takes, and those of roundings as much as these.
    learned = load.learning_steps * load.step_tokens
    learning = learned * (3 * blocks + 2 * ROUNDING * read)
    return forward + hessians + head + rounding + searching + learning


def matmul_rate() -> float:
    """Measure one core's float32 matrix rate in FLOP per second, in a twentieth of a second.

    The product is small enough that no library shares it between threads, and the best of many
    counts: the others had to share the core.
    """
    side = 64
    a = np.random.default_rng(0).standard_normal((side, side), dtype=np.float32)
    began, best = time.perf_counter(), float("inf")
    while (now := time.perf_counter()) - began < 0.05:
        a @ a
        best = min(best, time.perf_counter() - now)
    return 2.0 * side**3 / best


def seconds_range(work: float, device: str, dtype: str) -> tuple[float, float]:
    """Return the order of magnitude of the time that so many FLOP take: two ends, four apart.

    A processor is priced by its own rate and Amdahl's law, a GPU by one common rate: nothing of
    it is measured before. Small models spend most of their time between products of matrices.
    """
    if device.startswith("cuda"):
        rate = GPU_RATES[ITEMSIZE[dtype]]
    else:
        rate = matmul_rate() / (SERIAL + (1 - SERIAL) / (psutil.cpu_count() or 1))
    return work / rate, SPREAD * work / rate
