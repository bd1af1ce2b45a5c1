"""The published JSON schemas, made from the dataclasses of saved documents.

`python -m qaudit.saved.schemas` writes them beside this file; a test holds them equal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qaudit.saved.codec import schema_of
from qaudit.saved.documents import (
    AuditDocument,
    GateAnswer,
    GateFailure,
    PlanDocument,
)

FOLDER = Path(__file__).parent

_NAMES_GROW = (
    "Intervals are three numbers: an estimate, and its name with _low and _high. A bound that is "
    "null is no bound. Names are only added within one version of the schema."
)

DOCUMENTS: dict[str, tuple[Any, str, str]] = {
    "audit": (AuditDocument, "audit.json of qaudit", _NAMES_GROW),
    "plan": (PlanDocument, "the plan of qaudit scan --dry-run --json", _NAMES_GROW),
    "gate": (GateAnswer | GateFailure, "qaudit gate --format json", _NAMES_GROW),
}


def schema(name: str) -> dict[str, Any]:
    return schema_of(*DOCUMENTS[name])


def text_of_schema(name: str) -> str:
    return json.dumps(schema(name), indent=1) + "\n"


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.schema.json"


if __name__ == "__main__":
    for name in DOCUMENTS:
        path_of(name).write_text(text_of_schema(name), encoding="utf-8")
