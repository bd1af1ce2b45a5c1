"""`qaudit-export.json`: which weights an exported folder holds, and which audit measured them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qaudit.errors import AuditError
from qaudit.saved.codec import decode, encode, parse, refuse_other_schema, text_of
from qaudit.types import Signature
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
