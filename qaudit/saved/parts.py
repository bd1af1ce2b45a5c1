"""`OUT/plan.json` and `OUT/parts/`: a plan, its rounds, and what came of each unit.

    round-2.json     passes that became due when those before were judged
    units/           one record for each subject of a round that is done or failed
    directory.txt    where the plan was made: relative paths begin there
    0-of-8/          downloads that part 0 of 8 may remove
    0-of-8.jsonl     how far it is
    0-of-8.log       what it printed

Everything is written whole under a name that no other process uses, so that any number of
processes on any number of hosts may work on one folder. A record is found by what was measured,
not by the number of the part: parts may be cut anew at any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from qaudit.errors import AuditError, MachineError, UnfinishedError, UsageError, not_written
from qaudit.host import NO_LOCKS
from qaudit.saved import codec
from qaudit.saved.results import slug_of
from qaudit.types import (
    Finding,
    GreedySearch,
    Pass,
    Pins,
    Plan,
    Recipe,
    Resolved,
    Run,
    WorkUnit,
    digest,
    units_of,
    work_of,
)
from qaudit.version import __version__
from qaudit.whole import read_regular, write_whole


@dataclass(frozen=True, kw_only=True)
class RoundDocument:
    """`parts/round-2.json`: passes that became due when those before were judged."""

    round: int
    passes: tuple[Pass, ...]


@dataclass(frozen=True, kw_only=True)
class RunDocument:
    """`plan.json`: what a recipe means, the work, and what every process must agree on."""

    run: Literal["qaudit run"] = "qaudit run"
    schema: Literal["1"] = "1"
    qaudit: str
    requested: Recipe  # as it was written
    resolved: Resolved
    plan: Plan
    pins: Pins | None  # None until the text is read
    digest: str = ""  # of everything else


@dataclass(frozen=True, kw_only=True)
class TaskFile:
    """The evidence of a measurement on one task."""

    task: str
    evidence: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ResultDocument:
    """A measurement in the evidence folder, with the hash of its file."""

    scheme: str
    spec: str
    perturbed: bool
    evidence: str
    sha256: str
    tasks: tuple[TaskFile, ...] = ()


@dataclass(frozen=True)
class DiagnosticRows:
    """What the diagnostics of one subject gave, by name, and why others are missing."""

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Why there is no answer."""

    message: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class UnitDocument:
    """`parts/units/*.json`: what came of one subject in one round."""

    schema: Literal["1"] = "1"
    run: str  # the identity of the run
    unit: str  # the content of the unit
    label: str
    part: str  # `K-of-N` of the process that measured it
    host: str
    results: tuple[ResultDocument, ...] = ()
    search: GreedySearch | None = None
    findings: tuple[Finding, ...] = ()
    error: Failure | None = None
    exit_code: Literal[2, 4] = 4  # of the error, where nothing else was measured
    failed_schemes: dict[str, Failure] = field(default_factory=dict)
    failed_tasks: dict[str, str] = field(default_factory=dict)  # and why
    diagnostics: DiagnosticRows = field(default_factory=DiagnosticRows)
    protocol: dict[str, Any]
    environment: dict[str, Any]


LOCK = ".qaudit.lock"


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Hold an output folder; MachineError where another process holds it already."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise MachineError(
            f"`{folder}` is being written by another process",
            hint="wait until it ends, or name another folder with `--out`",
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise not_written(folder, error) from error
        yield  # without a lock
        return
    try:
        yield
    finally:
        lock.release()


FOLDER, PLAN, UNITS, DIRECTORY = "parts", "plan.json", "units", "directory.txt"
FIRST = 1
"""The round of the plan itself."""

AGAIN = "delete it, or pass `--set update=true`, to have the plan made anew"


def write_plan(
    plan: Plan, requested: Recipe, resolved: Resolved, pins: Pins | None, out: Path
) -> None:
    """Write a plan for all processes; one that measures the same stays."""
    with suppress(UsageError):
        before = read_plan(out / PLAN)
        same = (before.requested, before.resolved) == (requested, resolved)
        if same and pins in (None, before.pins) and work_of(before.plan) == work_of(plan):
            return
    document = RunDocument(
        qaudit=__version__, requested=requested, resolved=resolved, plan=plan, pins=pins
    )
    document = replace(document, digest=digest_of(codec.encode(document)))
    write_whole(out / PLAN, codec.text_of(codec.encode(document)))
    write_whole(out / FOLDER / DIRECTORY, str(Path.cwd()))
    for later in (out / FOLDER).glob("round-*.json"):  # of another plan
        later.unlink(missing_ok=True)


def read_plan(path: Path) -> RunDocument:
    """Read a plan; UsageError for a damaged, foreign, future or edited one."""
    if not path.exists():
        hint = (
            f"a scan writes it when it begins to measure: `qaudit scan TARGET --out "
            f"{path.parent}`; for parts on a cluster, `qaudit plan TARGET --out {path.parent}`"
        )
        raise UsageError(f"`{path.parent}` has no plan `{path.name}`", hint=hint)
    contents = codec.read_object(path, f"the plan `{path}`", AGAIN)
    if contents.get("run") != "qaudit run":
        hint = f"name the `{PLAN}` of an output folder"
        raise UsageError(f"`{path}` is not a plan of qaudit", hint=hint)
    try:
        codec.refuse_other_schema(contents, "it", AGAIN)
        document = codec.decode(RunDocument, contents, "plan")
    except AuditError as error:
        raise UsageError(f"the plan `{path}`: {error.message}", hint=error.hint) from error
    if document.digest != digest_of(contents):
        raise UsageError(
            f"the plan `{path}` was edited: its digest is of other contents", hint=AGAIN
        )
    return document


def read_run(out: Path) -> Run:
    """Read the plan of a folder and what its processes agree on."""
    document = read_plan(out / PLAN)
    if document.pins is None:
        raise unfinished(out, 0, len(document.plan.subjects))
    return Run(document.plan, document.pins)


def is_unfinished(out: Path) -> bool:
    """Return whether a folder has a plan and no audit."""
    return (out / PLAN).is_file() and not (out / codec.FILE).exists()


def refuse_unfinished(out: Path) -> None:
    """Refuse a folder that has a plan and no audit, with how many subjects are measured."""
    if not is_unfinished(out):
        return
    run = read_run(out)
    labels = {subject.label for subject in run.plan.subjects}
    units = [unit for unit in units_of(run.plan.passes) if unit.label in labels]
    documents = [read_unit(run, unit, out) for unit in units]
    measured = sum(document is not None and document.error is None for document in documents)
    raise unfinished(out, measured, len(labels))


def unfinished(out: Path, measured: int, subjects: int) -> UnfinishedError:
    return UnfinishedError(
        f"`{out}` is not finished: {measured} of {subjects} subject{'s' * (subjects != 1)}; "
        "run it again",
        hint=f"the command that began it goes on, and so does `qaudit scan {out / PLAN} "
        f"--out {out}`",
    )


def digest_of(contents: Any) -> str:
    """Digest the rest of a document as its file has it; a later version may know more fields."""
    return digest({**contents, "digest": ""})


def write_round(number: int, passes: Sequence[Pass], out: Path) -> None:
    """Write the passes of a further round; an equal file is left alone."""
    text = codec.text_of(codec.encode(RoundDocument(round=number, passes=tuple(passes))))
    path = _round_path(number, out)
    if number != FIRST and (not path.is_file() or path.read_text(encoding="utf-8") != text):
        write_whole(path, text)
        for later in range(number + 1, last_round(out) + 1):  # they followed from another one
            _round_path(later, out).unlink(missing_ok=True)


def read_round(run: Run, out: Path, number: int) -> tuple[Pass, ...]:
    if number == FIRST:
        return run.plan.passes
    path = _round_path(number, out)
    try:
        text = read_regular(path, codec.LARGEST_NBYTES).decode()
        return codec.decode(RoundDocument, codec.parse(text), "round").passes
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, AuditError) as error:
        raise UsageError(
            f"`{path}` cannot be read: {error}", hint=f"delete it, then `qaudit collect {out}`"
        ) from error


def last_round(out: Path) -> int:
    names = [path.stem.partition("-")[2] for path in (out / FOLDER).glob("round-*.json")]
    return max([FIRST, *(int(name) for name in names if name.isdecimal())])


def _round_path(number: int, out: Path) -> Path:
    return out / FOLDER / f"round-{number}.json"


def unit_path(run: Run, unit: WorkUnit, out: Path) -> Path:
    """Return the place of a unit's record: it names what was measured, and by which plan."""
    name = f"{slug_of(unit.label)}--{digest([run.identity, unit.content])[:16]}.json"
    return out / FOLDER / UNITS / name


def read_unit(run: Run, unit: WorkUnit, out: Path) -> UnitDocument | None:
    """Return the record of a unit; None where it is not measured, or is damaged.

    It has what is read of it, and no name in it leads out of its folder.
    """
    try:
        document = codec.read_object(unit_path(run, unit, out), "the record", "")
        record = codec.decode(UnitDocument, document, "unit")
        environment, draws = record.environment, record.protocol.get("calibration_draws", 1)
        for name in ("began", "ended"):
            datetime.fromisoformat(environment[name])
        numbers = [environment[name] for name in ("memory_baseline_nbytes", "memory_peak_nbytes")]
        numbers += [n for name, n in environment.items() if name.startswith(("hub_", "memory_"))]
        is_sound = (
            (record.run, record.unit) == (run.identity, unit.content)
            and isinstance(environment["device"], str)
            and all(type(number) in (int, float) for number in numbers)
            and type(draws) is int
            and 0 < draws < 1000
            and all(codec.is_inside(n) and n.startswith("evidence/") for n in evidence_of(record))
        )
        return record if is_sound else None
    except (ValueError, AuditError, LookupError, TypeError):
        return None


def evidence_of(document: UnitDocument) -> list[str]:
    names = [result.evidence for result in document.results]
    names += [file.evidence for result in document.results for file in result.tasks]
    tables = document.diagnostics.rows.values()
    return names + [str(row["details"]) for rows in tables for row in rows if row.get("details")]
