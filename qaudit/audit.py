"""The middle of qaudit, and its Python API: plan, run, judge.

    Recipe -> Plan (passes) -> executor -> measurements -> Audit -> report

`scan` goes through the whole sentence; the commands, searches and the laboratory call what is
here. Importing this module reads no model library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qaudit.errors import MissingParts, QauditError, UsageError
from qaudit.saved.audits import SavedAudit, combine, read_audit, read_saved
from qaudit.saved.writer import one_writer
from qaudit.tables import Table
from qaudit.types import SILENT, AuditRecord, Gate, Pick, Pins, Plan, Run, Verdict, Watch
from qaudit.version import __version__

if TYPE_CHECKING:
    from qaudit.executors.events import Event, Executor
    from qaudit.judge.table import Table as Measured
    from qaudit.planning.prepare import Prepared


@dataclass(frozen=True, eq=False)
class Audit:
    """An audit: what was planned, measured, skipped and concluded.

    Every table is a tuple of frozen rows with `to_records()` and `to_pandas()`.
    """

    record: AuditRecord
    folder: Path  # where its evidence is

    @property
    def plan(self) -> Plan:
        """What was measured, and its price."""
        return self.record.plan

    @property
    def pick(self) -> Pick | None:
        """The one subject and scheme to ship."""
        return self.record.pick

    @property
    def verdict(self) -> Verdict | None:
        """What ships of each bit class."""
        return self.record.verdict

    @property
    def measurements(self) -> Table:
        """One row for each subject, scheme and calibration draw."""
        return Table(self.record.measurements)

    @property
    def pooled(self) -> Table:
        """One row for each subject and scheme, over all calibration draws."""
        return Table(self.record.pooled)

    @property
    def tasks(self) -> Table:
        """Accuracy on multiple-choice items."""
        return Table(self.record.tasks)

    @property
    def comparisons(self) -> Table:
        """Pairs of subjects, compared on the same documents."""
        return Table(self.record.comparisons)

    @property
    def strata(self) -> Table:
        """One row for each subject, scheme and stratum, if documents are grouped."""
        return Table(self.record.diagnostics.strata)

    @property
    def positions(self) -> Table:
        """One row for each subject, scheme and bin of positions in the window."""
        return Table(self.record.diagnostics.positions)

    @property
    def findings(self) -> Table:
        """Rules applied to measurements."""
        return Table(self.record.findings)

    @property
    def subjects(self) -> Table:
        """The checkpoints and soups that were measured."""
        return Table(self.record.subjects)

    @property
    def skipped(self) -> Table:
        """What was planned and not measured, and why."""
        return Table(self.record.skipped)

    def __getattr__(self, name: str) -> Any:
        """Return `environment`, `protocol` and `diagnostics` as they were recorded."""
        if name in ("environment", "protocol", "diagnostics"):
            return getattr(self.record, name)
        raise AttributeError(f"an audit has no `{name}`")

    @cached_property
    def evidence(self) -> SavedAudit:
        """The audit with its per-document losses, checked against their hashes."""
        return read_saved(self.folder)

    def save(self, folder: str | Path) -> Path:
        """Write audit.json, card.md, report.html, plots and evidence into a folder."""
        from qaudit.report.folder import must_take_files, write_folder
        from qaudit.saved.results import copy_evidence

        folder = Path(folder)
        must_take_files(folder)
        copy_evidence((*self.record.measurements, *self.record.tasks), self.folder, folder)
        write_folder(self.record, folder)
        return folder

    def _repr_markdown_(self) -> str:
        from qaudit.report.card import render

        return render(self.record, pictures_at=None)

    def _repr_html_(self) -> str:
        from qaudit.report.card import render_notebook

        return render_notebook(self.record)


def plan(*targets: str | Path, watch: Watch = SILENT, **settings: Any) -> Plan:
    """Resolve and price what a scan would measure; nothing is downloaded but headers and text."""
    return _prepare(targets, settings, watch).plan


def scan(*targets: str | Path, watch: Watch = SILENT, **settings: Any) -> Audit:
    """Plan, measure and judge; write the output folder and return the audit."""
    return complete(_prepare(targets, settings, watch), watch=watch)


def complete(
    prepared: Prepared, *, watch: Watch = SILENT, executor: Executor | None = None
) -> Audit:
    """Measure and judge what was prepared, and write its output folder.

    What decides is then measured again on further draws of calibration text, and judged anew.
    """
    from qaudit.planning.further import further_plan
    from qaudit.report.folder import must_take_files, write_folder

    must_take_files(prepared.out)
    with one_writer(prepared.out):
        prepared.write_lock()
        plan, executor = prepared.plan, executor or _in_process(prepared, watch)
        events = tuple(run(plan, executor))
        record = judge(plan, events, prepared.out)
        if further := further_plan(plan, record):
            try:
                events += tuple(run(further, executor))
            except MissingParts:
                write_folder(record, prepared.out)  # what is known so far
                raise
            record = judge(plan, events, prepared.out)
        write_folder(record, prepared.out)
    return Audit(record, prepared.out)


def _in_process(prepared: Prepared, watch: Watch) -> Executor:
    from qaudit.executors.in_process import InProcess  # imports torch

    return InProcess(prepared, watch)


def pin(prepared: Prepared, threads: int | None = None) -> Run:
    """Write what every process that measures a part of the plan must agree on."""
    from qaudit.executors.ready import read_text
    from qaudit.planning.pins import NUMERICS, default_threads, pinned_libraries
    from qaudit.saved.parts import write_run

    plan, options = prepared.plan, prepared.options
    if plan.shipped:
        raise UsageError(
            f"a plan in parts measures no shipped files, and {len(plan.shipped)} are named",
            hint="measure them with `qaudit scan`, which is one pass for all of them",
        )
    versions = pinned_libraries()
    corpus = read_text(plan, options, prepared.hub)
    pins = Pins(
        threads=threads or default_threads(),
        libraries=versions,
        numerics=NUMERICS,
        text_sha256=tuple(draw.sha256 for draw in corpus.draws),
        items_sha256=dict(corpus.items_sha256),
        self_check=options.self_check,
        cross_check=options.cross_check,
    )
    pinned = Run(plan, pins)
    with one_writer(prepared.out):
        prepared.write_lock(always=True)
        return write_run(pinned, prepared.out)


def collect(folder: str | Path, *others: str | Path, watch: Watch = SILENT) -> Audit:
    """Judge what parts have measured, in `folder` and in copies of it; measure nothing.

    `MissingParts` names the round that is due, and what is missing of it.
    """
    from qaudit.executors.merging import merge
    from qaudit.executors.on_disk import OnDisk
    from qaudit.planning.prepare import Prepared
    from qaudit.saved.parts import read_run
    from qaudit.settings import RunOptions

    out = Path(folder)
    pinned, _ = read_run(out)
    for other in others:
        merge(Path(other), out, pinned)
    prepared = Prepared.of_run(pinned, RunOptions(), out)
    return complete(prepared, watch=watch, executor=OnDisk(pinned, out))


def run(plan: Plan, executor: Executor) -> Iterator[Event]:
    """Run all passes of a plan; yields an event when a subject is measured, or fails."""
    return executor.execute(plan, plan.passes)


def judge(plan: Plan, events: Iterable[Event], out: Path) -> AuditRecord:
    """Turn what a plan's passes gave into an audit; its evidence is in `out`."""
    from qaudit.judging import judged

    return judged(plan, events, out)


def load(source: str | Path, *, watch: Watch = SILENT) -> Audit:
    """Read a saved audit: a folder, its audit.json, or a published one (`org/name@revision`)."""
    folder = Path(source)
    if not folder.exists():
        from qaudit.hub.publishing.published import audit_folder

        folder = audit_folder(str(source), watch)
    record = read_audit(folder)
    if record.verdict is None:
        record = _with_verdict(record, folder)
    return Audit(record, folder if folder.is_dir() else folder.parent)


def _with_verdict(record: AuditRecord, folder: Path) -> AuditRecord:
    """Return an audit of the first version with its verdict, if it has evidence and a policy."""
    try:
        verdict = decide(read_saved(folder), record.plan.recipe.policy)
    except QauditError:  # it is read and rendered all the same; `gate` names what is wrong
        return record
    return replace(record, verdict=verdict)


def gate(
    audit: Audit | str | Path,
    policy: str = "release",
    baseline: Audit | str | Path | None = None,
    bits: Sequence[str] = (),
) -> Gate:
    """Hold an audit to a policy, a preset or a file; `bits` names the classes to decide."""
    from qaudit.judge.gate import GateInput
    from qaudit.judge.gate import gate as judged
    from qaudit.policy import policy_named

    def held(one: Audit | str | Path) -> GateInput:
        opened = one if isinstance(one, Audit) else load(one)
        table = checked_table(opened)
        return GateInput.of(opened.record, table, str(opened.folder), tuple(bits))

    opened = audit if isinstance(audit, Audit) else load(audit)
    return judged(
        policy_named(policy),
        held(opened),
        None if baseline is None else held(baseline),
        today=datetime.now(UTC).date(),
        targets=opened.plan.recipe.targets,
    )


def pick(
    *audits: Audit | str | Path, objective: str = "loss", bits: Sequence[str] = ()
) -> Pick | None:
    """Choose the one subject and scheme to ship from one or several audits."""
    from qaudit.judge.objectives import parse_objective
    from qaudit.judge.pick import choose

    opened = [one if isinstance(one, Audit) else load(one) for one in audits]
    joined = combine({str(one.folder): one.evidence for one in opened})
    return choose(table_of(joined), parse_objective(objective), bits)


def decide(
    saved: SavedAudit, policy: str, objective: str = "loss", bits: Sequence[str] = ()
) -> Verdict:
    """Return what ships of each bit class, by evidence and under a policy."""
    from qaudit.judge.gate import GateInput, verdict_of
    from qaudit.judge.gate import gate as judged
    from qaudit.judge.objectives import parse_objective
    from qaudit.policy import policy_named

    wanted, rules = parse_objective(objective), policy_named(policy)
    held = GateInput.of(saved.audit, table_of(saved), "audit", tuple(bits), wanted)
    return verdict_of(judged(rules, held, today=datetime.now(UTC).date()), str(wanted))


def table_of(saved: SavedAudit) -> Measured:
    """Return the evidence of an audit as the table that judgements read."""
    from qaudit.judge.table import Table as Measured

    record = saved.audit
    return Measured.of(record.subjects, saved.measurements, record.plan.recipe.confidence)


def checked_table(audit: Audit) -> Measured:
    """Return the evidence as a table; refuse an audit whose numbers disagree with it."""
    from qaudit.judge.agreement import refuse_edited

    table = table_of(audit.evidence)
    refuse_edited(audit.record, table, version=__version__)
    return table


def _prepare(targets: Sequence[str | Path], settings: Mapping[str, Any], watch: Watch) -> Prepared:
    from qaudit.planning.prepare import prepare

    return prepare([str(target) for target in targets], dict(settings), watch)
