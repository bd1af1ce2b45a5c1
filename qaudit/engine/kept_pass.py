"""A pass that is kept at the entrance of a block, so that the same command goes on there.

    header (JSON, one line)  the hidden states, in order  sha256 of all before

A subject of a large model takes hours. Every few minutes the hidden states of all streams, items
included, what streams have counted and the hashes of linears go to one file of `evidence/passes`,
which replaces the one before: twice the hidden states is what it takes of the disk at most. The
clock decides when to write and nothing else: a pass that goes on has the numbers of one that was
never stopped. A file of another pass, or a damaged one, is as none; a full disk ends the keeping,
not the audit.

Given up: passes whose items go through in several rounds, and those whose quantized weights a
diagnostic sees. They begin again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.kept_weights import LinearHashes
from qaudit.engine.streams import Stream
from qaudit.engine.tasks import Machine, StoredResults, Task
from qaudit.engine.tokens import Feed
from qaudit.model.blocks import BlockModel
from qaudit.saved.results import slug_of
from qaudit.types import digest
from qaudit.whole import partial_name

EVERY_SECONDS = 300.0
FOLDER = "passes"
"""In `evidence/`."""

_MADE_AGAIN = ("inputs/", "given/")  # what groups of a block read, and what tokens tell blocks


class KeptPass:
    """The file of one pass."""

    def __init__(self, path: Path, key: str, hashes: LinearHashes) -> None:
        """`key` is everything that decides the hidden states."""
        self._path, self._key, self._hashes = path, key, hashes
        self._written, self._keeps = time.monotonic(), True

    def resume(self, states: HiddenStates, streams: Sequence[Stream], model: BlockModel) -> int:
        """Read what was kept; return the block to go on at, 0 where nothing was."""
        try:
            with self._path.open("rb") as file:
                header = self._read(file, states)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            header = None
        if header is None or header["streams"].keys() != {stream.name for stream in streams}:
            return 0
        for stream in streams:
            stream.restore(header["streams"][stream.name])
        self._hashes.restore(header["hashes"])
        model.left.update(header["left"])
        return int(header["block"])

    def _read(self, file: BinaryIO, states: HiddenStates) -> dict[str, Any] | None:
        line = file.readline()
        header: dict[str, Any] = json.loads(line)
        if header.get("key") != self._key:
            return None
        sha256 = hashlib.sha256(line)
        for stream, batch, shape, dtype in header["states"]:
            kind = getattr(torch, dtype)
            raw = file.read(size := int(np.prod(shape)) * kind.itemsize)
            if len(raw) != size:
                break  # the file is cut short
            sha256.update(raw)
            read = torch.from_numpy(np.frombuffer(bytearray(raw), np.uint8))
            states.put(stream, batch, read.view(kind).reshape(shape))
        if file.read() == sha256.digest():
            return header
        for stream in {stream for stream, *_ in header["states"]}:
            states.drop(stream)
        return None

    def keep(
        self, block: int, states: HiddenStates, streams: Sequence[Stream], model: BlockModel
    ) -> None:
        """Write the state at the entrance of a block, if the last time is long ago."""
        if not self._keeps or time.monotonic() - self._written < EVERY_SECONDS:
            return
        if any(stream.tally.error is not None for stream in streams):
            return  # a file that cannot be read fails at its block again
        listed = [entry for entry in states.listed() if not entry[0].startswith(_MADE_AGAIN)]
        header = {
            "key": self._key,
            "block": block,
            "states": [
                [stream, batch, list(shape), str(dtype).removeprefix("torch.")]
                for stream, batch, shape, dtype in listed
            ],
            "streams": {stream.name: stream.state() for stream in streams},
            "left": model.left,
            "hashes": self._hashes.state(),
        }
        partial = partial_name(self._path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            for stale in self._path.parent.glob(f"{self._path.stem}.*.partial"):
                stale.unlink(missing_ok=True)  # of a process that was killed while it wrote
            with partial.open("wb") as file:
                line = json.dumps(header).encode() + b"\n"
                file.write(line)
                sha256 = hashlib.sha256(line)
                for stream, batch, *_ in listed:
                    tensor = states.get(stream, batch).cpu().contiguous()
                    raw = tensor.flatten().view(torch.uint8).numpy().data
                    file.write(raw)
                    sha256.update(raw)
                file.write(sha256.digest())
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self._path)
        except OSError:
            self._keeps = False
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        self._written = time.monotonic()


def place_of(task: Task, stored: StoredResults, folder: Path) -> tuple[Path, str]:
    """Return where a pass is kept, and what decides its results."""
    kind = "rounded" if task.perturbed else "plain"
    name = f"{slug_of(task.subject.label)}--{kind}-{task.pass_.draw}.kept"
    parts = (None, *sorted(task.corpus.tasks))
    decides = {
        spec: [stored.identities[spec, part].key for part in parts] for spec in sorted(task.streams)
    }
    rest = [task.compared, task.perturbed, task.pass_.draw]
    return folder / FOLDER / name, digest([decides, *rest])


def kept_pass(task: Task, machine: Machine, feed: Feed, hashes: LinearHashes) -> KeptPass | None:
    if task.resume is None:
        return None
    path, key = task.resume
    shapes = [[list(b.tokens_BT.shape) for b in fed] for fed in (feed.calibration, feed.evaluation)]
    here = [str(machine.device), str(machine.dtype), torch.get_num_threads(), torch.__version__]
    return KeptPass(path, digest([key, shapes, here, machine.column_loop]), hashes)
