"""The middle of qaudit, and its Python API: plan, run, judge.

    Recipe -> Plan (passes) -> executor -> measurements -> Audit -> report

`scan` goes through the whole sentence; the commands, searches and the laboratory call what is
here. Importing this module reads no model library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qaudit.errors import MissingParts, QauditError
from qaudit.saved.audits import read_audit
from qaudit.saved.evidence import SavedAudit, combine, read_saved
from qaudit.saved.signature import must_be_signed, sign_audit, signing_key
from qaudit.saved.writer import one_writer
from qaudit.tables import Audit as Audit  # part of the API
from qaudit.types import SILENT, AuditRecord, Gate, Pick, Plan, Verdict, Watch

if TYPE_CHECKING:
    from qaudit.executors.events import Event, Executor
    from qaudit.planning.prepare import Prepared


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

    What decides is then measured again on further draws of calibration text, and judged anew;
    where parts ran on several kinds of devices, one subject is measured on each.
    """
    from qaudit.planning.further import further_plan, on_other_devices
    from qaudit.report.folder import must_take_files, write_folder

    must_take_files(prepared.out)
    if prepared.options.sign:
        signing_key("--sign")  # before hours go into what it would sign
    with one_writer(prepared.out):
        prepared.write_lock()
        plan, executor = prepared.plan, executor or _in_process(prepared, watch)
        events = tuple(run(plan, executor))
        record = judge(plan, events, prepared.out)
        for due in (further_plan, on_other_devices):
            if (further := due(plan, record)) is None:
                continue
            try:
                events += tuple(run(further, executor))
            except MissingParts:
                write_folder(record, prepared.out)  # what is known so far
                raise
            record = judge(plan, events, prepared.out)
        write_folder(record, prepared.out)
        if prepared.options.sign:
            record = sign_audit(prepared.out)
    return Audit(record, prepared.out)


def _in_process(prepared: Prepared, watch: Watch) -> Executor:
    from qaudit.executors.in_process import InProcess  # imports torch

    return InProcess(prepared, watch)


def collect(
    folder: str | Path, *others: str | Path, sign: bool = False, watch: Watch = SILENT
) -> Audit:
    """Judge what parts have measured, in `folder` and in copies of it; measure nothing.

    `MissingParts` names the round that is due, and what is missing of it.
    """
    from qaudit.executors.folder import merge
    from qaudit.executors.on_disk import OnDisk
    from qaudit.planning.prepare import Prepared
    from qaudit.saved.parts import read_run
    from qaudit.settings import RunOptions

    out = Path(folder)
    pinned, _ = read_run(out)
    for other in others:
        merge(Path(other), out, pinned)
    prepared = Prepared.of_run(pinned, RunOptions(sign=sign), out)
    return complete(prepared, watch=watch, executor=OnDisk(pinned, out, watch))


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
    return Audit(record, folder if folder.is_dir() else folder.parent, str(source))


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
    *,
    signed: bool = False,
) -> Gate:
    """Hold an audit to a policy, a preset or a file; `bits` names the classes to decide.

    `signed` refuses audits that are not signed with the key in `QAUDIT_SIGNING_KEY`.
    """
    from qaudit.judge.gate import GateInput
    from qaudit.judge.gate import gate as judged
    from qaudit.policy import policy_named

    def held(opened: Audit) -> GateInput:
        if signed:
            must_be_signed(opened.record, opened.folder)
        saved, name = opened.evidence.checked(), opened.name or str(opened.folder)
        return GateInput.of(saved.audit, saved.table, name, tuple(bits))

    rules, opened = policy_named(policy), _opened(audit)
    return judged(
        rules,
        held(opened),
        None if baseline is None else held(_opened(baseline)),
        today=datetime.now(UTC).date(),
        targets=opened.plan.recipe.targets,
    )


def pick(
    *audits: Audit | str | Path, objective: str = "loss", bits: Sequence[str] = ()
) -> Pick | None:
    """Choose the one subject and scheme to ship from one or several audits."""
    from qaudit.judge.objectives import parse_objective
    from qaudit.judge.pick import choose

    opened = map(_opened, audits)
    joined = combine({str(one.folder): one.evidence for one in opened})
    return choose(joined.table, parse_objective(objective), bits)


def decide(
    saved: SavedAudit, policy: str, objective: str = "loss", bits: Sequence[str] = ()
) -> Verdict:
    """Return what ships of each bit class, by evidence and under a policy."""
    from qaudit.judge.gate import GateInput, verdict_of
    from qaudit.judge.gate import gate as judged
    from qaudit.judge.objectives import parse_objective
    from qaudit.policy import policy_named

    wanted, rules = parse_objective(objective), policy_named(policy)
    held = GateInput.of(saved.audit, saved.table, "audit", tuple(bits), wanted)
    return verdict_of(judged(rules, held, today=datetime.now(UTC).date()), str(wanted))


def _opened(audit: Audit | str | Path) -> Audit:
    return audit if isinstance(audit, Audit) else load(audit)


def _prepare(targets: Sequence[str | Path], settings: Mapping[str, Any], watch: Watch) -> Prepared:
    from qaudit.planning.prepare import prepare

    return prepare([str(target) for target in targets], dict(settings), watch)
