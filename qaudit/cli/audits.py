"""The saved audit that an argument names: a folder, its `audit.json`, or a published one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qaudit.judge.table import Table
    from qaudit.saved.audits import SavedAudit


def audit_at(target: str, *, quiet: bool = False) -> Path:
    """Return the folder or file of an audit; download a published one."""
    if Path(target).exists():
        return Path(target)
    from qaudit.cli.progress import Progress
    from qaudit.hub.publishing.published import audit_folder

    with Progress(quiet=quiet) as progress:
        return audit_folder(target, progress)


def read_verified(target: str, *, quiet: bool = False) -> tuple[SavedAudit, Table]:
    """Read an audit with its evidence; refuse one that does not agree with itself."""
    from qaudit.audit import checked_table, load

    audit = load(audit_at(target, quiet=quiet))
    return audit.evidence, checked_table(audit)
