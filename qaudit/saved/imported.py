"""Answers that another tool generated, in `evidence/imported/`, and attached to measurements.

Each file holds one task of one subject under one scheme, and the identity of the measurement that
it belongs to: weights, configuration and scheme. A scan of other weights does not take it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from qaudit.errors import AuditError, SourceError
from qaudit.saved.codec import EDITED
from qaudit.saved.results import Filed, Identity, ResultStore, read_measurement, slug_of, with_tasks
from qaudit.types import Evidence, Measurement, TaskEvidence, digest

FOLDER = "imported"
_SAME = ("subject", "model", "scheme")
"""The names of an identity that say which weights, under which scheme."""


def write_imported(
    out: Path, subject: str, tasks: Sequence[tuple[Measurement, TaskEvidence, Sequence[str]]]
) -> None:
    """Write tasks of the streams of a subject, with the hashes of the files that they come from.

    They take the place of what was imported of the subject for these tasks.
    """
    names = {task.task for _, task, _ in tasks}
    for path in (out / "evidence" / FOLDER).glob("*/*.npz"):
        with suppress(OSError, ValueError):
            stored = read_measurement(path)
            if stored.subject == subject and stored.evidence.tasks[0].task in names:
                path.unlink()
    for measured, task, sources in tasks:
        identity = _identity(measured, task, sources)
        evidence = Evidence((), np.zeros(0), *(np.zeros(0, np.int64),) * 2, (), tasks=(task,))
        alone = replace(measured, evidence=evidence, notes=(), seconds=0.0)
        _store(out, task.task).write(alone, identity.key, identity)


def _store(out: Path, task: str) -> ResultStore:
    return ResultStore(out / "evidence" / FOLDER / slug_of(task))


def _identity(measured: Measurement, task: TaskEvidence, sources: Sequence[str]) -> Identity:
    if measured.identity is None or task.imported is None:
        raise AuditError(
            f"the evidence of `{measured.subject}` under {measured.scheme} has no identity",
            hint=EDITED,
        )
    changed = {
        "corpus": task.imported.items_sha256,
        "geometry": f"imported: {task.imported.about}",
        "checks": f"sources={digest(sorted(sources))}",
        "dtype": "",
        "device": "",
        "numerics": 0,
        "libraries": "",
    }
    return Identity(**{**measured.identity, **changed})  # type: ignore[arg-type]


def with_imported(results: Sequence[Filed], out: Path) -> list[Filed]:
    """Return results with imported tasks: the first draw of each stream takes them."""
    parts = [
        Filed(_read(path), path) for path in sorted((out / "evidence" / FOLDER).glob("*/*.npz"))
    ]
    if not parts:
        return list(results)
    firsts: dict[tuple[str, str], int] = {}
    for result in results:
        cell, seed = _cell(result.measurement), result.measurement.calibration_seed
        firsts[cell] = min(seed, firsts.get(cell, seed))
    return [
        _with_parts(result, parts)
        if result.measurement.calibration_seed == firsts[_cell(result.measurement)]
        else result
        for result in results
    ]


def _cell(measured: Measurement) -> tuple[str, str]:
    return measured.subject, measured.spec


def _with_parts(result: Filed, parts: Sequence[Filed]) -> Filed:
    scanned = {task.task for task in result.measurement.evidence.tasks}
    identity = result.measurement.identity or {}
    mine = [
        part
        for part in parts
        if all((part.measurement.identity or {}).get(k) == identity.get(k) for k in _SAME)
        and part.measurement.subject == result.measurement.subject
        and part.measurement.evidence.tasks[0].task not in scanned
    ]
    return with_tasks(result, mine)


def _read(path: Path) -> Measurement:
    try:
        measurement = read_measurement(path)
        if len(measurement.evidence.tasks) != 1 or not measurement.evidence.tasks[0].imported:
            raise ValueError("it holds no imported answers")
        return measurement
    except (OSError, ValueError) as error:
        raise SourceError(
            f"`{path}` cannot be read: {error}", hint="remove it, and run `qaudit import` again"
        ) from error
