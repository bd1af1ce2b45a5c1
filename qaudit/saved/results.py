"""Measurements on disk, each under the identity of everything that changes its numbers.

A measurement is one `.npz` in `evidence/`: the sums of each document and, as text, what they
belong to. Its name has the start of its key and the file the whole key, so that a hit for another
model, scheme, text or library version cannot happen. A file that does not open, has another key,
or is not the file that was written (`hashes.py`) counts as absent and is measured again. Files are
written under another name and renamed: a kill at any moment leaves whole files only.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from qaudit.errors import AuditError, not_written
from qaudit.saved.codec import decode, parse
from qaudit.saved.hashes import FolderHashes
from qaudit.saved.sums import fidelity_of, positions_of, sums_of
from qaudit.types import (
    CHOICES,
    Evidence,
    Measurement,
    MeasurementRow,
    TaskEvidence,
    TaskRow,
    digest,
)
from qaudit.whole import partial_name, read_regular, remove_stale

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
    checks: str  # a model that fails its self-check is run another way; and checks leave notes
    dtype: str
    device: str
    numerics: int
    libraries: str

    @property
    def key(self) -> str:
        return digest(vars(self))


@dataclass(frozen=True, eq=False)
class Filed:
    """A measurement and its file."""

    measurement: Measurement
    path: Path
    task_paths: tuple[tuple[str, Path], ...] = ()


def with_tasks(filed: Filed, tasks: Sequence[Filed]) -> Filed:
    """Return a result with those of the tasks of the same stream."""
    if not tasks:
        return filed
    parts = tuple(part for one in tasks for part in one.measurement.evidence.tasks)
    paths = tuple((part.task, one.path) for part, one in zip(parts, tasks, strict=True))
    evidence = replace(filed.measurement.evidence, tasks=parts)
    return replace(
        filed, measurement=replace(filed.measurement, evidence=evidence), task_paths=paths
    )


@dataclass(frozen=True)
class _About:
    """What a file of evidence is of."""

    key: str
    subject: str
    scheme: str
    spec: str
    bits_per_weight: float
    seconds: float
    notes: tuple[str, ...]
    weights_sha256: dict[str, str] = field(default_factory=dict)
    parameters: int | None = None
    nbytes: int | None = None


class ResultStore:
    """The `evidence/` folder of one audit."""

    def __init__(self, folder: Path, copies: Path | None = None, writer: str = "") -> None:
        """Use `folder`, made with the first measurement; a copy of its hashes is in `copies`.

        Where several processes measure into one folder, each has its own name as `writer`.
        """
        self._folder, self._copies, self.writer = folder, copies, writer
        self._hashes = FolderHashes(folder, copies, writer)

    @property
    def folder(self) -> Path:
        return self._folder

    def within(self, name: str) -> ResultStore:
        return ResultStore(self._folder / name, self._copies, self.writer)

    def path(self, measurement_name: str, key: str) -> Path:
        return self._folder / f"{slug_of(measurement_name)}--{key[:16]}.npz"

    def remove_stale_files(self) -> None:
        """Remove half-written files of processes that were killed while they wrote."""
        remove_stale(self._folder)

    def find(self, subject: str, scheme: str, key: str) -> Filed | None:
        """Return the measurement with this key, if it is there as it was written."""
        for path in sorted(self._folder.glob(f"*--{key[:16]}.npz")):
            with suppress(OSError, ValueError):
                content = read_regular(path, LARGEST_NBYTES)
                measurement, about = _read(content)
                if about.key == key and self._hashes.agree(path.name, _sha256(content)):
                    return Filed(replace(measurement, subject=subject, scheme=scheme), path)
        return None

    def write(self, measurement: Measurement, key: str) -> Filed:
        """Write a measurement so that it is there whole or not at all."""
        path = self.path(f"{measurement.subject}--{measurement.scheme}", key)
        partial = partial_name(path)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                np.savez_compressed(file, **_arrays(measurement, key))  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
            self._hashes.record(path.name, sha256_of(partial))
            partial.replace(path)
        except OSError as error:
            raise not_written(path, error) from error
        finally:  # an interrupt leaves no partial file either
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        return Filed(measurement, path)


def sha256_of(path: Path) -> str:
    """Hash a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def measured_in(folder: Path) -> tuple[Measurement, ...]:
    """Return every whole measurement in a folder, whatever its key."""
    measurements = []
    for path in sorted(folder.glob("*.npz")):
        with suppress(OSError, ValueError):
            measurements.append(read_measurement(path))
    return tuple(measurements)


def read_measurement(path: Path, sha256: str | None = None) -> Measurement:
    """Read one measurement; ValueError for a damaged one, or one with another hash."""
    content = read_regular(path, LARGEST_NBYTES)
    if sha256 is not None and _sha256(content) != sha256:
        raise OtherContentError("it has another hash")
    return _read(content)[0]


class OtherContentError(ValueError):
    """A file does not have its recorded hash."""


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read(content: bytes) -> tuple[Measurement, _About]:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(part.file_size for part in archive.infolist()) > LARGEST_NBYTES:
                raise ValueError("it unpacks to more than evidence can be")
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            about = decode(_About, parse(str(arrays["about"])), "about")
            known = {name: value for name, value in vars(about).items() if name != "key"}
            seed = int(arrays["calibration_seed"])
            evidence = _evidence(arrays)
            return Measurement(**known, evidence=evidence, calibration_seed=seed), about
    except AuditError as error:
        raise ValueError(f"it does not name what was measured: {error.message}") from error
    except _DAMAGED as error:
        raise ValueError(f"it is damaged: {error}") from error


def _arrays(measurement: Measurement, key: str) -> dict[str, np.ndarray]:
    evidence = measurement.evidence
    about = {one.name: getattr(measurement, one.name) for one in fields(_About)[1:]}
    arrays = {
        "document_sha256": np.array(evidence.document_sha256),
        "nll_sum": evidence.nll_sum,
        "tokens": evidence.tokens,
        "bytes": evidence.nbytes,
        "split": np.array(evidence.split),
        "calibration_seed": np.array(measurement.calibration_seed),
        "about": np.array(json.dumps({"key": key, **about})),
    }
    if evidence.strata:
        arrays["strata"] = np.array(evidence.strata)
    for one in evidence.tasks:  # at most one: each task has a file of its own
        arrays |= _task_arrays(one)
    return arrays | sums_of(evidence.fidelity, evidence.positions)


def _task_arrays(one: TaskEvidence) -> dict[str, np.ndarray]:
    first = np.full(int(one.items.max(initial=-1)) + 1, -1, dtype=np.int64)
    place_P = np.arange(len(one.items)) - np.searchsorted(one.items, one.items)
    for item, place in zip(one.items[one.right][::-1], place_P[one.right][::-1], strict=True):
        first[item] = place
    return {
        "choice_task": np.array([one.task]),
        "choice_nll": one.nll,
        "choice_items": one.items,
        "choice_answers": first,  # of several right ones the first, as earlier versions read it
        "choice_right": one.right,
        "choice_greedy": one.greedy,
    }


def _evidence(arrays: np.lib.npyio.NpzFile) -> Evidence:
    documents = _column(arrays, "document_sha256", "U")
    count = len(documents)
    tokens = _counts(arrays, "tokens", count)
    fidelity = fidelity_of(arrays, tokens)
    return Evidence(
        document_sha256=tuple(map(str, documents)),
        nll_sum=_column(arrays, "nll_sum", "f", count),
        tokens=tokens,
        nbytes=_counts(arrays, "bytes", count),
        split=tuple(map(str, _column(arrays, "split", "U", count))),
        strata=_strata(arrays, count),
        tasks=(_task_evidence(arrays),) if "choice_nll" in arrays.files else (),
        fidelity=fidelity,
        positions=positions_of(arrays, tokens, compared=fidelity is not None),
    )


def _task_evidence(arrays: np.lib.npyio.NpzFile) -> TaskEvidence:
    """Return the options of a task; the first version had one task and one right option."""
    nll = _column(arrays, "choice_nll", "f")
    count = len(nll)
    items = _column(arrays, "choice_items", "iu", count)
    answers = _column(arrays, "choice_answers", "iu")
    if items.tolist() != sorted(items.tolist()) or set(items.tolist()) != set(range(len(answers))):
        raise ValueError("its choices are not those of its items")
    if "choice_task" not in arrays.files:
        place = np.arange(count) - np.searchsorted(items, items)
        right, greedy = place == answers[items], np.zeros(count, dtype=np.bool_)
        return TaskEvidence(CHOICES, nll, items, right, greedy)
    (name,) = _column(arrays, "choice_task", "U", 1)
    marks = [_column(arrays, column, "b", count) for column in ("choice_right", "choice_greedy")]
    return TaskEvidence(str(name), nll, items, *marks)


def _strata(arrays: np.lib.npyio.NpzFile, count: int) -> tuple[str, ...]:
    if "strata" not in arrays.files:
        return ()
    return tuple(map(str, _column(arrays, "strata", "U", count)))


def _column(
    arrays: np.lib.npyio.NpzFile, name: str, kinds: str, count: int | None = None
) -> np.ndarray[Any, Any]:
    """Return a column of the right kind and length; statistics take it as it is."""
    column = arrays[name]
    if column.ndim != 1 or (column.size and column.dtype.kind not in kinds):
        raise ValueError(f"its `{name}` is no column of such values")
    if count is not None and len(column) != count:
        raise ValueError("it holds columns of different lengths")
    return column


def _counts(arrays: np.lib.npyio.NpzFile, name: str, count: int) -> np.ndarray[Any, Any]:
    column = _column(arrays, name, "iu", count)
    if (column < 0).any():
        raise ValueError(f"its `{name}` are below zero")
    return column


def slug_of(text: str) -> str:
    """Return a name for people as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._=-]+", "-", text).strip("-.")[:120] or "subject"


def copy_evidence(rows: Iterable[MeasurementRow | TaskRow], here: Path, there: Path) -> None:
    """Copy the evidence of an audit's measurements into another output folder."""
    for name in dict.fromkeys(row.evidence for row in rows if row.evidence):
        source, copy = here / name, there / name
        if source.resolve() == copy.resolve():
            continue
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
        except OSError as error:
            raise not_written(copy, error) from error
