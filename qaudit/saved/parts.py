"""`OUT/parts/`: a plan as several processes read it, its rounds, and what came of each unit.

    plan.json        the plan and its pins
    round-2.json     passes that became due when those before were judged
    units/           one record for each subject of a round that is done or failed
    0-of-8/          downloads that part 0 of 8 may remove
    0-of-8.jsonl     how far it is
    0-of-8.log       what it printed

Everything is written whole under a name that no other process uses, so that any number of
processes on any number of hosts may work on one folder. A record is found by what was measured,
not by the number of the part: parts may be cut anew at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from qaudit.errors import AuditError, UsageError
from qaudit.saved.audits import LARGEST_NBYTES, checkpoints_of, plan_document, plan_of, pointers
from qaudit.saved.audits import subjects_in as subjects_of
from qaudit.saved.codec import decode, encode, parse, text_of
from qaudit.saved.documents import PassDocument, RoundDocument, RunDocument, UnitDocument
from qaudit.saved.results import slug_of
from qaudit.types import Checkpoint, Pass, Run, WorkUnit, digest
from qaudit.version import __version__
from qaudit.whole import read_regular, write_whole

FOLDER, PLAN, UNITS = "parts", "plan.json", "units"
FIRST = 1
"""The round of the plan itself."""


def write_run(run: Run, out: Path) -> Run:
    """Write a plan and its pins for all processes; one that measures the same stays.

    Only the price of a plan differs from one moment to the next, and parts may be running.
    """
    with suppress(UsageError):
        before, _ = read_run(out)
        if before.work == run.work:
            return before
    checkpoints = checkpoints_of((*run.plan.subjects, *run.plan.releases))
    document = RunDocument(
        qaudit=__version__,
        folder=str(Path.cwd()),
        plan=plan_document(run.plan),
        passes=_round(FIRST, run.plan.passes, checkpoints),
        pins=run.pins,
    )
    document = replace(document, digest=_digest(document))
    write_whole(out / FOLDER / PLAN, text_of(encode(document)))
    for later in (out / FOLDER).glob("round-*.json"):  # of another plan
        later.unlink(missing_ok=True)
    return run


def read_run(out: Path) -> tuple[Run, Path]:
    """Read the plan of a folder, and the folder in which it was made."""
    path = out / FOLDER / PLAN
    try:
        document = decode(RunDocument, _json(path), "plan")
    except FileNotFoundError as error:
        raise UsageError(
            f"`{out}` has no plan for parts", hint=f"make one: `qaudit plan TARGET --out {out}`"
        ) from error
    except (OSError, ValueError, AuditError) as error:
        raise UsageError(
            f"`{path}` cannot be read: {error}", hint="run the same `qaudit plan` again"
        ) from error
    if document.digest != _digest(document):
        raise UsageError(
            f"`{path}` was edited: its digest is of other contents",
            hint="run the same `qaudit plan` again",
        )
    plan = plan_of(document.plan)
    passes = _passes(document.passes, document.plan.checkpoints)
    return Run(replace(plan, passes=passes), document.pins), Path(document.folder)


def _json(path: Path) -> Any:
    return parse(read_regular(path, LARGEST_NBYTES).decode())


def _digest(document: RunDocument) -> str:
    return digest(encode(replace(document, digest="")))


# -------------------------------------------------------------------------------------- rounds


def write_round(number: int, passes: Sequence[Pass], run: Run, out: Path) -> None:
    """Write the passes of a further round; an equal file is left alone."""
    checkpoints = checkpoints_of((*run.plan.subjects, *run.plan.releases))
    text = text_of(encode(_round(number, passes, checkpoints)))
    path = _round_path(number, out)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_whole(path, text)
        for later in range(number + 1, last_round(out) + 1):  # they followed from another one
            _round_path(later, out).unlink(missing_ok=True)


def read_round(run: Run, out: Path, number: int) -> tuple[Pass, ...]:
    """Read the passes of a round; nothing where it is not due yet."""
    if number == FIRST:
        return run.plan.passes
    path = _round_path(number, out)
    try:
        document = decode(
            RoundDocument, parse(read_regular(path, LARGEST_NBYTES).decode()), "round"
        )
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, AuditError) as error:
        raise UsageError(
            f"`{path}` cannot be read: {error}", hint=f"delete it, then `qaudit collect {out}`"
        ) from error
    checkpoints = checkpoints_of((*run.plan.subjects, *run.plan.releases))
    return _passes(document, checkpoints)


def last_round(out: Path) -> int:
    """Return the number of the last round that is due."""
    names = [path.stem.partition("-")[2] for path in (out / FOLDER).glob("round-*.json")]
    return max([FIRST, *(int(name) for name in names if name.isdecimal())])


def _round_path(number: int, out: Path) -> Path:
    return out / FOLDER / f"round-{number}.json"


def _round(number: int, passes: Sequence[Pass], known: Sequence[Checkpoint]) -> RoundDocument:
    subjects = tuple(dict.fromkeys(one.subject for one in passes))
    places = {subject: place for place, subject in enumerate(subjects)}
    values = [
        {field.name: getattr(one, field.name) for field in fields(Pass)}
        | {"subject": places[one.subject]}
        for one in passes
    ]
    return RoundDocument(
        round=number,
        subjects=tuple(pointers(subject, known) for subject in subjects),
        passes=tuple(PassDocument(**value) for value in values),
    )


def _passes(document: RoundDocument, known: Sequence[Checkpoint]) -> tuple[Pass, ...]:
    subjects = subjects_of(document.subjects, known, "round.subjects")
    for place, one in enumerate(document.passes):
        if not 0 <= one.subject < len(subjects):
            raise AuditError(
                f"`round.passes[{place}].subject` points to no subject",
                hint="run `qaudit plan` again",
            )
    return tuple(Pass(**{**vars(one), "subject": subjects[one.subject]}) for one in document.passes)


# --------------------------------------------------------------------------------------- units


def unit_path(run: Run, unit: WorkUnit, out: Path) -> Path:
    """Return the place of a unit's record: it names what was measured, and by which plan."""
    name = f"{slug_of(unit.label)}--{digest([run.identity, unit.content])[:16]}.json"
    return out / FOLDER / UNITS / name


def write_unit(document: UnitDocument, path: Path) -> None:
    """Write the record of a unit."""
    write_whole(path, text_of(encode(document)))


def read_unit(run: Run, unit: WorkUnit, out: Path) -> UnitDocument | None:
    """Return the record of a unit; None where it is not measured, or is damaged."""
    path = unit_path(run, unit, out)
    try:
        document = decode(UnitDocument, _json(path), "unit")
    except (OSError, ValueError, AuditError):
        return None
    return document if (document.run, document.unit) == (run.identity, unit.content) else None
