"""The middle of qaudit, and its Python API: plan, run, judge.

    Recipe -> Plan (passes) -> executor -> measurements -> Audit -> report

`scan` goes through the whole sentence; the commands, searches and experiments call what is
here. Importing this module reads no model library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qaudit.errors import MissingParts
from qaudit.saved.audits import read_audit
from qaudit.saved.evidence import SavedAudit, combine
from qaudit.saved.exports import keep_what_ships
from qaudit.saved.parts import one_writer
from qaudit.saved.signature import must_be_signed, sign_audit, signing_key
from qaudit.tables import Audit as Audit  # part of the API
from qaudit.types import SILENT, Gate, Pass, Pick, Plan, Policy, Verdict, Watch, units_of

if TYPE_CHECKING:
    from qaudit.executors.records import Executor, Record
    from qaudit.planning.prepare import Prepared


def plan(*targets: str | Path, watch: Watch = SILENT, **settings: Any) -> Plan:
    """Resolve and price what a scan would measure; nothing is downloaded but headers and text."""
    return _prepare(targets, settings, watch).plan


def scan(*targets: str | Path, watch: Watch = SILENT, **settings: Any) -> Audit:
    """Plan, measure and judge; write the output folder and return the audit."""
    prepared = _prepare(targets, settings, watch)
    return complete(in_process(prepared, watch), sign=prepared.options.sign)


def in_process(prepared: Prepared, watch: Watch = SILENT) -> Executor:
    from qaudit.executors.part import whole_plan  # imports torch

    return whole_plan(prepared, watch)


def complete(executor: Executor, *, sign: bool = False) -> Audit:
    """Measure and judge a plan round by round, and write its output folder."""
    from qaudit.executors.records import read_records
    from qaudit.judging import judge
    from qaudit.planning.passes import next_round, planned_rounds
    from qaudit.report.folder import must_take_files, write_folder
    from qaudit.saved.parts import write_round

    run, out = executor.run, executor.out
    rounds: list[tuple[Pass, ...]] = []
    records: list[Record] = []
    record = None
    must_take_files(out)
    if sign:
        signing_key("--set sign=true")  # before hours go into what it would sign
    with one_writer(out):
        while due := next_round(run.plan, rounds, record):
            number, units = len(rounds) + 1, units_of(due)
            write_round(number, due, out)
            try:
                executor.await_units(number, units)
                records += read_records(run, out, number, units, executor.watch)
            except MissingParts:
                if record is not None:
                    write_folder(record, out)  # what is measured so far
                raise
            rounds.append(due)
            if len(rounds) >= len(planned_rounds(run.plan.passes)):
                record = judge(run.plan, records, out)
        assert record is not None, "a plan has passes"
        write_folder(record, out)
        keep_what_ships(record, out)
        if sign:
            record = sign_audit(out)
    return Audit(record, out)


def collect(
    folder: str | Path, *others: str | Path, sign: bool = False, watch: Watch = SILENT
) -> Audit:
    """Judge what was measured in `folder` and in copies of it; measure nothing.

    `MissingParts` names the round that is due, and what is missing of it.
    """
    from qaudit.executors.folder import merge
    from qaudit.executors.records import Executor
    from qaudit.saved.parts import read_run

    out = Path(folder)
    run = read_run(out)
    for other in others:
        merge(Path(other), out, run)
    return complete(Executor(run, out, watch), sign=sign)


def import_answers(
    audit: str | Path,
    base: Sequence[str | Path],
    quantized: Mapping[str, Sequence[str | Path]],
    *,
    subject: str | None = None,
    metric: str | None = None,
    sign: bool = False,
) -> Audit:
    """Add tasks that lm-eval or inspect ran to the output folder of a scan, and judge it again.

    `base` has answers in full precision, `quantized` those of each scheme of the audit.
    """
    from qaudit.items.answered import import_into

    files = {scheme: [*map(Path, places)] for scheme, places in quantized.items()}
    import_into(Path(audit), [*map(Path, base)], files, subject, metric)
    return collect(audit, sign=sign)


def load(source: str | Path, *, watch: Watch = SILENT) -> Audit:
    """Read a saved audit: a folder, its audit.json, or a published one (`org/name@revision`)."""
    folder = Path(source)
    if not folder.exists():
        from qaudit.hub.published import audit_folder

        folder = audit_folder(str(source), watch)
    return Audit(read_audit(folder), folder if folder.is_dir() else folder.parent, str(source))


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
    from qaudit.report.next_step import next_step

    def held(opened: Audit) -> GateInput:
        if signed:
            must_be_signed(opened.record, opened.folder)
        saved, name = opened.evidence.checked(), opened.name or str(opened.folder)
        return GateInput.of(saved.audit, saved.table, name, tuple(bits))

    rules, opened = policy_named(policy), _opened(audit)
    before = None if baseline is None else _opened(baseline)
    answer = judged(
        rules,
        held(opened),
        None if before is None else held(before),
        today=datetime.now(UTC).date(),
        targets=opened.plan.recipe.targets,
    )
    return replace(answer, next_step=next_step(opened.record, answer.classes, policy))


def pick(
    *audits: Audit | str | Path, objective: str = "loss", bits: Sequence[str] = ()
) -> Pick | None:
    """Choose the one subject and scheme to ship from one or several audits."""
    from qaudit.judge.choose import choose
    from qaudit.judge.objectives import parse_objective

    opened = [*map(_opened, audits)]
    joined = combine({str(audit.folder): audit.evidence for audit in opened})
    return choose(joined.table, parse_objective(objective), bits)


def decide(
    saved: SavedAudit,
    policy: str | Policy,
    objective: str = "loss",
    bits: Sequence[str] = (),
    *,
    today: date | None = None,
) -> Verdict:
    """Return the verdict on each bit class, by evidence and under a policy, as of a day."""
    from qaudit.judge.gate import GateInput, verdict_of
    from qaudit.judge.gate import gate as judged
    from qaudit.judge.objectives import parse_objective
    from qaudit.policy import policy_named
    from qaudit.report.next_step import next_step

    wanted = parse_objective(objective)
    rules = policy_named(policy) if isinstance(policy, str) else policy
    named = policy if isinstance(policy, str) else rules.path or rules.name
    held = GateInput.of(saved.audit, saved.table, "audit", tuple(bits), wanted)
    judgement = judged(rules, held, today=today or datetime.now(UTC).date())
    verdict = verdict_of(judgement, str(wanted))
    return replace(verdict, next_step=next_step(saved.audit, verdict.classes, named))


def _opened(audit: Audit | str | Path) -> Audit:
    return audit if isinstance(audit, Audit) else load(audit)


def _prepare(targets: Sequence[str | Path], settings: Mapping[str, Any], watch: Watch) -> Prepared:
    from qaudit.planning.prepare import prepare

    return prepare([str(target) for target in targets], dict(settings), watch)
