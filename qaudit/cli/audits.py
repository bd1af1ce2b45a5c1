"""The saved audit that an argument names: a folder, its `audit.json`, or a published one."""

from __future__ import annotations

from pathlib import Path


def audit_at(target: str, *, quiet: bool = False) -> Path:
    """Return the folder or file of an audit; download a published one."""
    if Path(target).exists():
        return Path(target)
    from qaudit.cli.progress import Progress
    from qaudit.hub.publishing.published import audit_folder

    with Progress(quiet=quiet) as progress:
        return audit_folder(target, progress)
