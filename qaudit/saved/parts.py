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

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from qaudit.errors import AuditError, UnfinishedError, UsageError
from qaudit.saved.codec import decode, encode, parse, text_of
from qaudit.saved.documents import (
    PassDocument,
    Resolution,
    RoundDocument,
    RunDocument,
    UnitDocument,
)
from qaudit.saved.plans import (
    FILE,
    LARGEST_NBYTES,
    checkpoints_of,
    plan_document,
    plan_of,
    pointers,
)
from qaudit.saved.plans import subjects_in as subjects_of
from qaudit.saved.results import slug_of
from qaudit.types import Checkpoint, Pass, Pins, Plan, Run, WorkUnit, digest, units_of, work_of
from qaudit.version import __version__
from qaudit.whole import read_regular, write_whole

FOLDER, PLAN, UNITS, DIRECTORY = "parts", "plan.json", "units", "directory.txt"
OLD_LOCK = "plan.lock.json"
"""The name of the plan in the folders of older versions."""

RUN_SCHEMA = "2"
FIRST = 1
"""The round of the plan itself."""


def write_plan(plan: Plan, resolution: Resolution, pins: Pins | None, out: Path) -> None:
    """Write a plan for all processes; one that measures the same stays."""
    with suppress(UsageError):
        before = _document(out)
        same = before.resolution == resolution and pins in (None, before.pins)
        if same and work_of(_plan(before)) == work_of(plan):
            return
    checkpoints = checkpoints_of((*plan.subjects, *plan.releases))
    document = RunDocument(
        qaudit=__version__,
        resolution=resolution,
        plan=plan_document(plan),
        passes=_round(FIRST, plan.passes, checkpoints),
        pins=pins,
    )
    document = replace(document, digest=digest_of(encode(document)))
    write_whole(out / PLAN, text_of(encode(document)))
    write_whole(out / FOLDER / DIRECTORY, str(Path.cwd()))
    for later in (out / FOLDER).glob("round-*.json"):  # of another plan
        later.unlink(missing_ok=True)


def read_run(out: Path) -> Run:
    """Read the plan of a folder and what its processes agree on."""
    document = _document(out)
    if document.pins is None:
        raise unfinished(out, 0, len(document.plan.subjects))
    return Run(_plan(document), document.pins)


def is_unfinished(out: Path) -> bool:
    """Return whether a folder has a plan and no audit."""
    return (out / PLAN).is_file() and not (out / FILE).exists()


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


def _document(out: Path) -> RunDocument:
    path = out / PLAN
    again = "run the same `qaudit scan` or `qaudit plan` again"
    refuse_older(out)
    try:
        contents = _json(path)
        wrote = contents.get("qaudit") if isinstance(contents, dict) else None
        document = decode(RunDocument, contents, "plan")
        if document.schema != RUN_SCHEMA:
            raise ValueError(f"it has schema {document.schema}, of qaudit {wrote}")
        _passes(document.passes, document.plan.checkpoints)
    except FileNotFoundError as error:
        raise UsageError(
            f"`{out}` has no plan", hint=f"make one: `qaudit plan TARGET --out {out}`"
        ) from error
    except (OSError, ValueError, AuditError) as error:
        raise UsageError(f"`{path}` cannot be read: {error}", hint=again) from error
    if document.digest != digest_of(contents):
        raise UsageError(f"`{path}` was edited: its digest is of other contents", hint=again)
    return document


def _plan(document: RunDocument) -> Plan:
    passes = _passes(document.passes, document.plan.checkpoints)
    return replace(plan_of(document.plan), passes=passes)


def refuse_older(out: Path) -> None:
    """Refuse a folder that an older version began and did not finish."""
    if (out / PLAN).exists() or (out / FILE).exists():
        return
    for path in (out / FOLDER / PLAN, out / OLD_LOCK):
        with suppress(OSError, ValueError, AttributeError):
            version = str(_json(path).get("qaudit"))[:20]
            finish = f"finish it with `pip install qaudit-llm=={version}`, or "
            raise UsageError(
                f"`{out}` was begun by an earlier qaudit, {version}, which this one, "
                f"{__version__}, cannot finish",
                hint=f"{finish * (version != __version__)}name another folder with `--out`",
            )


def _json(path: Path) -> Any:
    return parse(read_regular(path, LARGEST_NBYTES).decode())


def digest_of(contents: Any) -> str:
    """Digest the rest of a document as its file has it; a later version may know more fields."""
    return digest({**contents, "digest": ""})


def write_round(number: int, passes: Sequence[Pass], run: Run, out: Path) -> None:
    """Write the passes of a further round; an equal file is left alone."""
    if number == FIRST:
        return
    checkpoints = checkpoints_of((*run.plan.subjects, *run.plan.releases))
    text = text_of(encode(_round(number, passes, checkpoints)))
    path = _round_path(number, out)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_whole(path, text)
        for later in range(number + 1, last_round(out) + 1):  # they followed from another one
            _round_path(later, out).unlink(missing_ok=True)


def read_round(run: Run, out: Path, number: int) -> tuple[Pass, ...]:
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
    names = [path.stem.partition("-")[2] for path in (out / FOLDER).glob("round-*.json")]
    return max([FIRST, *(int(name) for name in names if name.isdecimal())])


def _round_path(number: int, out: Path) -> Path:
    return out / FOLDER / f"round-{number}.json"


def _round(number: int, passes: Sequence[Pass], known: Sequence[Checkpoint]) -> RoundDocument:
    subjects = tuple(dict.fromkeys(step.subject for step in passes))
    places = {subject: place for place, subject in enumerate(subjects)}
    values = [
        {field.name: getattr(step, field.name) for field in fields(Pass)}
        | {"subject": places[step.subject]}
        for step in passes
    ]
    return RoundDocument(
        round=number,
        subjects=tuple(pointers(subject, known) for subject in subjects),
        passes=tuple(PassDocument(**value) for value in values),
    )


def _passes(document: RoundDocument, known: Sequence[Checkpoint]) -> tuple[Pass, ...]:
    subjects = subjects_of(document.subjects, known, "round.subjects")
    for place, document_of_pass in enumerate(document.passes):
        if not 0 <= document_of_pass.subject < len(subjects):
            raise AuditError(
                f"`round.passes[{place}].subject` points to no subject",
                hint="run `qaudit plan` again",
            )
    return tuple(
        Pass(**{**vars(step), "subject": subjects[step.subject]}) for step in document.passes
    )


def unit_path(run: Run, unit: WorkUnit, out: Path) -> Path:
    """Return the place of a unit's record: it names what was measured, and by which plan."""
    name = f"{slug_of(unit.label)}--{digest([run.identity, unit.content])[:16]}.json"
    return out / FOLDER / UNITS / name


def write_unit(document: UnitDocument, path: Path) -> None:
    write_whole(path, text_of(encode(document)))


def read_unit(run: Run, unit: WorkUnit, out: Path) -> UnitDocument | None:
    """Return the record of a unit; None where it is not measured, or is damaged."""
    path = unit_path(run, unit, out)
    try:
        document = decode(UnitDocument, _json(path), "unit")
        is_sound = (document.run, document.unit) == (run.identity, unit.content)
        return document if is_sound and _is_sound(document) else None
    except (OSError, ValueError, AuditError, LookupError, TypeError):
        return None


def _is_sound(document: UnitDocument) -> bool:
    """Return whether a record has what is read of it, and no name leads out of its folder."""
    environment, draws = document.environment, document.protocol.get("calibration_draws", 1)
    for name in ("began", "ended"):
        datetime.fromisoformat(environment[name])
    used = [value for name, value in environment.items() if name.startswith(("hub_", "memory_"))]
    numbers = (environment["memory_baseline_nbytes"], environment["memory_peak_nbytes"], *used)
    return (
        isinstance(environment["device"], str)
        and all(type(number) in (int, float) for number in numbers)
        and type(draws) is int
        and 0 < draws < 1000
        and all(map(_is_inside, evidence_of(document)))
    )


def evidence_of(document: UnitDocument) -> list[str]:
    names = [result.evidence for result in document.results]
    names += [file.evidence for result in document.results for file in result.tasks]
    tables = document.diagnostics.rows.values()
    return names + [str(row["details"]) for rows in tables for row in rows if row.get("details")]


def _is_inside(name: str) -> bool:
    parts = name.split("/")
    return (
        name.isprintable()
        and "\\" not in name
        and parts[0] == "evidence"
        and len(parts) > 1
        and not any(part in ("", ".", "..") for part in parts)
    )
