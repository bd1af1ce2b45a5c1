"""Measurements on disk, each under the identity of everything that changes its numbers.

A measurement is one `.npz` in `evidence/`: the sums of each document and, as text, what they
belong to. Its name has the start of its key and the file the whole key, with the identity that the
key is made of, so that a hit for another model, scheme, text or library version cannot happen. A
file that does not open, has another key, or whose content has another seal than was written into
it (`seal_of`) counts as absent and is measured again. Files are written under another name and
renamed: a kill at any moment leaves whole files only.

A seal finds damage and careless edits, and no forgery: an editor can renew it. A signature
(`signature.py`) does.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from qaudit.errors import AuditError, SourceError
from qaudit.saved.arrays import arrays_of, evidence_in
from qaudit.saved.codec import EDITED, decode, parse
from qaudit.types import (
    Evidence,
    Finding,
    GreedySearch,
    Measurement,
    MeasurementRow,
    Subject,
    TaskEvidence,
    TaskRow,
    digest,
)
from qaudit.whole import copy_whole, read_regular, whole_file, write_whole

SEAL = "sha256"
_LARGEST_NBYTES = 2**28


def seal_of(about: Mapping[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Return the seal of columns, and of the text that names what they are of."""
    columns = {
        name: [array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).hexdigest()]
        for name, array in arrays.items()
    }
    return digest([dict(about), columns])


def write_sealed(path: Path, text: str) -> None:
    document = json.loads(text)
    write_whole(path, json.dumps({**document, SEAL: digest(document)}, indent=1) + "\n")


def read_sealed(path: Path) -> dict[str, Any]:
    """Return a sealed document; ValueError or OSError if it is not as it was written."""
    document = json.loads(read_regular(path, _LARGEST_NBYTES))
    if not isinstance(document, dict) or document.pop(SEAL, None) != digest(document):
        raise ValueError("it is not as it was written")
    return document


LARGEST_NBYTES = 2_000_000_000
"""Of all columns of a measurement, unpacked: the sums of twenty million documents."""

_DAMAGED = (
    LookupError, TypeError, EOFError, OverflowError, AttributeError, RuntimeError, MemoryError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What readers of archives and arrays raise for bytes that are not theirs, beside ValueError."""


@dataclass(frozen=True)
class Identity:
    """Everything that changes the numbers of a measurement."""

    subject: str  # content of the weights, merged
    model: str  # content of the configuration
    scheme: str  # canonical form
    scheme_version: int
    corpus: str
    geometry: str  # batches and context
    dtype: str
    device: str
    numerics: int
    libraries: str

    @property
    def key(self) -> str:
        return digest(vars(self))


@dataclass(frozen=True, eq=False)
class ResultFile:
    """A measurement and its file."""

    measurement: Measurement
    path: Path
    task_paths: tuple[tuple[str, Path], ...] = ()
    perturbed: bool = False  # rounded otherwise


def with_tasks(filed: ResultFile, tasks: Sequence[ResultFile]) -> ResultFile:
    if not tasks:
        return filed
    parts = tuple(part for task in tasks for part in task.measurement.evidence.tasks)
    paths = tuple((part.task, task.path) for part, task in zip(parts, tasks, strict=True))
    evidence = filed.measurement.evidence
    evidence = replace(evidence, tasks=(*evidence.tasks, *parts))
    return replace(
        filed,
        measurement=replace(filed.measurement, evidence=evidence),
        task_paths=(*filed.task_paths, *paths),
    )


_COLUMNS = [
    column for column in fields(Measurement) if column.name not in ("evidence", "calibration_seed")
]
_About: Any = make_dataclass(
    "_About",
    [
        ("key", str),
        (SEAL, str),
        *((c.name, get_type_hints(Measurement)[c.name], copy(c)) for c in _COLUMNS),
    ],
    frozen=True,
)
"""What a file of evidence is of: a measurement without its arrays."""


@dataclass(frozen=True)
class ResultStore:
    """The `evidence/` folder of one audit, made with the first measurement."""

    folder: Path

    def within(self, name: str) -> ResultStore:
        return ResultStore(self.folder / name)

    def path(self, measurement_name: str, key: str) -> Path:
        return self.folder / f"{slug_of(measurement_name)}--{key[:16]}.npz"

    def find(self, subject: str, scheme: str, key: str) -> ResultFile | None:
        """Return the measurement with this key, if it is there as it was written."""
        for path in sorted(self.folder.glob(f"*--{key[:16]}.npz")):
            with suppress(OSError, ValueError):
                measurement, about = _read(read_regular(path, LARGEST_NBYTES))
                if about.key == key:
                    return ResultFile(replace(measurement, subject=subject, scheme=scheme), path)
        return None

    def write(
        self, measurement: Measurement, key: str, identity: Identity | None = None
    ) -> ResultFile:
        """Write a measurement so that it is there whole or not at all."""
        measurement = replace(measurement, identity=vars(identity) if identity else None)
        path = self.path(f"{measurement.subject}--{measurement.scheme}", key)
        about = {"key": key} | {c.name: getattr(measurement, c.name) for c in _COLUMNS}
        about = json.loads(json.dumps(about))
        columns = arrays_of(measurement.evidence)
        columns["calibration_seed"] = np.array(measurement.calibration_seed)
        columns["about"] = np.array(json.dumps({**about, SEAL: seal_of(about, columns)}))
        with whole_file(path) as partial, partial.open("wb") as file:
            np.savez_compressed(file, **columns)  # type: ignore[arg-type]
        return ResultFile(measurement, path)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_measurement(path: Path, sha256: str | None = None) -> Measurement:
    """Read one measurement; ValueError for a damaged one, or one with another hash."""
    content = read_regular(path, LARGEST_NBYTES)
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise OtherContentError("it has another hash")
    return _read(content)[0]


class OtherContentError(ValueError):
    """A file does not have its recorded hash."""


def _read(content: bytes) -> tuple[Measurement, Any]:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(part.file_size for part in archive.infolist()) > LARGEST_NBYTES:
                raise ValueError("it unpacks to more than evidence can be")
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}  # each is unpacked once
        about = decode(_About, parse(str(arrays["about"])), "about")
        values = {column.name: getattr(about, column.name) for column in _COLUMNS}
        seed = int(arrays["calibration_seed"])
        evidence = evidence_in(arrays)
        if about.identity is not None and digest(about.identity) != about.key:
            raise ValueError("its identity is not that of its key")
        text = json.loads(str(arrays.pop("about")))
        del text[SEAL]
        if about.sha256 != seal_of(text, arrays):
            raise ValueError("it is not as it was written")
        return Measurement(**values, evidence=evidence, calibration_seed=seed), about
    except AuditError as error:
        raise ValueError(f"it does not name what was measured: {error.message}") from error
    except _DAMAGED as error:
        raise ValueError(f"it is damaged: {error}") from error


def slug_of(text: str) -> str:
    """Return a name for people as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._=-]+", "-", text).strip("-.")[:120] or "subject"


def copy_evidence(rows: Iterable[MeasurementRow | TaskRow], here: Path, there: Path) -> None:
    for name in dict.fromkeys(row.evidence for row in rows if row.evidence):
        if (here / name).resolve() != (there / name).resolve():
            copy_whole(here / name, there / name)


@dataclass(frozen=True, eq=False)
class UnitOutcome:
    """What came of a subject: results, or the error in place of them."""

    label: str
    results: tuple[ResultFile, ...] = ()  # draw by draw, with those that were measured otherwise
    search: GreedySearch | None = None  # of a greedy soup
    soup: Subject | None = None  # that it ended with; None where one checkpoint is best
    findings: tuple[Finding, ...] = ()  # of the search
    failed: Mapping[str, SourceError] = field(default_factory=dict)  # by scheme
    error: SourceError | None = None

    @property
    def plain(self) -> tuple[ResultFile, ...]:
        """The results that are measurements of the subject."""
        return tuple(result for result in self.results if not result.perturbed)


IMPORTED = "imported"
_SAME = ("subject", "model", "scheme")
"""The names of an identity that say which weights, under which scheme."""


def write_imported(
    out: Path, subject: str, tasks: Sequence[tuple[Measurement, TaskEvidence, Sequence[str]]]
) -> None:
    """Write tasks of the streams of a subject, with the hashes of the files that they come from.

    They take the place of what was imported of the subject for these tasks.
    """
    names = {task.task for _, task, _ in tasks}
    for path in (out / "evidence" / IMPORTED).glob("*/*.npz"):
        with suppress(OSError, ValueError):
            stored = read_measurement(path)
            if stored.subject == subject and stored.evidence.tasks[0].task in names:
                path.unlink()
    for measured, task, sources in tasks:
        if measured.identity is None or task.imported is None:
            raise AuditError(
                f"the evidence of `{measured.subject}` under {measured.scheme} has no identity",
                hint=EDITED,
            )
        changed = {
            "corpus": task.imported.items_sha256,
            "geometry": f"imported: {task.imported.about}, sources={digest(sorted(sources))}",
            "dtype": "",
            "device": "",
            "numerics": 0,
            "libraries": "",
        }
        identity = Identity(**{**measured.identity, **changed})  # type: ignore[arg-type]
        evidence = Evidence((), np.zeros(0), *(np.zeros(0, np.int64),) * 2, tasks=(task,))
        alone = replace(measured, evidence=evidence, notes=(), seconds=0.0)
        store = ResultStore(out / "evidence" / IMPORTED / slug_of(task.task))
        store.write(alone, identity.key, identity)


def with_imported(results: Sequence[ResultFile], out: Path) -> list[ResultFile]:
    """Return results with imported tasks: the first draw of each stream takes them."""
    parts = []
    for path in sorted((out / "evidence" / IMPORTED).glob("*/*.npz")):
        try:
            parts.append(ResultFile(read_measurement(path), path))
            if [bool(task.imported) for task in parts[-1].measurement.evidence.tasks] != [True]:
                raise ValueError("it holds no imported answers")
        except (OSError, ValueError) as error:
            raise SourceError(
                f"`{path}` cannot be read: {error}", hint="remove it, and run `qaudit import` again"
            ) from error
    if not parts:
        return list(results)
    firsts: dict[tuple[str, str], int] = {}
    for result in results:
        measured = result.measurement
        cell, seed = (measured.subject, measured.spec), measured.calibration_seed
        firsts[cell] = min(seed, firsts.get(cell, seed))
    joined = []
    for result in results:
        measured, mine = result.measurement, []
        if measured.calibration_seed == firsts[measured.subject, measured.spec]:
            scanned = {task.task for task in measured.evidence.tasks}
            identity = measured.identity or {}
            mine = [
                part
                for part in parts
                if all((part.measurement.identity or {}).get(k) == identity.get(k) for k in _SAME)
                and part.measurement.subject == measured.subject
                and part.measurement.evidence.tasks[0].task not in scanned
            ]
        joined.append(with_tasks(result, mine))
    return joined
