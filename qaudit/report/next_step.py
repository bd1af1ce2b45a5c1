"""The one command that decides what is undecided."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from qaudit.core.registry import NO_SCHEME
from qaudit.report.protocol import rescan
from qaudit.types import AuditRecord, ClassVerdict, NextStep

AVAILABLE = "evaluation_documents_available"  # of the protocol


def next_step(
    audit: AuditRecord, classes: Sequence[ClassVerdict], policy: str | None = None
) -> NextStep | None:
    """Return the command that measures what is undecided, and nothing else, on more documents.

    It has the `policy` that judged. Where the text has fewer documents, another is to be named:
    `--evaluation FILE`. None where nothing is undecided, or more documents would not decide it.
    """
    undecided = {
        decision.bit_class: decision
        for decision in classes
        if decision.status == "undecided" and decision.needed_documents is not None
    }
    if not undecided:
        return None
    documents = max(decision.needed_documents or 0 for decision in undecided.values())
    schemes = {row.spec: row.scheme for row in audit.measurements if row.bit_class in undecided}
    names = [schemes[spec] for spec in audit.plan.specs if spec in schemes]
    files = {file.label for file in audit.plan.shipped}
    named = zip(audit.plan.shipped, audit.plan.recipe.shipped, strict=False)  # or the base itself
    changed: dict[str, Any] = {
        "schemes": tuple(name for name in names if name not in files) or (NO_SCHEME,),
        "shipped": tuple(place for file, place in named if file.label in names),
        "bits": tuple(undecided),
        "evaluation_documents": documents,
    }
    available = audit.protocol.get(AVAILABLE)
    if available is not None and available < documents:
        changed["evaluation"] = "FILE"
    if policy is not None:
        changed["policy"] = policy
    command = f"{rescan(audit, **changed)} --out {shlex.quote(_folder(audit, [*undecided]))}"
    return NextStep(tuple(undecided), command, documents, available)


def _folder(audit: AuditRecord, bits: Sequence[str]) -> str:
    """Return a folder of its own: what is decided stays where it is."""
    classes = (f"{text}bit" if text.isdecimal() else text for text in bits)
    return f"{default_folder(audit)}-{'-'.join(classes)}"


def default_folder(audit: AuditRecord) -> str:
    """Return the folder that a scan of an audit's targets writes into where none is named."""
    targets = audit.plan.recipe.targets
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(targets[0]).name if targets else "audit")
    return f"qaudit-out/{name}"
