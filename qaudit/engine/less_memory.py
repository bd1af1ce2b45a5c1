"""What to do where a GPU runs out of memory in a pass.

The pass starts again with its hidden states on the host, which gives the same numbers; then with
batches of half the windows, and with one window at a time, which round otherwise. Measurements
carry a note of it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from qaudit.engine.batches import Batch
from qaudit.engine.tasks import Machine
from qaudit.engine.tokens import Feed
from qaudit.errors import ModelError, is_out_of_memory

T = TypeVar("T")
ON_HOST = "the GPU ran out of memory: hidden states waited on the host"


def with_less_memory(label: str, machine: Machine, feed: Feed, run: Callable[..., T]) -> T:
    """Return `run(machine, feed, notes)`, with less on the GPU each time that is too much."""
    for tried, cheaper, notes in _ways(machine, feed):
        try:
            return run(tried, cheaper, notes)
        except RuntimeError as error:
            if machine.device.type == "cpu" or not is_out_of_memory(error):
                raise
        gc.collect()  # the error had hold of the frames, and they of tensors
        torch.cuda.empty_cache()
    raise ModelError(
        f"out of memory while measuring `{label}`, with hidden states on the host and one window "
        "at a time too",
        hint="lower `--context`, or use a `--device` with more memory",
    )


def _ways(machine: Machine, feed: Feed) -> Iterator[tuple[Machine, Feed, tuple[str, ...]]]:
    yield machine, feed, ()
    on_host = replace(machine, device_stream_limit_nbytes=0)
    yield on_host, feed, (ON_HOST,)
    most = max((len(batch.windows) for batch in (*feed.calibration, *feed.evaluation)), default=1)
    for windows in sorted({-(-most // 2), 1} - {most}, reverse=True):
        note = f"{ON_HOST}, in batches of {windows}: last digits differ"
        yield on_host, _narrower(feed, windows), (note,)


def _narrower(feed: Feed, windows: int) -> Feed:
    return replace(
        feed,
        calibration=_split(feed.calibration, windows),
        evaluation=_split(feed.evaluation, windows),
    )


def _split(batches: Sequence[Batch], windows: int) -> tuple[Batch, ...]:
    return tuple(
        Batch(
            batch.tokens_BT[k : k + windows],
            batch.windows[k : k + windows],
            batch.lengths[k : k + windows],
        )
        for batch in batches
        for k in range(0, len(batch.windows), windows)
    )
