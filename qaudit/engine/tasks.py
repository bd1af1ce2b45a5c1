"""A pass with its text: what is measured, and the keys that its results are stored under.

A key holds everything that changes the numbers: the hashes of the weights, the configuration,
the text, the scheme, the machine's arithmetic. It needs no weights, so that results on disk are
found before anything is loaded or downloaded.

The machine of an audit: its device, its libraries, and the memory the audit used.
"""

from __future__ import annotations

import platform
import re
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from qaudit.checkpoints.adapters import open_checkpoint
from qaudit.checkpoints.stamps import folder_of, own_folder, refuse_changed_settings
from qaudit.core.mixture import NO_TABLE, Mixture
from qaudit.core.registry import parse_schemes, schemes
from qaudit.core.scheme import Scheme
from qaudit.engine.batches import TOKENS_PER_BATCH
from qaudit.engine.kept_weights import WeightKeeper
from qaudit.errors import MachineError, SourceError
from qaudit.model.config import code_sha256, is_remote, must_have_config
from qaudit.model.groups import ExpertOptions
from qaudit.model.proven import pad_until
from qaudit.planning.pin import NUMERICS, libraries
from qaudit.saved.exports import TABLES
from qaudit.saved.results import Identity, ResultFile, ResultStore, sha256_of, slug_of, with_tasks
from qaudit.types import FULL_PRECISION, Checkpoint, Corpus, Evidence, Pass, Subject, digest


def open_device(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Return a planned device and dtype as torch has them; a GPU must be there.

    `cuda` is the device with most free memory.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise MachineError(
            "this torch sees no CUDA device", hint="use `--device cpu`, or install a CUDA build"
        )
    if device == "mps" and not torch.backends.mps.is_available():
        raise MachineError("this torch sees no MPS device", hint="use `--device cpu`")
    opened = torch.device(device)
    if opened.type == "cuda":
        index, count = opened.index, torch.cuda.device_count()
        if index is None:  # the one that this process uses already, else the one most free
            used = [torch.cuda.memory_reserved(k) > 0 for k in range(count)]
            index = max(range(count), key=lambda k: (used[k], torch.cuda.mem_get_info(k)[0]))
        if index >= count:
            raise MachineError(
                f"there is no `{opened}`: this torch sees {count} CUDA devices",
                hint=f"use `--device cuda`, or a number up to {count - 1}",
            )
        opened = torch.device("cuda", index)
    return opened, getattr(torch, dtype)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def environment(device: torch.device) -> dict[str, Any]:
    processor = platform.processor() or platform.machine()
    with suppress(OSError):
        names = re.search(r"^model name.*?:(.*)$", Path("/proc/cpuinfo").read_text("ascii"), re.M)
        processor = names[1].strip() if names else processor
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor,
        "cores": psutil.cpu_count(),
        "memory_nbytes": psutil.virtual_memory().total,
        "libraries": libraries(schemes().built_in.values()),
    }


def resident_nbytes() -> int:
    return int(psutil.Process().memory_info().rss)


def peak_nbytes(device: torch.device) -> int:
    """Return the most memory this process ever held, on the GPU if it computes there."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with suppress(OSError):  # where `getrusage` of Linux starts from the peak of the parent process
        status = Path("/proc/self/status").read_text("ascii")
        if peak := re.search(r"^VmHWM:\s*(\d+)", status, re.M):
            return 1024 * int(peak[1])
    nbytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(nbytes if sys.platform == "darwin" else nbytes * 1024)


ITEMS = 4
"""Raised whenever another way of feeding items changes their losses."""

TASKS = "tasks"
"""The folder in `evidence/` with a folder for each task."""

FLOOR = "floor"
"""The folder in `evidence/` for results of perturbed passes."""


@dataclass(frozen=True)
class Machine:
    """Where and how precisely to compute, and how much memory hidden states may take."""

    device: torch.device
    dtype: torch.dtype
    stream_limit_nbytes: int
    device_stream_limit_nbytes: int = 0
    allow_pickle: bool = False
    trust_remote_code: bool = False
    keeps_weights: tuple[str, ...] = ()  # of schemes by canonical form (`kept_weights.py`)
    column_loop: str = "plain"  # how GPTQ's columns are rounded (`qaudit/core/column_loops.py`)
    experts: ExpertOptions = field(default_factory=ExpertOptions)


@dataclass(frozen=True, eq=False)
class Task:
    """A pass with its text, its schemes as values, and where its weights are."""

    pass_: Pass
    corpus: Corpus
    schemes: tuple[Scheme, ...]
    folder: Callable[[Checkpoint], Path] = own_folder  # equal weights may be elsewhere
    compared: bool = True  # whether the divergence from full precision is measured
    failed: dict[str, SourceError] = field(default_factory=dict)  # by display name; `measure` fills
    resume: tuple[Path, str] | None = None  # where its pass is kept, and what decides its results
    keeper: WeightKeeper | None = None  # writes the weights that its schemes make
    tables: Mapping[str, Path] = field(default_factory=dict)  # files of mixtures' bits, by spec

    @classmethod
    def of(cls, planned: Pass, corpus: Corpus) -> Task:
        """Return a planned pass with its draw of the calibration text."""
        draw = corpus.draws[planned.draw]
        if planned.is_candidate:
            draw = draw.of_search()
        elif planned.draw or planned.perturbed:
            # Items are marked, and rollouts scored, on the first draw alone.
            draw = draw.of_documents()
        schemes = parse_schemes(planned.schemes) if planned.schemes else ()
        return cls(planned, draw, schemes, compared=not planned.is_quantized)

    @classmethod
    def unplanned(
        cls, subject: Subject, corpus: Corpus, schemes: Sequence[Scheme], **fields: Any
    ) -> Task:
        """Return a pass that no plan has, as of a search."""
        specs = tuple(scheme.spec for scheme in schemes)
        return cls(Pass(subject, specs, **fields), corpus, tuple(schemes))

    def changed(self, **fields: Any) -> Task:
        return replace(self, pass_=replace(self.pass_, **fields))

    @property
    def subject(self) -> Subject:
        return self.pass_.subject

    @property
    def perturbed(self) -> bool:
        return self.pass_.perturbed

    @property
    def pad_until(self) -> int:
        """Return up to how many tokens all models of the pass read padded windows as alone."""
        members = [folder_of(checkpoint) for checkpoint, _ in self.subject.members]
        return pad_until([*members, *map(self.folder, self.pass_.beside)])

    @property
    def streams(self) -> dict[str, Scheme | None]:
        """What is evaluated, by canonical form; full precision (None) first."""
        full = {FULL_PRECISION: None} if self.pass_.full_precision else {}
        return {**full, **{scheme.spec: scheme for scheme in self.schemes}}

    @property
    def remark(self) -> str:
        if self.perturbed:
            return ", rounded otherwise"
        if self.pass_.full_precision or not self.compared:
            return ""
        return f", calibration seed {self.corpus.protocol.calibration_seed}"

    def with_tables(self, evidence: Path) -> Task:
        """Return the task with the files of its mixtures: of a subject, a scheme and a text."""
        windows = [window.tokens.tolist() for window in self.corpus.calibration]
        tables = {}
        for scheme in self.schemes:
            if not isinstance(scheme, Mixture):
                continue
            key = digest([self.subject.content, scheme.spec, scheme.version, windows])
            name = slug_of(f"{self.subject.label}--{scheme.short}") + f"--{key[:12]}"
            name = scheme.table if scheme.table != NO_TABLE else name
            tables[scheme.spec] = evidence / TABLES / f"{name}.json"
        return replace(self, tables=tables)

    def identity(
        self, scheme: Scheme | None, machine: Machine, task: str | None = None
    ) -> Identity:
        """Return everything that changes the numbers of this subject under `scheme` (None: fp)."""
        protocol, corpus = self.corpus.protocol, self.corpus.sha256
        geometry = f"context={protocol.context},batch={TOKENS_PER_BATCH}"
        if task is not None:
            corpus, geometry = self.corpus.items_sha256[task], f"{geometry},items={ITEMS}"
        geometry += ",perturbed=2" if self.perturbed else ""
        geometry += "" if self.compared else ",not compared"
        geometry += machine.experts.text if scheme else ""
        if scheme is not None and scheme.rounds_columns and machine.column_loop != "plain":
            geometry += f",columns={machine.column_loop}"
        if self.pass_.reference is not None and task is None:  # items have none
            geometry += f",reference={self.pass_.reference.content}"
        folder = folder_of(self.subject.first)
        model = sha256_of(folder / "config.json")
        if is_remote(folder):  # its own code is run
            model = digest([model, code_sha256(folder)])
        return Identity(
            subject=self.subject.content,
            model=model,
            scheme=scheme.spec if scheme else FULL_PRECISION,
            scheme_version=scheme.version if scheme else 0,
            corpus=corpus,
            geometry=geometry,
            dtype=str(machine.dtype),
            device=machine.device.type,
            numerics=NUMERICS,
            libraries=digest(libraries([scheme] if scheme else (), [self.subject.merge])),
        )


Part = tuple[str, str | None]
"""A scheme by its canonical form, and a task; None: its documents."""


@dataclass(frozen=True, eq=False)
class StoredResults:
    """The identities of a task's results, and those of them that are on disk."""

    identities: Mapping[Part, Identity]  # `fp` first
    files: Mapping[Part, ResultFile]

    @property
    def keys(self) -> dict[str, str]:
        """The keys of results on documents, by canonical form."""
        return {spec: own.key for (spec, task), own in self.identities.items() if task is None}

    @property
    def missing(self) -> list[Part]:
        return [part for part in self.identities if part not in self.files]

    @property
    def is_complete(self) -> bool:
        """Return whether every result is on disk, so that no weights are needed."""
        return not self.missing

    @property
    def results(self) -> tuple[ResultFile, ...]:
        tasks = list(dict.fromkeys(task for _, task in self.identities if task is not None))
        return tuple(
            with_tasks(
                self.files[spec, None],
                tuple(self.files[spec, task] for task in tasks if (spec, task) in self.files),
            )
            for spec in self.keys
            if (spec, None) in self.files
        )


def look_up(task: Task, machine: Machine, store: ResultStore) -> StoredResults:
    """Find a task's results on disk, grouped by its strata; only its configuration is read."""
    members = [checkpoint for checkpoint, _ in task.subject.members]
    for checkpoint in (*members, *task.pass_.beside):
        refuse_changed_settings(checkpoint)
    for checkpoint in members:
        must_have_config(folder_of(checkpoint))
    for checkpoint in members:
        if not checkpoint.files:  # nothing identifies its weights
            if checkpoint.commit is None:  # opening it raises the error that names the file
                open_checkpoint(checkpoint, allow_pickle=machine.allow_pickle)
            raise SourceError(
                f"the weights of `{checkpoint.label}` could not be read when the audit was planned",
                hint="run the same command again",
            )
    identities: dict[Part, Identity] = {}
    files: dict[Part, ResultFile] = {}
    for spec, scheme in task.streams.items():
        for name in (None, *task.corpus.tasks):
            part, results = (spec, name), folder_for(task, store, name)
            identities[part] = identity = task.identity(scheme, machine, name)
            result = results.find(task.subject.label, short_of(scheme), identity.key)
            if result is not None and name is None:
                evidence = _regrouped(result.measurement.evidence, task.corpus)
                if evidence is not result.measurement.evidence:
                    again = replace(result.measurement, evidence=evidence)
                    result = results.write(again, identity.key, identity)
            if result is not None:
                files[part] = result
    return StoredResults(identities, files)


def _regrouped(evidence: Evidence, corpus: Corpus) -> Evidence:
    """Return evidence with the strata and marks of a text, which change none of its numbers."""
    rollouts, text = evidence.rollouts, corpus.rollouts
    if rollouts is not None and text is not None and rollouts.sha256 != text.sha256:
        rollouts = replace(rollouts, sha256=text.sha256, mark=text.mark)
    if evidence.strata == corpus.strata and rollouts is evidence.rollouts:
        return evidence
    return replace(evidence, strata=corpus.strata, rollouts=rollouts)


def short_of(scheme: Scheme | None) -> str:
    """Return the display name of a scheme; of none, that of full precision."""
    return scheme.short if scheme else FULL_PRECISION


def folder_for(task: Task, store: ResultStore, name: str | None = None) -> ResultStore:
    """Return where the results of a pass are stored, or those of one task of items."""
    folder = store.within(FLOOR) if task.perturbed else store  # these are not a subject's
    return folder if name is None else folder.within(f"{TASKS}/{slug_of(name)}")
