"""Units measured in this process: one part of a plan, or all of it.

What must be there before the first weights are read comes first. The texts, without which nothing
can be measured, are downloaded before anything else; then every subject's configuration and
tokenizer, which identify the results on disk; weights only for what is left.

The whole plan is known and the whole text is cut, whatever the part: context, draws, keys and the
checkpoint before depend on all subjects. A record is written when its subject is done, so that a
part may be stopped at any moment and run again anywhere. A scan in one process is part 0 of 1.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from qaudit.checkpoints.stamps import refuse_changed_settings
from qaudit.core.column_loops import FUSED, obstacle
from qaudit.core.linears import Linears
from qaudit.core.registry import parse_schemes
from qaudit.core.scheme import Calibration, Shipped
from qaudit.engine.tasks import (
    Machine,
    Task,
    device_name,
    environment,
    open_device,
    peak_nbytes,
    resident_nbytes,
)
from qaudit.errors import OtherIdentityError, SourceError, UsageError
from qaudit.executors.folder import parts_of, pinned
from qaudit.executors.measuring import Measuring
from qaudit.executors.records import ATTEMPTS, Executor, PartLog, attempts, one_error, states_of
from qaudit.host import default_stream_limit
from qaudit.hub import Hub, open_hub
from qaudit.items.prepare import fetch_items
from qaudit.model.device import free_nbytes
from qaudit.model.groups import ExpertOptions
from qaudit.planning.pin import refuse_other_libraries
from qaudit.planning.prepare import Prepared
from qaudit.planning.price import kept_specs, planned_rounds, with_draws, with_shipped
from qaudit.planning.resolve import reads_hub
from qaudit.report.folder import must_take_files
from qaudit.saved import codec
from qaudit.saved.parts import (
    DIRECTORY,
    FIRST,
    FOLDER,
    UNITS,
    DiagnosticRows,
    Failure,
    ResultDocument,
    TaskFile,
    UnitDocument,
    one_writer,
    read_run,
    unit_path,
)
from qaudit.saved.results import ResultStore, UnitOutcome, sha256_of
from qaudit.settings import RunOptions
from qaudit.text.texts import fetch_texts, read_corpus
from qaudit.types import CHOICES, SILENT, Corpus, Plan, Run, Subject, Watch, WorkUnit, units_of
from qaudit.version import __version__


@dataclass(frozen=True, eq=False)
class Ready:
    """The text as tokens, the machine, and the subjects whose small files are there."""

    corpus: Corpus
    machine: Machine
    subjects: tuple[Subject, ...]
    refused: Mapping[str, SourceError]  # why the others are missing


def make_ready(plan: Plan, options: RunOptions, hub: Hub | None) -> Ready:
    """Download what is small, read the text, and load what schemes compute with."""
    refused = _download_small_files(plan, options, hub)
    machine = _machine(plan, options)
    corpus = read_text(plan, options, hub, refused)
    # Schemes import their libraries, so that these do not count as an audit's memory.
    linears = Linears({"weight": torch.ones(2, 64)})
    for scheme in parse_schemes(plan.specs):
        if scheme.calibration is Calibration.NONE and not isinstance(scheme, Shipped):
            scheme.quantize(linears)
    readable = tuple(s for s in plan.subjects if s.label not in refused)
    return Ready(corpus, machine, readable, refused)


def read_text(
    plan: Plan,
    options: RunOptions,
    hub: Hub | None,
    refused: Mapping[str, SourceError] | None = None,
) -> Corpus:
    """Read the text of a plan as tokens; small files are downloaded first unless they were."""
    if refused is None:
        refused = _download_small_files(plan, options, hub)
    readable = tuple(s for s in plan.subjects if s.label not in refused)
    if not readable:
        raise one_error(refused)
    recipe = with_draws(plan.recipe, parse_schemes(plan.specs))
    measured = replace(plan, subjects=readable, recipe=recipe)
    return read_corpus(
        measured,
        hub=hub,
        trust_remote_code=options.trust_remote_code,
        failed=fetch_items(hub, plan.recipe, plan.texts) if hub else {},
    )


def protocol_of(corpus: Corpus) -> dict[str, Any]:
    """Return how the text was cut, and what came of it, as an audit records it."""
    return {
        **asdict(corpus.protocol),
        **({"calibration_draws": len(corpus.draws)} if corpus.further else {}),
        "evaluation_documents": len(corpus.documents),
        "evaluation_documents_available": corpus.available,
        "evaluation_tokens": sum(w.scored for w in corpus.evaluation),
        "calibration_windows": len(corpus.calibration),
        "calibration_tokens": sum(len(w.tokens) for w in corpus.calibration),
        "choices": sum(item.task == CHOICES for item in corpus.items),
        "tasks": {
            task: sum(item.task == task for item in corpus.items)
            for task in corpus.tasks
            if task != CHOICES
        },
        "corpus_sha256": corpus.sha256,
        **({"documents_sha256": corpus.of_documents().sha256} if corpus.rollouts else {}),
        **({"search_sha256": corpus.of_search().sha256} if corpus.search else {}),
        "has_chat_template": corpus.has_chat_template,
        "sources": dict(corpus.sources),
        "notes": list(corpus.notes),
    }


def _download_small_files(
    plan: Plan, options: RunOptions, hub: Hub | None
) -> dict[str, SourceError]:
    """Download texts, configurations and tokenizers; return why subjects are missing theirs.

    A text that cannot be downloaded ends the scan. Small files must be those of the plan.
    """
    refused: dict[str, SourceError] = {}
    if hub is not None:
        fetch_texts(hub.fetcher, plan.recipe, plan.texts)
    for subject in (with_shipped(planned, plan.shipped) for planned in plan.subjects):
        for checkpoint, _ in subject.members:
            try:
                for source in checkpoint.sources:
                    if hub is not None and source.commit is not None:
                        hub.fetcher.settings(source, code=options.trust_remote_code)
                refuse_changed_settings(checkpoint)
            except SourceError as error:
                refused.setdefault(subject.label, error)
    return refused


def _machine(plan: Plan, options: RunOptions) -> Machine:
    device, dtype = open_device(plan.device, plan.dtype)
    limit = options.stream_memory
    missing = obstacle(torch.empty(0, device=device)) if plan.column_loop == FUSED else None
    if missing is not None:
        raise OtherIdentityError(
            f"the plan rounds GPTQ's columns by the fused kernel, and here {missing}",
            hint="run the part in the environment of the plan, or plan again in this one",
        )
    return Machine(
        device=device,
        dtype=dtype,
        stream_limit_nbytes=default_stream_limit() if limit is None else limit,
        device_stream_limit_nbytes=_free_for_streams(device, plan.nbytes_memory_fixed, limit),
        allow_pickle=options.allow_pickle,
        trust_remote_code=options.trust_remote_code,
        keeps_weights=kept_specs(options.keep, parse_schemes(plan.specs)),
        column_loop=plan.column_loop,
        experts=ExpertOptions(replays=plan.recipe.routing == "reference"),
    )


def _free_for_streams(device: torch.device, fixed_nbytes: int, limit: int | None) -> int:
    """Return how much of a GPU hidden states may take: nine tenths of what blocks leave free."""
    if device.type != "cuda":
        return 0
    free = max(0, int(0.9 * free_nbytes(device)) - fixed_nbytes)
    return free if limit is None else min(free, limit)


SIZE, SEED = 1024, 20251012


def refuse_bad_device(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a device that computes wrongly, before any weight is read.

    Entries are -1, 0 and 1: every partial sum is an integer that float32 holds exactly, whatever
    the order or the kernels, so that every sound device gives the same bits, rounded once.
    """
    for kind in dict.fromkeys((torch.float32, dtype)):
        if wrong := wrong_products(device, kind):
            raise OtherIdentityError(
                f"the device `{device_name(device)}` computes wrongly: {wrong} of {SIZE * SIZE} "
                f"products in {str(kind).removeprefix('torch.')} are wrong",
                hint="run the part on another device; have this one checked",
            )


def wrong_products(device: torch.device, dtype: torch.dtype) -> int:
    """Return how many entries of a product differ from their integers, rounded once."""
    a_cpu, b_cpu, exact = _product(SIZE)
    a, b = (matrix.to(dtype).to(device) for matrix in (a_cpu, b_cpu))
    product = torch.matmul(a, b).cpu()
    return int((product != exact.float().to(dtype)).sum())


@cache
def _product(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two matrices and their product in double precision: below 2**53, so exact."""
    generator = torch.Generator().manual_seed(SEED)
    a, b = (torch.randint(-1, 2, (size, size), generator=generator) for _ in range(2))
    return a, b, torch.matmul(a.double(), b.double())


class PartExecutor(Executor):
    """Measures units in this process."""

    def __init__(
        self,
        run: Run,
        out: Path,
        ready: Ready,
        hub: Hub | None,
        watch: Watch = SILENT,
        *,
        name: str = "0-of-1",
        alone: bool = True,
    ) -> None:
        """Measure with what is ready; `alone`: no other process measures units of this plan."""
        super().__init__(run, out, watch)
        # A GPU of another kind than the first that measured here rounds otherwise.
        device, folder = ready.machine.device, out / FOLDER
        kind, kind_file = device_name(device), folder / f"{device.type}.kind"
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), kind_file.open("x", encoding="utf-8") as file:
            file.write(kind)
        first = kind_file.read_text(encoding="utf-8")
        if first not in (kind, ""):  # nothing: of a part that starts now
            raise OtherIdentityError(
                f"this device is `{kind}`, and `{out}` was begun on `{first}`, which rounds "
                "otherwise",
                hint=f"use `{first}` for all parts, or `{kind}` for all in another `--out`",
            )
        self._ready, self._name, self._alone = ready, name, alone
        self._units: dict[str, WorkUnit] = {}  # of the round, by label
        self._tried: set[str] = set()
        self.failed: list[str] = []
        attempts_of = None if alone else self._attempts_of
        self._log = PartLog(folder / f"{name}.jsonl", attempts_of, watch)
        self._hub, self._began = hub, datetime.now(UTC)
        self._baseline_nbytes = resident_nbytes()  # when all is loaded, before weights are read
        self._measuring = Measuring(
            run.plan,
            out if alone else folder / name,
            hub,
            ready.machine,
            self._log,
            ResultStore(out / "evidence"),
            () if alone else ready.subjects,
        )

    def await_units(self, number: int, units: Sequence[WorkUnit]) -> None:
        if self._alone and number == FIRST:  # weights that searches read, too, are fetched once
            units = units_of(tuple(chain(*planned_rounds(self.run.plan.passes))))
        units = [unit for unit in units if unit.content not in self._tried]
        if not units:
            return
        self._tried |= {unit.content for unit in units}
        self._units = {unit.label: unit for unit in units}
        with self._log:
            began = time.monotonic()
            refused = {unit.label: error for unit in units if (error := self._refused(unit))}
            for label, error in refused.items():
                self._write(UnitOutcome(label, error=error), began)
            tried = [unit for unit in units if unit.label not in refused]
            planned = {subject.label for subject in self.run.plan.subjects}
            plain = (u for u in units if not (u.passes[0].draw or u.passes[0].perturbed))
            began = time.monotonic()
            for outcome in self._measuring.visit(
                [Task.of(p, self._ready.corpus) for u in tried for p in u.passes],
                {unit.label for unit in plain if unit.label in planned},
            ):
                self._write(outcome, began)
                began = time.monotonic()

    def _refused(self, unit: WorkUnit) -> SourceError | None:
        """Return why a unit is not tried: it ended processes, or small files are missing."""
        count = 0 if self._alone else attempts(self._attempts_of(unit.label))
        if count < ATTEMPTS:
            return self._ready.refused.get(unit.label)
        hint = f"look into `{FOLDER}/{self._name}.log`, then run the part again"
        return SourceError(f"{count} processes ended while they measured it", hint=hint)

    def _attempts_of(self, label: str) -> Path:
        return unit_path(self.run, self._units[label], self.out).with_suffix(".attempts")

    def _write(self, outcome: UnitOutcome, began: float) -> None:
        def file(path: Path) -> dict[str, str]:
            return {"evidence": path.relative_to(self.out).as_posix(), "sha256": sha256_of(path)}

        unit, error = self._units[outcome.label], outcome.error
        path = unit_path(self.run, unit, self.out)
        document = UnitDocument(
            run=self.run.identity,
            unit=unit.content,
            label=unit.label,
            part=self._name,
            host=platform.node(),
            failed_tasks=dict(self._ready.corpus.failed_tasks),
            diagnostics=self._measuring.diagnoses.rows.get(unit.label, DiagnosticRows()),
            protocol=protocol_of(self._ready.corpus),
            environment=self._environment(),
            results=tuple(
                ResultDocument(
                    scheme=result.measurement.scheme,
                    spec=result.measurement.spec,
                    perturbed=result.perturbed,
                    tasks=tuple(
                        TaskFile(task=task, **file(place)) for task, place in result.task_paths
                    ),
                    **file(result.path),
                )
                for result in outcome.results
            ),
            search=outcome.search,
            findings=outcome.findings,
            error=None if error is None else Failure(error.message, error.hint),
            exit_code=2 if error is not None and error.code == UsageError.code else 4,
            failed_schemes={
                scheme: Failure(e.message, e.hint) for scheme, e in outcome.failed.items()
            },
        )
        codec.write(path, document)
        state = "failed" if error is not None else "measured"
        self._log.finished(unit.label, state, time.monotonic() - began, path)
        if error is not None:
            self.failed.append(unit.label)

    def _environment(self) -> dict[str, Any]:
        """Return what this process used and ran on so far."""
        device, hub = self._ready.machine.device, self._hub
        used: dict[str, Any] = {}
        if hub is not None:
            used = {
                "hub_calls": hub.client.calls,
                "hub_requests": hub.client.requests,
                "hub_nbytes_fetched": hub.fetcher.nbytes_fetched,
                "hub_nbytes_verified": hub.fetcher.nbytes_verified,
                "hub_seconds_waited": round(self._measuring.seconds_waited, 3),
            }
        return {
            **environment(device),
            "qaudit": __version__,
            "began": self._began.isoformat(timespec="seconds"),
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "memory_baseline_nbytes": self._baseline_nbytes,
            "memory_peak_nbytes": peak_nbytes(device),
            **used,
        }


def whole_plan(prepared: Prepared, watch: Watch = SILENT) -> PartExecutor:
    """Pin a plan and return this process as its only part."""
    must_take_files(prepared.out)
    with one_writer(prepared.out):
        prepared.write_plan()
    ready = make_ready(prepared.plan, prepared.options, prepared.hub)
    run = pinned(prepared, ready.corpus, torch.get_num_threads())
    return PartExecutor(run, prepared.out, ready, prepared.hub, watch)


def run_part(
    out: Path, number: int, count: int, options: RunOptions, watch: Watch = SILENT
) -> tuple[int, int, int]:
    """Measure what part `number` of `count` lacks, and what failed before, in all rounds so far.

    Returns how many units it has, how many it measured now, and how many it could not measure.
    """
    if not 0 <= number < count:
        raise UsageError(
            f"there is no part {number} of {count}",
            hint=f"parts are 0/{count} to {count - 1}/{count}",
        )
    out = out.absolute()
    run = read_run(out)
    with suppress(OSError, ValueError):  # relative paths of the plan begin there, if they exist
        os.chdir((out / FOLDER / DIRECTORY).read_text(encoding="utf-8"))
    states = states_of(run, out)
    parts = [parts_of(run, state.units, count) for state in states]
    units = [some[number] if number < len(some) else () for some in parts]
    missing, failed = (
        [
            [unit for unit in mine if unit in lacking]
            for mine, lacking in zip(units, every, strict=True)
        ]
        for every in ([state.missing for state in states], [state.failed for state in states])
    )
    batches = [some for some in (*missing, *failed) if some]  # what failed may end the process
    if not batches:
        return len(units[-1]), 0, 0
    refuse_other_libraries(run.pins)
    # The device and the text are checked before any weight is read.
    plan, pins = run.plan, run.pins
    (out / FOLDER / UNITS).mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(pins.threads)
    refuse_bad_device(*open_device(plan.device, plan.dtype))
    hub = open_hub(watch=watch) if reads_hub(plan) else None
    ready = make_ready(plan, replace(options, out=out), hub)
    if (ready.corpus.text_sha256, dict(ready.corpus.items_sha256)) != (
        pins.text_sha256,
        pins.items_sha256,
    ):
        raise OtherIdentityError(
            "the text is not that of the plan: its tokens have another hash",
            hint="give the part the same files, Python and tokenizer, or plan again",
        )
    if plan.traffic is not None:
        traffic = replace(plan.traffic, nbytes_disk_budget=options.disk_budget)
        run = replace(run, plan=replace(plan, traffic=traffic))
    name = f"{number}-of-{count}"
    part = PartExecutor(run, out, ready, hub, watch, name=name, alone=False)
    for some in batches:
        part.await_units(0, some)
    before = sum(map(len, (*missing[:-1], *failed[:-1])))
    measured = sum(map(len, batches)) - len(part.failed)
    return len(units[-1]) + before, measured, len(part.failed)
