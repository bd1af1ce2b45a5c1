"""What `export` reads: kept quantized weights, tables of bits, and the record of a folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from qaudit.core.mixture import DIGITS, NO_TABLE, Mixture, Table
from qaudit.core.scheme import Scheme
from qaudit.errors import AuditError, SchemeError
from qaudit.saved.codec import decode, read_object, refuse_other_schema
from qaudit.saved.results import read_measurement
from qaudit.support.foreign import json_of
from qaudit.types import AuditRecord, Measurement, Signature, digest
from qaudit.whole import read_regular, write_whole

FILE = "qaudit-export.json"


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


def read_export(folder: Path) -> ExportRecord:
    """Read the record of an exported folder; refuse a damaged or foreign one."""
    return decode(ExportRecord, export_document(folder), "export")


def export_document(folder: Path) -> dict[str, Any]:
    path = folder / FILE
    if not path.exists():
        raise AuditError(
            f"there is no `{FILE}` in `{folder}`", hint="name a folder that `qaudit export` wrote"
        )
    document = read_object(path, f"`{path}`", "export it again")
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
        key = ""
        with suppress(OSError, ValueError):
            key = key_of(read_measurement(out / row.evidence, row.evidence_sha256))
        if not kept_folder(out / _EVIDENCE, key).is_dir():
            yield row.subject, row.scheme


TABLES = "tables"
"""The folder in `evidence/` for the bits of each linear of mixtures.

A plan has `table=` and the first digits of the sha256 of the table; the table itself is a file of
that name there.
"""


def read_table(path: Path) -> Table:
    try:
        table = json_of(read_regular(path).decode())
        rows: dict[str, str] = {str(name): str(bits) for name, bits in table.items()}
        if rows and not set("".join(rows.values())) - {"0", *DIGITS}:
            return rows
        raise ValueError("it has other values than digits of 2 to 8 bits")
    except (OSError, ValueError, AttributeError) as error:
        raise SchemeError(
            f"`{path}` is no table of bits: {error}",
            hint='write `{"self_attn.q_proj": "433"}`, a digit for each block, or take a file of '
            "`evidence/tables` of another audit",
        ) from error


def write_table(table: Table, path: Path) -> None:
    write_whole(path, json.dumps(dict(table), indent=1) + "\n")


def pinned_tables(
    schemes: Iterable[Scheme], evidence: Path, *, keep: bool = False
) -> tuple[Scheme, ...]:
    """Return schemes whose tables are named by their content; `keep` writes these tables there."""
    pinned: list[Scheme] = []
    for scheme in schemes:
        if isinstance(scheme, Mixture) and scheme.table != NO_TABLE:
            kept = evidence / TABLES / f"{scheme.table}.json"
            table = read_table(kept if kept.is_file() else Path(scheme.table))
            name = digest(dict(table))[:12]
            if keep:
                write_table(table, evidence / TABLES / f"{name}.json")
            scheme = replace(scheme, table=name)
        pinned.append(scheme)
    return tuple(pinned)
