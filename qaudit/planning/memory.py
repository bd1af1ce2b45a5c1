"""The memory that an audit takes at its worst moment, and what would make it fit. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qaudit.core.sizes import size, typed_size
from qaudit.errors import MachineError
from qaudit.host import available_nbytes
from qaudit.planning.price import ITEMSIZE, MASKS_NBYTES, ROUND_TOKENS, TREE_TOKENS, Load, Sizes

BATCH_TOKENS = 4096  # tokens in flight through a block
HEAD_ROWS = 256  # rows of logits in memory at once
KEPT = 13  # numbers in float32 that gradients keep of each that is transformed and rounded


@dataclass(frozen=True)
class Memory:
    """What this machine must hold, and how calibration passes through a block for it."""

    nbytes: int
    nbytes_fixed: int  # without hidden states
    nbytes_available: int
    returning: bool

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.returning:
            return ()
        return (
            "calibration is too long to wait inside a block, and goes through each block once for "
            "every group of linears: the same numbers, slower; a higher `--stream-memory` avoids "
            "it",
        )


def memory_of(
    sizes: Sizes, loads: Sequence[Load], documents: int, machine: tuple[str, str], limit: int
) -> Memory:
    """Estimate the memory of the first load, the audit's; refuse what this machine lacks."""
    device, dtype = machine
    load, itemsize = loads[0], ITEMSIZE[dtype]
    available = available_nbytes()
    if device == "cpu" and memory_nbytes(sizes, load, itemsize, limit) > available:
        raise _too_large(sizes, load, documents, itemsize, limit, available)
    return Memory(
        nbytes=max(memory_nbytes(sizes, one, itemsize, limit) for one in loads),
        nbytes_fixed=memory_nbytes(sizes, load, itemsize, 0),
        nbytes_available=available,
        returning=device == "cpu" and returns(sizes, load, itemsize, limit),
    )


def default_stream_limit() -> int:
    """Return the memory hidden states may take before they are spilled: a quarter of the free."""
    return available_nbytes() // 4


def _too_large(
    sizes: Sizes, load: Load, documents: int, itemsize: int, limit_nbytes: int, available: int
) -> MachineError:
    """Refuse what memory does not hold, with the numbers that would make it fit."""
    needed = memory_nbytes(sizes, load, itemsize, limit_nbytes)
    lower, fewer = what_would_fit(sizes, load, documents, itemsize, limit_nbytes, available)
    proposals = []
    if lower is not None:
        proposals.append(f"`--stream-memory {typed_size(lower, up=False)}`")
    if fewer is not None:
        proposals.append(f"`--calibration-documents {fewer}`")
    return MachineError(
        f"this audit needs about {size(needed)} of memory and {size(available)} are free",
        hint=f"it would fit with {' or with '.join(proposals)}"
        if proposals
        else "no `--stream-memory` and no `--calibration-documents` would make it fit: "
        "use a machine with more memory, or a lower `--context`",
    )


# ------------------------------------------------------------------------------- estimates


def waiting_nbytes(tokens: int, hidden: int, widest: int, itemsize: int) -> int:
    """Estimate what a block holds while so many tokens wait inside it.

    The residual, and the operands of attention or the inner product of the mlp.
    """
    return tokens * (5 * hidden + widest) * itemsize


def stream_nbytes(sizes: Sizes, load: Load, itemsize: int) -> int:
    """Return what the hidden states of all streams of a round take."""
    calibrated = load.own_streams + load.shared_calibration
    evaluated = load.evaluation_tokens + min(load.item_tokens, ROUND_TOKENS)
    tokens = (load.schemes + 2) * evaluated + (calibrated + 1) * load.calibration_tokens
    streams = tokens * sizes.hidden * itemsize
    if load.drifts or load.modules:  # what every group of a block reads in full precision
        streams += load.calibration_tokens * (3 * sizes.hidden + sizes.widest) * itemsize
    return streams


def learning_nbytes(sizes: Sizes, load: Load) -> int:
    """Estimate what gradients keep of a block's weights and of what a mini-batch makes in it."""
    if not load.learners:
        return 0
    read = 3 * sizes.hidden + sizes.widest  # activations of a token that are transformed, rounded
    return 4 * (KEPT * sizes.block_parameters + 2 * KEPT * load.step_tokens * read)


def memory_nbytes(sizes: Sizes, load: Load, itemsize: int, stream_limit_nbytes: int) -> int:
    """Estimate what the engine holds at its worst moment, above the libraries themselves."""
    token_nbytes = sizes.hidden * itemsize
    streams = stream_nbytes(sizes, load, itemsize)
    spilled = streams > stream_limit_nbytes
    # What does not fit inside a block at once goes through it once for each group.
    inside = waiting_nbytes(load.calibration_tokens, sizes.hidden, sizes.widest, itemsize)
    working = sizes.block_parameters * 4 * 4 + 3 * sizes.widest**2 * 4
    # Logits of full precision, its probabilities and a stream's, and every stream's batch.
    head = 3 * HEAD_ROWS * sizes.vocabulary * 4 + load.streams * BATCH_TOKENS * token_nbytes
    forward = 8 * BATCH_TOKENS * sizes.widest * itemsize
    learning = learning_nbytes(sizes, load)
    # A file is opened with embeddings and head of its own, which are dropped where they equal the
    # base's; its block is beside the base's.
    file = bool(load.files)
    return (
        (1 + file + load.own_rests) * sizes.rest_parameters * itemsize
        + (2 + file) * sizes.block_parameters * itemsize
        + min(streams, stream_limit_nbytes)
        + min(MASKS_NBYTES, min(load.item_tokens, ROUND_TOKENS) * TREE_TOKENS * itemsize)
        + (min(inside, stream_limit_nbytes) if load.own_streams else 0)
        # Until hidden states are spilled the C library keeps what one stage frees from the next.
        + (
            max(working, head, forward, learning)
            if spilled
            else working + head + forward + learning
        )
    )


def what_would_fit(
    sizes: Sizes,
    load: Load,
    documents: int,
    itemsize: int,
    stream_limit_nbytes: int,
    available_nbytes: int,
) -> tuple[int | None, int | None]:
    """Return the largest limit on streams, and the most calibration documents, that would fit.

    Each by itself, with everything else as requested; None where it does not help.
    """

    def fits(fewer: int, limit: int) -> bool:
        tokens = load.calibration_tokens * fewer // documents
        lighter = replace(load, calibration_tokens=tokens)
        return memory_nbytes(sizes, lighter, itemsize, limit) <= available_nbytes

    spilled = memory_nbytes(sizes, load, itemsize, 0)
    limit = min(stream_limit_nbytes, available_nbytes - spilled)
    while limit > 0 and not fits(documents, limit):
        limit //= 2  # streams that do not spill keep more of what stages leave behind
    fewer = range(documents - 1, 0, -max(1, documents // 1000))
    most = next((n for n in fewer if fits(n, stream_limit_nbytes)), None)
    return (limit if limit > 0 else None), most


def returns(sizes: Sizes, load: Load, itemsize: int, limit_nbytes: int) -> bool:
    """Return whether calibration is too long to wait inside a block, and enters it by groups."""
    inside = waiting_nbytes(load.calibration_tokens, sizes.hidden, sizes.widest, itemsize)
    return load.own_streams > 0 and inside > limit_nbytes
