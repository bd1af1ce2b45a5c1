"""What is measured, and what it is known by: a subject, its text, the schemes, and the machine.

The identity of a measurement is settled from the hashes of the weights and from the
configuration, so that what is on disk already is found before anything is loaded or fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from qaudit.checkpoints.places import folder_of
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.scheme import Scheme
from qaudit.downloads.running_sum import SummedWeights
from qaudit.engine.batches import TOKENS_PER_BATCH
from qaudit.engine.machine import libraries
from qaudit.errors import SourceError
from qaudit.model.remote import code_sha256, is_remote
from qaudit.planning.repeats import calibrated
from qaudit.saved.results import Filed, Identity, ResultStore, sha256_of
from qaudit.types import FULL_PRECISION, Checkpoint, Corpus, Subject, digest

NUMERICS = 1
"""Raised whenever the engine's arithmetic changes a published number."""

FLOOR = "floor"
"""The folder beside other evidence of what was measured again in another order."""


@dataclass(frozen=True)
class Machine:
    """Where and how precisely to compute, and what may be spilled where."""

    device: torch.device
    dtype: torch.dtype
    stream_limit_nbytes: int
    device_stream_limit_nbytes: int = 0
    allow_pickle: bool = False
    self_check: bool = False
    cross_check: int = 0
    trust_remote_code: bool = False


@dataclass(frozen=True, eq=False)
class Task:
    """One subject, the text it is measured on, and the schemes that apply."""

    subject: Subject
    corpus: Corpus
    schemes: tuple[Scheme, ...]
    folder: Callable[[Checkpoint], Path] = folder_of  # where weights lie; equal ones share a place
    merged: SummedWeights | None = None  # a soup whose members do not lie there any more
    full: bool = True  # measured in full precision too
    further: tuple[Corpus, ...] = ()  # the same text, with other draws of calibration text
    shows_floor: bool = False  # measured once more, with the same sums formed in another order
    reordered: bool = False  # this is that measurement

    @property
    def asked(self) -> dict[str, Scheme | None]:
        """What is measured in a pass, by its canonical form; full precision (None) first."""
        full = {FULL_PRECISION: None} if self.full else {}
        return {**full, **{scheme.spec: scheme for scheme in self.schemes}}

    @property
    def passes(self) -> tuple[Task, ...]:
        """One task for each pass: only what calibrates comes out otherwise in the later ones."""
        drawn = calibrated(self.schemes)
        first = replace(self, further=(), shows_floor=False)
        if not drawn:
            return (first,)
        again = replace(first, schemes=drawn, full=False)
        draws = [replace(again, corpus=corpus) for corpus in self.further]
        floor = [replace(again, full=True, reordered=True)] if self.shows_floor else []
        return (first, *draws, *floor)

    @property
    def remark(self) -> str:
        """Say which pass this is, for those who watch."""
        if self.reordered:
            return ", in another order"
        seed = self.corpus.protocol.calibration_seed
        return "" if self.full else f", calibration seed {seed}"

    def identity(self, scheme: Scheme | None, machine: Machine) -> Identity:
        """Return everything that changes the numbers of this subject under `scheme` (None: fp)."""
        return Identity(
            subject=self.subject.content,
            model=_model_sha256(folder_of(self.subject.first)),
            scheme=scheme.spec if scheme else FULL_PRECISION,
            scheme_version=scheme.version if scheme else 0,
            corpus=self.corpus.sha256,
            geometry=f"context={self.corpus.protocol.context},batch={TOKENS_PER_BATCH}"
            + (",reordered" if self.reordered else ""),
            checks=f"self={machine.self_check},cross={machine.cross_check}",
            dtype=str(machine.dtype),
            device=machine.device.type,
            numerics=NUMERICS,
            libraries=digest(libraries()),
        )


def _model_sha256(folder: Path) -> str:
    """Identify what makes weights a model: its config, and its code where that is run."""
    config = sha256_of(folder / "config.json")
    return digest([config, code_sha256(folder)]) if is_remote(folder) else config


Slot = tuple[int, str]
"""A measurement's place in a task: the number of its pass, and the canonical form."""


@dataclass(frozen=True, eq=False)
class Standing:
    """Which measurements of a task are on disk, and under which keys all of them belong."""

    task: Task
    keys: Mapping[Slot, str]  # pass by pass, `fp` first
    filed: Mapping[Slot, Filed]

    @property
    def complete(self) -> bool:
        """Say that nothing has to be measured, and so no weight has to be read."""
        return len(self.filed) == len(self.keys)

    @property
    def measured(self) -> tuple[Filed, ...]:
        """The measurements of every draw, in order; of a floor there are none among them."""
        floor = {k for k, one in enumerate(self.task.passes) if one.reordered}
        return tuple(self.filed[slot] for slot in self.keys if slot[0] not in floor)

    @property
    def floor(self) -> dict[str, tuple[Filed, Filed]]:
        """By canonical form: what was measured, and the same with its sums in another order."""
        return {
            spec: (self.filed[0, spec], self.filed[number, spec])
            for number, one in enumerate(self.task.passes)
            for spec in one.asked
            if one.reordered and (number, spec) in self.filed and (0, spec) in self.filed
        }


def look_up(task: Task, machine: Machine, store: ResultStore) -> Standing:
    """Find what is on disk of a task; only the hashes of its weights and its config are read."""
    _must_be_known(task, machine)
    keys: dict[Slot, str] = {}
    found: dict[Slot, Filed] = {}
    for number, one in enumerate(task.passes):
        for spec, scheme in one.asked.items():
            keys[number, spec] = key = one.identity(scheme, machine).key
            filed = shelf_of(one, store).find(task.subject.label, short_of(scheme), key)
            if filed is not None:
                found[number, spec] = filed
    return Standing(task, keys, found)


def short_of(scheme: Scheme | None) -> str:
    """Return the display name of a scheme; of none, that of full precision."""
    return scheme.short if scheme else FULL_PRECISION


def shelf_of(task: Task, store: ResultStore) -> ResultStore:
    """Return where results of a pass lie: a floor's are no measurements of a subject."""
    return store.within(FLOOR) if task.reordered else store


def _must_be_known(task: Task, machine: Machine) -> None:
    """Refuse a subject without a configuration, or with weights that nothing identifies."""
    for checkpoint, _ in task.subject.members:
        folder = folder_of(checkpoint)
        if not (folder / "config.json").is_file():
            raise SourceError(
                f"no `config.json` in `{folder}`",
                hint="a checkpoint folder has one beside its weights",
            )
    for checkpoint, _ in task.subject.members:
        if not checkpoint.files:
            if checkpoint.commit is None:  # what is wrong there is said best by whoever opens it
                WeightFolder(folder_of(checkpoint), allow_pickle=machine.allow_pickle)
            raise SourceError(
                f"the weights of `{checkpoint.label}` could not be read when the audit was planned",
                hint="run the same command again",
            )
