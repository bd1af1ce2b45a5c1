"""What to do where a GPU runs out of memory in a pass.

The pass starts again with its hidden states on the host, which gives the same numbers; then with
batches of half the windows, and with one window at a time, which round otherwise. Measurements
carry a note of it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from qaudit.engine.batches import Batch
from qaudit.engine.tasks import Machine
from qaudit.engine.tokens import Feed
from qaudit.errors import ModelError, is_out_of_memory

ON_HOST = "the GPU ran out of memory: hidden states waited on the host"


@dataclass(frozen=True, eq=False)
class Attempt:
    """One way to run a pass; a block inside of it may run out of a GPU's memory."""

    machine: Machine
    feed: Feed
    notes: tuple[str, ...] = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        on_gpu = self.machine.device.type != "cpu"
        return on_gpu and isinstance(error, RuntimeError) and is_out_of_memory(error)


def attempts(machine: Machine, feed: Feed) -> Iterator[Attempt]:
    """Yield ways to run a pass, each with less on the GPU than the one before."""
    on_host = replace(machine, device_stream_limit_nbytes=0)
    ways = [Attempt(machine, feed), Attempt(on_host, feed, (ON_HOST,))]
    most = max((len(batch.windows) for batch in (*feed.calibration, *feed.evaluation)), default=1)
    for windows in sorted({-(-most // 2), 1} - {most}, reverse=True):
        note = f"{ON_HOST}, in batches of {windows}: last digits differ"
        ways.append(Attempt(on_host, _narrower(feed, windows), (note,)))
    for way in ways:
        yield way
        gc.collect()  # the error had hold of the frames, and they of tensors
        torch.cuda.empty_cache()


def out_of_memory(label: str) -> ModelError:
    """Make the error for a subject that no attempt could measure."""
    return ModelError(
        f"out of memory while measuring `{label}`, with hidden states on the host and one window "
        "at a time too",
        hint="lower `--context`, or use a `--device` with more memory",
    )


def _narrower(feed: Feed, windows: int) -> Feed:
    return replace(
        feed,
        calibration=_split(feed.calibration, windows),
        evaluation=_split(feed.evaluation, windows),
    )


def _split(batches: Sequence[Batch], windows: int) -> tuple[Batch, ...]:
    return tuple(
        batch.part(slice(k, k + windows))
        for batch in batches
        for k in range(0, len(batch.windows), windows)
    )
