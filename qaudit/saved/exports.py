"""What `export` reads: kept quantized weights, and `qaudit-export.json`, the record of a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from qaudit.errors import AuditError
from qaudit.saved.codec import decode, encode, parse, refuse_other_schema, text_of
from qaudit.saved.results import read_measurement
from qaudit.types import AuditRecord, Measurement, MeasurementRow, Signature, digest
from qaudit.whole import read_regular, write_whole

FILE = "qaudit-export.json"
_LARGEST_NBYTES = 2**28


@dataclass(frozen=True)
class ExportRecord:
    """What was exported. Hashes are of shape, dtype and bytes of a tensor."""

    schema: Literal["1"]
    qaudit: str
    format: str
    subject: str
    content: str  # identifies the weights that were quantized
    scheme: str
    spec: str
    dtype: str  # of the dense weights that were measured
    device: str
    calibration_seed: int
    corpus_sha256: str
    audit_sha256: str | None  # of audit.json; None: exported from a target
    bits_per_weight: float
    dense: dict[str, str]  # linear -> sha256 of its dense weight, as it was measured
    rest: dict[str, str]  # other tensors as they are stored
    files: dict[str, str]  # sha256 of every file but this one and README.md
    libraries: dict[str, Any]
    mixture: dict[str, int] = field(default_factory=dict)  # bits of each linear, where they differ
    signature: Signature | None = None  # of this record, where the audit is signed


def write_export(record: ExportRecord, folder: Path) -> None:
    write_whole(folder / FILE, text_of(encode(record)))


def read_export(folder: Path) -> ExportRecord:
    """Read the record of an exported folder; refuse a damaged or foreign one."""
    return decode(ExportRecord, export_document(folder), "export")


def export_document(folder: Path) -> dict[str, Any]:
    path = folder / FILE
    try:
        document = parse(read_regular(path, _LARGEST_NBYTES).decode())
    except FileNotFoundError as error:
        raise AuditError(
            f"there is no `{FILE}` in `{folder}`", hint="name a folder that `qaudit export` wrote"
        ) from error
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        raise AuditError(f"`{path}` cannot be read: {reason}", hint="export it again") from error
    if not isinstance(document, dict):
        raise AuditError(f"`{path}` is not an object", hint="export it again")
    refuse_other_schema(document, f"`{path}`", "export it again")
    return document


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
    """Yield what was measured under schemes whose weights were to be kept, and is not there."""
    seed = record.protocol.get("calibration_seed", 0)
    for row in record.measurements:
        if row.spec not in specs or row.calibration_seed != seed:
            continue
        if not kept_folder(out / _EVIDENCE, _key_in(row, out)).is_dir():
            yield row.subject, row.scheme


def _key_in(row: MeasurementRow, out: Path) -> str:
    with suppress(OSError, ValueError):
        return key_of(read_measurement(out / row.evidence, row.evidence_sha256))
    return ""
