"""Items of tasks in rounds, so that their hidden states do not grow with the number of tasks.

Between blocks every stream keeps the hidden states of all its tokens. Twenty million tokens of a
7B model would be 1.5 TB for nine streams, so that tasks go through in rounds, each of whole tasks.
The first has the documents, and writes what schemes that calibrate make of the weights; later ones
read that. Tasks are batched by themselves, so that losses do not depend on the tasks beside them,
and stored as their round ends: a process that is killed loses one round.

Quantized weights stored on the disk, so that a later pass need not calibrate again.

What a scheme makes depends on the weights and on the calibration text, not on the evaluated text.
So the first pass writes what the scheme made of every group of linears, and later passes read it:
`Storing` and `Restoring` wrap the scheme and have its name, so that a measurement has the same
identity and, to the bit, the same numbers either way. Groups are identified by the names of their
linears and by how often these came before, which is the number of the block.

Weights are stored dequantized, in the dtype that they are computed in; codes would take a quarter
of the disk, and a format for each scheme. A scheme with forwards or inputs of its own cannot
be stored.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from qaudit.core.linears import Linears, Quantized
from qaudit.core.scheme import Calibration, Scheme
from qaudit.core.whole_block import Quantize, WholeBlock
from qaudit.engine.tasks import Task
from qaudit.errors import MachineError, not_written
from qaudit.items.tokens import ItemText
from qaudit.planning.price import ROUND_TOKENS
from qaudit.types import Corpus, digest

REUSED = "went on from kept quantized weights"
"""The note of a measurement that reused the quantized weights of another."""

_WHOLE = "whole"


@dataclass(frozen=True, kw_only=True)
class StandIn(Scheme):
    """Another scheme by its name, its version and its remark.

    Code that records what a scheme does, or replaces a part of it, wraps it: its measurements then
    have the identity of the scheme itself.
    """

    inner: Scheme

    def __post_init__(self) -> None:
        for name in ("name", "version", "kv"):
            object.__setattr__(self, name, getattr(self.inner, name))

    def quantize(self, linears: Linears) -> Quantized:
        return self.made(linears, self.inner.quantize(linears))

    def train(self, block: WholeBlock) -> Quantize:
        quantize = self.inner.train(block)
        return lambda linears: self.made(linears, quantize(linears))

    def made(self, linears: Linears, quantized: Quantized) -> Quantized:
        raise NotImplementedError


for _name in (
    "short", "spec", "remark", "calibrates", "class_at", "compares_modules", "experts_see_all",
    "rotates_outputs", "rotates_heads", "cache_clip",
):  # fmt: skip
    setattr(StandIn, _name, property(attrgetter(f"inner.{_name}")))


@dataclass(frozen=True, kw_only=True)
class _InFiles(StandIn):
    """A scheme whose groups are in files."""

    folder: Path
    seen: Counter[str] = field(default_factory=Counter, compare=False)

    def next_file(self, linears: Linears) -> Path:
        """Return the file of a group; called once for each group in the order of the blocks."""
        names = digest(list(linears.weights))[:16]
        self.seen[names] += 1
        return self.folder / f"{names}-{self.seen[names] - 1}.safetensors"


@dataclass(frozen=True, kw_only=True)
class Storing(_InFiles):
    """Quantize as the scheme does, and write the result."""

    left_out: list[str] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "calibration", self.inner.calibration)

    def made(self, linears: Linears, quantized: Quantized) -> Quantized:
        if quantized.forwards or quantized.inputs:
            self.left_out.extend(linears.weights)
        else:
            self._write(quantized, self.next_file(linears))
        return quantized

    def _write(self, quantized: Quantized, path: Path) -> None:
        tensors = {name: w.detach().cpu().contiguous() for name, w in quantized.weights.items()}
        about = {"bits": quantized.bits, "notes": list(quantized.notes)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, path, metadata={"about": json.dumps(about)})
        except OSError as error:
            raise not_written(path, error) from error
        except SafetensorError as error:  # raised for a full disk
            raise MachineError(
                f"`{path}` cannot be written: {error}", hint="free some space on this disk"
            ) from error

    def finish(self) -> None:
        if self.seen and not self.left_out:
            (self.folder / _WHOLE).write_text(str(sum(self.seen.values())), encoding="ascii")


@dataclass(frozen=True, kw_only=True)
class Restoring(_InFiles):
    """Read what was written before, without calibration."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "calibration", Calibration.NONE)

    def quantize(self, linears: Linears) -> Quantized:
        path = self.next_file(linears)
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["about"])
                weights = {
                    name: file.get_tensor(name).to(weight.device)
                    for name, weight in linears.weights.items()
                }
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise MachineError(
                f"the quantized weights in `{path}` cannot be read: {error}",
                hint=f"remove `{self.folder}` and run the same command again",
            ) from error
        return Quantized(weights, about["bits"], (*about["notes"], REUSED))


def is_whole(folder: Path) -> bool:
    """Return whether all quantized weights of a model are in a folder."""
    try:
        count = int((folder / _WHOLE).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return False
    return count == len(list(folder.glob("*.safetensors")))


def remove(folder: Path) -> None:
    with suppress(OSError):
        shutil.rmtree(folder)


def in_rounds(corpus: Corpus, *, trees: bool) -> tuple[Corpus, ...]:
    """Return rounds of whole tasks, by what a model with or without trees feeds."""
    tokens = ItemText(corpus.items, corpus.item_windows).task_tokens(trees=trees)
    rounds: list[list[str]] = [[]]
    size = 0
    for name, own in tokens.items():
        if rounds[-1] and size + own > ROUND_TOKENS:
            rounds.append([])
            size = 0
        rounds[-1].append(name)
        size += own
    corpora = [corpus.of_tasks(names) for names in rounds]
    return (corpora[0], *(each.without_evaluation() for each in corpora[1:]))


@dataclass(frozen=True)
class StoredWeights:
    """What the schemes of a task make of the weights, in a folder between rounds."""

    folder: Path
    keys: Mapping[str, str]  # by canonical form

    def used_by(self, task: Task, *, read: bool, write: bool) -> Task:
        """Return the task with schemes that read what is stored, or write it for later rounds."""
        schemes = tuple(self._used_by(scheme, read=read, write=write) for scheme in task.schemes)
        return replace(task, schemes=schemes)

    def _used_by(self, scheme: Scheme, *, read: bool, write: bool) -> Scheme:
        if scheme.calibration is Calibration.NONE:
            return scheme
        if read and is_whole(folder := self._folder(scheme)):
            return Restoring(inner=scheme, folder=folder)
        return Storing(inner=scheme, folder=self._folder(scheme)) if write else scheme

    def _folder(self, scheme: Scheme) -> Path:
        return self.folder / self.keys[scheme.spec][:32]

    def remove(self, task: Task) -> None:
        """Remove what the schemes of a task stored."""
        for scheme in task.schemes:
            remove(self._folder(scheme))
        with suppress(OSError):  # other processes may store theirs
            self.folder.rmdir()


def finish(task: Task) -> None:
    for scheme in task.schemes:
        if isinstance(scheme, Storing):
            scheme.finish()
