"""From a plan to an audit: every subject measured, what failed skipped, everything judged.

One subject's failure does not end the audit: it is skipped with its reason. What was measured
is on disk the moment it is measured, so the same command goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch

from qaudit import __version__
from qaudit.core.scheme import Calibration, Linears, Scheme
from qaudit.engine.machine import choose, environment, peak_nbytes, resident_nbytes
from qaudit.engine.measure import Machine, Task, measure
from qaudit.engine.plan import default_stream_limit, schemes_of, with_machine
from qaudit.engine.results import Filed, ResultStore, sha256_of
from qaudit.engine.texts import read_corpus
from qaudit.errors import MachineError, SourceError
from qaudit.judge import EvidenceFiles, judge
from qaudit.types import Audit, Corpus, Plan, Skipped


class Watch(Protocol):
    """Who is told how far an audit has come; the command line draws bars from it."""

    def subject(self, done: int, total: int, label: str) -> None:
        """Say that a subject begins, or with `done == total` that all are over."""

    def block(self, done: int, total: int, what: str) -> None:
        """Say which block a subject is in, and what is being done there."""


@dataclass(frozen=True)
class Options:
    """How to run what was planned: nothing here changes a number."""

    out: Path
    stream_limit_nbytes: int | None = None
    allow_pickle: bool = False
    self_check: bool = False
    cross_check: int = 0


def run(plan: Plan, options: Options, watch: Watch) -> Audit:
    """Measure everything planned and judge it."""
    machine = _machine(plan, options)
    plan = with_machine(plan, str(machine.device), str(machine.dtype).removeprefix("torch."))
    began, corpus = datetime.now(UTC), read_corpus(plan)
    _load_libraries(schemes_of(plan))
    baseline = resident_nbytes()
    filed, failed = _measure_all(plan, corpus, machine, options.out, watch)
    if not filed:
        raise _nothing(failed)
    measured = {f.measurement.subject for f in filed}
    subjects = tuple(s for s in plan.subjects if s.label in measured)
    judgement = judge(
        subjects,
        [f.measurement for f in filed],
        _evidence_files(filed, options.out),
        confidence=plan.recipe.confidence,
    )
    return Audit(
        plan=plan,
        environment=_environment(machine, began, baseline),
        protocol=_protocol(corpus),
        subjects=subjects,
        skipped=tuple(Skipped(label, None, e.message) for label, e in failed.items()),
        qaudit=__version__,
        **vars(judgement),
    )


def _machine(plan: Plan, options: Options) -> Machine:
    device, dtype = choose(plan.recipe.device, plan.recipe.dtype)
    limit = options.stream_limit_nbytes
    return Machine(
        device=device,
        dtype=dtype,
        stream_limit_nbytes=default_stream_limit() if limit is None else limit,
        device_stream_limit_nbytes=_left_on(device, plan.nbytes_memory_fixed),
        allow_pickle=options.allow_pickle,
        self_check=options.self_check,
        cross_check=options.cross_check,
    )


def _left_on(device: torch.device, fixed_nbytes: int) -> int:
    """Return how much of a GPU streams may take: nine tenths of what the blocks leave free."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, int(0.9 * free) - fixed_nbytes)


def _load_libraries(schemes: Sequence[Scheme]) -> None:
    """Let schemes import what they compute with, so that it is not taken for an audit's memory."""
    linears = Linears({"weight": torch.ones(2, 64)})
    for scheme in schemes:
        if scheme.calibration is Calibration.NONE:
            scheme.quantize(linears)


def _measure_all(
    plan: Plan, corpus: Corpus, machine: Machine, out: Path, watch: Watch
) -> tuple[list[Filed], dict[str, SourceError]]:
    """Measure subject after subject; what fails for its own reasons is skipped."""
    store, schemes = ResultStore(out / "evidence"), schemes_of(plan)
    filed: list[Filed] = []
    failed: dict[str, SourceError] = {}
    for done, subject in enumerate(plan.subjects):
        watch.subject(done, len(plan.subjects), subject.label)
        try:
            filed += measure(Task(subject, corpus, schemes), machine, store, watch.block)
        except SourceError as error:
            failed[subject.label] = error
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            raise MachineError(
                f"out of memory while measuring `{subject.label}`; what was measured is kept",
                hint="lower `--stream-memory`, `--calibration-documents` or `--context`",
            ) from error
    watch.subject(len(plan.subjects), len(plan.subjects), "")
    return filed, failed


def _is_out_of_memory(error: Exception) -> bool:
    """Tell an allocation that failed: on a CPU, torch has no type for it."""
    named = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return named or "can't allocate memory" in str(error)


def _nothing(failed: Mapping[str, SourceError]) -> SourceError:
    """Make one error of every subject's; one alone speaks for itself."""
    first = next(iter(failed.values()))
    if len(failed) == 1:
        return first
    reasons = "; ".join(f"`{label}`: {error.message}" for label, error in failed.items())
    return SourceError(f"nothing could be measured: {reasons}", hint=first.hint)


def _evidence_files(filed: Sequence[Filed], out: Path) -> EvidenceFiles:
    return {
        (f.measurement.subject, f.measurement.spec, f.measurement.calibration_seed): (
            f.path.relative_to(out).as_posix(),
            sha256_of(f.path),
        )
        for f in filed
    }


def _environment(machine: Machine, began: datetime, baseline: int) -> dict[str, Any]:
    return {
        **environment(machine.device),
        "qaudit": __version__,
        "began": began.isoformat(timespec="seconds"),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "memory_baseline_nbytes": baseline,
        "memory_peak_nbytes": peak_nbytes(machine.device),
    }


def _protocol(corpus: Corpus) -> dict[str, Any]:
    return {
        **asdict(corpus.protocol),
        "evaluation_documents": len(corpus.documents),
        "evaluation_tokens": sum(w.scored for w in corpus.evaluation),
        "calibration_windows": len(corpus.calibration),
        "calibration_tokens": sum(len(w.tokens) for w in corpus.calibration),
        "choices": len(corpus.choices),
        "corpus_sha256": corpus.sha256,
        "sources": dict(corpus.sources),
        "notes": list(corpus.notes),
    }
