"""Quantized weights that a scan keeps for `export`: where they are, and which stay. No torch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from qaudit.saved.results import read_measurement
from qaudit.types import AuditRecord, Measurement, MeasurementRow, digest

_EVIDENCE, _FOLDER = "evidence", "kept"
SHAPES = "shapes.json"
"""The shapes of all tensors of a subject."""


def kept_folder(evidence: Path, name: str) -> Path:
    """Return the folder of a result's linears by its key, or of a subject's other tensors."""
    return evidence / _FOLDER / name[:32]


def key_of(measurement: Measurement) -> str:
    return digest(measurement.identity or {})


def kept_files(out: Path) -> list[Path]:
    files = (out / _EVIDENCE / _FOLDER).rglob("*")
    return [path for path in files if path.suffix == ".safetensors" or path.name == SHAPES]


def not_kept(record: AuditRecord, out: Path, specs: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what ships under schemes whose weights were to be kept, and is not there."""
    for row in _shipping_rows(record):
        if row.spec in specs and not kept_folder(out / _EVIDENCE, _key_in(row, out)).is_dir():
            yield row.subject, row.scheme


def keep_what_ships(record: AuditRecord, out: Path) -> None:
    """Remove the kept weights of what does not ship of any class."""
    if not (out / _EVIDENCE / _FOLDER).is_dir():
        return
    rows = _shipping_rows(record)
    labels = {row.subject for row in rows}
    contents = (subject.content for subject in record.subjects if subject.label in labels)
    names = {name[:32] for name in (*contents, *(_key_in(row, out) for row in rows))}
    for folder in (out / _EVIDENCE / _FOLDER).iterdir():
        if folder.name not in names:
            shutil.rmtree(folder, ignore_errors=True)


def _shipping_rows(record: AuditRecord) -> list[MeasurementRow]:
    ships = {(c.subject, c.scheme) for c in (record.verdict.classes if record.verdict else ())}
    seed = record.protocol.get("calibration_seed", 0)
    rows = (row for row in record.measurements if (row.subject, row.scheme) in ships)
    return [row for row in rows if row.calibration_seed == seed]


def _key_in(row: MeasurementRow, out: Path) -> str:
    with suppress(OSError, ValueError):
        return key_of(read_measurement(out / row.evidence, row.evidence_sha256))
    return ""
