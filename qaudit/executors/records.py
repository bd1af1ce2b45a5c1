"""What units gave, read back from their records. No torch, no weights.

Records and evidence on disk are the truth: which process wrote them, when and where changes
nothing.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from qaudit.core.merges.averages import Mean
from qaudit.errors import MissingParts, SourceError, UsageError
from qaudit.planning.price import planned_rounds
from qaudit.saved.codec import parse
from qaudit.saved.evidence import must_be_complete, must_be_of, must_be_pass
from qaudit.saved.parts import (
    FIRST,
    FOLDER,
    ResultDocument,
    TaskFile,
    UnitDocument,
    evidence_of,
    last_round,
    read_round,
    read_unit,
    unit_path,
)
from qaudit.saved.results import ResultFile, UnitOutcome, read_measurement, with_tasks
from qaudit.support.keys import first_of
from qaudit.types import SILENT, Run, Subject, Watch, WorkUnit, units_of
from qaudit.whole import read_regular

ATTEMPTS = 2
"""A unit that ended its process so many times is given up: its subject is skipped."""

SECONDS_BETWEEN_BLOCKS = 10.0
_LARGEST_NBYTES = 2**28
_NAME = re.compile(r"[0-9]{1,9}-of-0*[1-9][0-9]{0,8}")


class PartLog(Watch):
    """Appends to `K-of-N.jsonl`, one line for each subject, and passes progress on."""

    def __init__(self, path: Path, attempts_of: Callable[[str], Path] | None, watch: Watch) -> None:
        """Log into `path`; `attempts_of` has the file that counts attempts at a subject."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._attempts_of, self._watch = path, attempts_of, watch
        self._current, self._last_block = "", 0.0

    def __enter__(self) -> PartLog:
        self._line(
            began=True,
            host=platform.node(),
            pid=os.getpid(),
            job=os.environ.get("SLURM_JOB_ID"),
            device=os.environ.get("CUDA_VISIBLE_DEVICES"),
            restarts=os.environ.get("SLURM_RESTART_COUNT"),
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Write how it ended; a part that is told to stop does not count as a failed attempt."""
        if isinstance(error, KeyboardInterrupt) and self._current:
            self._forget_attempts(self._current)
        self._line(ended="done" if kind is None else getattr(kind, "__name__", "error"))

    def subject(self, done: int, total: int, label: str) -> None:
        """Begin a subject: if its process dies, the attempt stays counted."""
        self._watch.subject(done, total, label)
        self._current = label
        if label:
            if self._attempts_of is not None:
                with self._attempts_of(label).open("a", encoding="utf-8") as file:
                    file.write(f"{platform.node()} {time.time():.0f}\n")
            self._line(subject=label, done=done, total=total)

    def block(self, done: int, total: int, what: str) -> None:
        self._watch.block(done, total, what)
        if time.monotonic() - self._last_block > SECONDS_BETWEEN_BLOCKS:
            self._last_block = time.monotonic()
            self._line(block=done, blocks=total, what=what)

    def download(self, what: str, done_nbytes: int, total_nbytes: int) -> None:
        self._watch.download(what, done_nbytes, total_nbytes)

    def note(self, text: str) -> None:
        self._watch.note(text)
        self._line(note=text)

    def finished(self, label: str, outcome: str, seconds: float, record: Path) -> None:
        self._forget_attempts(label)
        values = {"measured": label, "outcome": outcome, "seconds": round(seconds, 3)}
        self._line(**values, record=record.name)

    def _forget_attempts(self, label: str) -> None:
        if self._attempts_of is not None:
            self._attempts_of(label).unlink(missing_ok=True)

    def _line(self, **values: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at": round(time.time(), 2), **values}) + "\n")


def read_logs(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of each part's log, by the part's name; one that a kill cut is left out."""
    paths = [path for path in (out / FOLDER).glob("*-of-*.jsonl") if _NAME.fullmatch(path.stem)]
    paths.sort(key=lambda path: (len(path.name), path.name))
    logs: dict[str, list[dict[str, Any]]] = {path.stem: [] for path in paths}
    for path in paths:
        content = b""
        with suppress(OSError):
            content = read_regular(path, _LARGEST_NBYTES)
        for text in content.decode(errors="replace").splitlines():
            with suppress(ValueError):
                line = parse(text)
                if isinstance(line, dict) and is_number(line.get("at")):
                    logs[path.stem].append(line)
    return logs


def is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def attempts(path: Path) -> int:
    """Return how many attempts at a subject began and did not end."""
    try:
        return len(path.read_text(encoding="utf-8").splitlines())
    except OSError:
        return 0


RETRY_TASK = "run the same command again, or leave the task out of `--tasks`"


@dataclass(eq=False)
class Executor:
    """Has units measured. This one has nothing measured: parts run elsewhere, or did."""

    run: Run
    out: Path
    watch: Watch = SILENT

    def await_units(self, number: int, units: Sequence[WorkUnit]) -> None:
        """Return when the units of a round have records, or cannot have any now."""


def one_error(failed: Mapping[str, SourceError]) -> SourceError:
    """Make one error of the errors of all subjects; a single one is raised as it is."""
    first = next(iter(failed.values()))
    if len(failed) == 1:
        return first
    reasons = "; ".join(f"`{label}`: {error.message}" for label, error in failed.items())
    return SourceError(f"nothing could be measured: {reasons}", hint=first.hint)


LAG_SECONDS, LOOK_SECONDS = 60.0, 2.0


class Due(MissingParts):
    """A round of which units are missing."""

    def __init__(self, number: int, missing: Sequence[WorkUnit], of: int) -> None:
        self.round, self.missing = number, tuple(missing)
        subjects, are = "subject" + "s" * (of != 1), "is" if len(missing) == 1 else "are"
        what = f"round {number} has {of} {subjects}, and {len(missing)} {are} not measured yet"
        super().__init__(f"{what}: {first_of([unit.label for unit in missing])}")


@dataclass(frozen=True, eq=False, kw_only=True)
class Record(UnitOutcome):
    """What came of a unit, read with its evidence; `document` is as its process wrote it."""

    document: UnitDocument


def read_records(
    run: Run, out: Path, number: int, units: Sequence[WorkUnit], watch: Watch = SILENT
) -> tuple[Record, ...]:
    """Read all units of a round; `Due` names what is missing.

    A network file system shows a file to another host up to a minute after it was written, so that
    what a log names and is not there is looked for again.
    """
    ends, noted = time.monotonic() + LAG_SECONDS, False
    while True:
        documents = {unit.content: read_unit(run, unit, out) for unit in units}
        late = _late(run, out, units, documents)
        if not late or time.monotonic() >= ends:
            break
        if not noted:
            watch.note(f"waiting up to {LAG_SECONDS:.0f} s until `{late[0]}` is visible here")
        noted = True
        time.sleep(LOOK_SECONDS)
    records = [_record(unit, documents[unit.content], out) for unit in units]
    if missing := [unit for unit, record in zip(units, records, strict=True) if record is None]:
        raise Due(number, missing, len(units))
    return tuple(record for record in records if record is not None)


def read_record(run: Run, out: Path, unit: WorkUnit) -> Record | None:
    """Return the record of a unit; None unless its evidence is there as it was written."""
    return _record(unit, read_unit(run, unit, out), out)


def _record(unit: WorkUnit, document: UnitDocument | None, out: Path) -> Record | None:
    """Return what a record holds; None if its files are damaged, or of something else."""
    if document is None:
        return None
    if document.error is not None:
        error = SourceError(document.error.message, hint=document.error.hint)
        error.code = document.exit_code
        return Record(unit.label, error=error, document=document)
    search, soup = document.search, None
    is_candidate = all(step.is_candidate for step in unit.passes)
    if search is not None and len(search.members) > 1:  # the soup as the search made it
        members = [c for c, _ in unit.subject.members if c.label in search.members]
        shares = tuple((checkpoint, 1 / len(members)) for checkpoint in members)
        soup = Subject(unit.label, shares, Mean().spec)

    def read(result: ResultDocument, file: ResultDocument | TaskFile) -> ResultFile:
        measured = read_measurement(out / file.evidence, file.sha256)
        must_be_of(measured, soup or unit.subject, result.spec)
        if file is result:
            must_be_pass(measured, result.perturbed, document.protocol, is_candidate=is_candidate)
            measured = replace(measured, subject=unit.label, scheme=result.scheme)
        return ResultFile(measured, out / file.evidence, (), result.perturbed)

    try:
        results = tuple(
            with_tasks(read(result, result), [read(result, task) for task in result.tasks])
            for result in document.results
        )
        must_be_complete(unit, document, [filed.measurement.calibration_seed for filed in results])
    except (OSError, ValueError, TypeError, UsageError):
        return None
    failed = {
        scheme: SourceError(reason.message, hint=reason.hint)
        for scheme, reason in document.failed_schemes.items()
    }
    findings = document.findings if search else ()
    return Record(unit.label, results, search, soup, findings, failed, document=document)


def _late(
    run: Run, out: Path, units: Sequence[WorkUnit], documents: Mapping[str, UnitDocument | None]
) -> list[str]:
    """Return the files that were written, and are not there."""
    late = [
        out / name for document in documents.values() if document for name in evidence_of(document)
    ]
    missing = {unit_path(run, u, out) for u in units if documents[u.content] is None}
    if missing:
        logged = {line.get("record") for log in read_logs(out).values() for line in log}
        late += [path for path in missing if path.name in logged]
    listed: set[Path] = set()
    for folder in {path.parent for path in late}:
        with suppress(OSError):  # listing makes a network file system look anew
            listed |= {*folder.iterdir()}
    return [path.name for path in late if path not in listed]


@dataclass(frozen=True)
class RoundState:
    """A round that is due: its units, and those that are not measured."""

    number: int
    units: tuple[WorkUnit, ...]
    missing: tuple[WorkUnit, ...]
    failed: tuple[WorkUnit, ...]


def state_of(run: Run, out: Path, number: int, *, quick: bool = False) -> RoundState:
    """Return how far a round is; `quick` opens no evidence."""
    passes = read_round(run, out, number)
    if number == FIRST:  # searches are due when the others are measured
        passes = next(iter(planned_rounds(passes)), ())
    units, missing, failed = units_of(passes), [], []
    for unit in units:
        document = read_unit(run, unit, out)
        if document is None or not (quick or _record(unit, document, out)):
            missing.append(unit)
        elif document.error is not None:
            failed.append(unit)
    return RoundState(number, units, tuple(missing), tuple(failed))


def states_of(run: Run, out: Path, *, quick: bool = False) -> tuple[RoundState, ...]:
    """Return how far every round is that is due, or was."""
    rounds = range(FIRST, last_round(out) + 1)
    return tuple(state_of(run, out, number, quick=quick) for number in rounds)
