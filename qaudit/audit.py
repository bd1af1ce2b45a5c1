"""The middle of qaudit, and its Python API: plan, run, judge.

    Recipe -> Plan (passes) -> executor -> measurements -> Audit -> report

`scan` goes through the whole sentence; the commands, searches and experiments call what is
here. Importing this module reads no model library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qaudit.errors import MissingParts
from qaudit.judging import gate as gate  # part of the API
from qaudit.judging import judge
from qaudit.judging import load as load
from qaudit.judging import pick as pick
from qaudit.saved.evidence import sign_audit, signing_key
from qaudit.saved.parts import one_writer
from qaudit.tables import Audit as Audit  # part of the API
from qaudit.types import SILENT, Pass, Plan, Run, Watch, units_of

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


def pin(prepared: Prepared, threads: int | None = None) -> Run:
    """Write what every process that measures a part of the plan must agree on."""
    from qaudit.core.registry import parse_scheme
    from qaudit.executors.folder import pinned
    from qaudit.planning.pin import default_threads, pinned_libraries

    pinned_libraries(map(parse_scheme, prepared.plan.specs))  # refused before a text is read
    from qaudit.executors.part import read_text  # imports torch

    with one_writer(prepared.out):
        prepared.write_plan()
    corpus = read_text(prepared.plan, prepared.options, prepared.hub)
    return pinned(prepared, corpus, threads or default_threads())


def complete(executor: Executor, *, sign: bool = False) -> Audit:
    """Measure and judge a plan round by round, and write its output folder."""
    from qaudit.executors.records import read_records
    from qaudit.planning.price import next_round, planned_rounds
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


def _prepare(targets: Sequence[str | Path], settings: Mapping[str, Any], watch: Watch) -> Prepared:
    from qaudit.planning.prepare import prepare

    return prepare([str(target) for target in targets], dict(settings), watch)
