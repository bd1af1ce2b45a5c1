"""From a plan to an audit: every subject measured, what failed skipped, everything judged.

One subject's failure does not end the audit: it is skipped with its reason. What was measured
is on disk the moment it is measured, so the same command goes on from there.

What is small comes first. The texts, without which nothing can be measured, are fetched before
anything else; then every subject's configuration and tokenizer, which tell what is measured
already; weights only for what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qaudit import __version__
from qaudit.checkpoints.places import own_cache
from qaudit.core.scheme import Calibration, Linears, Scheme
from qaudit.diagnostics.registry import parse_diagnostics, parts
from qaudit.downloads.record import RECORD_FILE
from qaudit.engine.draws import floor_of, tasks_of
from qaudit.engine.machine import environment, open_device, peak_nbytes, resident_nbytes
from qaudit.engine.rounds import Beside, Origin, Outcome, measure_all
from qaudit.engine.tasks import Machine, Task
from qaudit.errors import SourceError
from qaudit.judge import EvidenceFiles, Judgement, judge
from qaudit.judge.released import released_findings
from qaudit.judge.table import Table
from qaudit.planning.plan import default_stream_limit, schemes_of
from qaudit.planning.prepare import Prepared
from qaudit.planning.traffic import missing_nbytes
from qaudit.policy import policy_named
from qaudit.saved.results import Filed, ResultStore, sha256_of
from qaudit.search.released import compared
from qaudit.text.texts import fetch_texts, read_corpus
from qaudit.types import Audit, Corpus, Diagnostics, Finding, Plan, Skipped, Subject
from qaudit.types.watch import Watch

if TYPE_CHECKING:
    from qaudit.hub import Hub


@dataclass(frozen=True)
class Options:
    """How to run what was planned: nothing here changes a number."""

    out: Path
    stream_limit_nbytes: int | None = None
    allow_pickle: bool = False
    self_check: bool = False
    cross_check: int = 0
    hub: Hub | None = None
    disk_budget_nbytes: int | None = None
    trust_remote_code: bool = False

    @classmethod
    def of(cls, prepared: Prepared) -> Options:
        """Return the options of a prepared plan."""
        chosen, traffic = prepared.options, prepared.plan.traffic
        budget = None if traffic is None else traffic.nbytes_disk_budget
        return cls(
            out=prepared.out,
            stream_limit_nbytes=chosen.stream_memory,
            allow_pickle=chosen.allow_pickle,
            trust_remote_code=chosen.trust_remote_code,
            self_check=chosen.self_check,
            cross_check=chosen.cross_check,
            hub=prepared.hub,
            # the texts are downloaded beside the weights
            disk_budget_nbytes=budget and budget - missing_nbytes(prepared.plan.texts),
        )


@dataclass(frozen=True, eq=False)
class Ready:
    """What is there before the first weights are read."""

    plan: Plan
    corpus: Corpus
    machine: Machine
    subjects: tuple[Subject, ...]
    refused: Mapping[str, SourceError]  # why the others cannot be had


def prepare(plan: Plan, options: Options) -> Ready:
    """Fetch what is small, read the text, and load what schemes compute with."""
    refused = _fetch_what_is_small(plan, options)
    readable = tuple(s for s in plan.subjects if s.label not in refused)
    if not readable:
        raise nothing(refused)
    machine = _machine(plan, options)
    corpus = read_corpus(
        replace(plan, subjects=readable),
        hub=options.hub,
        trust_remote_code=options.trust_remote_code,
    )
    _load_libraries(schemes_of(plan))
    return Ready(plan, corpus, machine, readable, refused)


def run(plan: Plan, options: Options, watch: Watch) -> Audit:
    """Measure everything planned and judge it."""
    began = datetime.now(UTC)
    ready = prepare(plan, options)
    plan, corpus, machine = ready.plan, ready.corpus, ready.machine
    readable, refused = ready.subjects, ready.refused
    baseline = resident_nbytes()
    tasks = tasks_of(readable, corpus, schemes_of(plan))
    found = _measure(tasks, machine, options, watch, plan)
    failed = _in_order({**refused, **found.failed}, plan)
    if not found.filed:
        raise nothing(failed)
    measured = {f.measurement.subject for f in found.filed}
    ends = {label: search.subject for label, search in found.searched.items()}
    subjects = tuple(ends.get(s.label) or s for s in plan.subjects if s.label in measured)
    judgement = judge(
        subjects,
        [f.measurement for f in found.filed],
        _evidence_files(found.filed, options.out),
        confidence=plan.recipe.confidence,
        floor=floor_of(tasks, machine, _store(options)),
        policy=policy_named(plan.recipe.policy),
        today=began.date(),
    )
    diagnostics, advice = _judged(
        Table.of(subjects, [f.measurement for f in found.filed], plan.recipe.confidence),
        replace(_diagnostics(found), noise=judgement.noise),
    )
    return Audit(
        plan=plan,
        environment={
            **_environment(machine, began, baseline),
            **_receipt(options.hub, found.seconds_waited),
        },
        protocol=_protocol(corpus),
        subjects=subjects,
        diagnostics=diagnostics,
        skipped=_skipped({**failed, **found.not_compared}),
        qaudit=__version__,
        measurements=judgement.measurements,
        pooled=judgement.pooled,
        tasks=judgement.tasks,
        comparisons=judgement.comparisons,
        findings=(*_findings(plan, found, judgement), *advice),
        pick=judgement.pick,
    )


def _fetch_what_is_small(plan: Plan, options: Options) -> dict[str, SourceError]:
    """Fetch texts, configurations and tokenizers; return why subjects cannot be had.

    A text that cannot be had ends the scan.
    """
    if options.hub is None:
        return {}
    fetcher, refused = options.hub.fetcher, dict[str, SourceError]()
    fetch_texts(fetcher, plan.recipe, plan.texts)
    for subject in plan.subjects:
        for checkpoint, _ in subject.members:
            if checkpoint.commit is not None:
                try:
                    fetcher.settings(checkpoint, code=options.trust_remote_code)
                except SourceError as error:
                    refused.setdefault(subject.label, error)
    return refused


def _findings(plan: Plan, found: Outcome, judgement: Judgement) -> tuple[Finding, ...]:
    """Put together what names told, what searches ended with, and what was judged."""
    searches = [finding for search in found.searched.values() for finding in search.findings]
    return (
        *plan.findings,
        *judgement.findings,
        *searches,
        *released_findings(found.released),
    )


def _judged(table: Table, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
    """Return the tables with those that are derived from them, and the findings."""
    findings: list[Finding] = []
    for module in parts("judge"):
        diagnostics, more = module.judge(table, diagnostics)
        findings += more
    return diagnostics, tuple(findings)


def _diagnostics(found: Outcome) -> Diagnostics:
    """Return the tables of diagnostics, searches and releases."""
    return replace(
        found.diagnostics,
        greedy=tuple(search.row for search in found.searched.values()),
        released=tuple(compared(release, one) for release, one in found.released),
    )


def _skipped(failed: Mapping[str, SourceError]) -> tuple[Skipped, ...]:
    return tuple(Skipped(label, None, error.message) for label, error in failed.items())


def _in_order(failed: Mapping[str, SourceError], plan: Plan) -> dict[str, SourceError]:
    return {s.label: failed[s.label] for s in plan.subjects if s.label in failed}


def _machine(plan: Plan, options: Options) -> Machine:
    device, dtype = open_device(plan.device, plan.dtype)
    limit = options.stream_limit_nbytes
    return Machine(
        device=device,
        dtype=dtype,
        stream_limit_nbytes=default_stream_limit() if limit is None else limit,
        device_stream_limit_nbytes=_left_on(device, plan.nbytes_memory_fixed),
        allow_pickle=options.allow_pickle,
        self_check=options.self_check,
        cross_check=options.cross_check,
        trust_remote_code=options.trust_remote_code,
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


def _store(options: Options) -> ResultStore:
    return ResultStore(options.out / "evidence", own_cache() / "evidence")


def _measure(
    tasks: Sequence[Task],
    machine: Machine,
    options: Options,
    watch: Watch,
    plan: Plan,
) -> Outcome:
    store = _store(options)
    store.remove_stale_files()
    return measure_all(
        tasks,
        machine,
        store,
        watch,
        Origin(options.hub, options.disk_budget_nbytes, options.out / RECORD_FILE),
        Beside(
            plan.releases,
            parse_diagnostics(plan.recipe.diagnostics),
            plan.recipe.confidence,
        ),
    )


def nothing(failed: Mapping[str, SourceError]) -> SourceError:
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


def _receipt(hub: Hub | None, seconds_waited: float) -> dict[str, Any]:
    """Say what was taken from the Hub, and what it took."""
    if hub is None:
        return {}
    return {
        "hub_calls": hub.client.calls,
        "hub_requests": hub.client.requests,
        "hub_nbytes_fetched": hub.fetcher.nbytes_fetched,
        "hub_nbytes_verified": hub.fetcher.nbytes_verified,
        "hub_seconds_waited": round(seconds_waited, 3),
    }


def _protocol(corpus: Corpus) -> dict[str, Any]:
    return {
        **asdict(corpus.protocol),
        **({"calibration_draws": len(corpus.draws)} if corpus.further else {}),
        "evaluation_documents": len(corpus.documents),
        "evaluation_tokens": sum(w.scored for w in corpus.evaluation),
        "calibration_windows": len(corpus.calibration),
        "calibration_tokens": sum(len(w.tokens) for w in corpus.calibration),
        "choices": len(corpus.choices),
        "corpus_sha256": corpus.sha256,
        "sources": dict(corpus.sources),
        "notes": list(corpus.notes),
    }
