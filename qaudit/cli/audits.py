"""The saved audit that an argument names: a folder, its `audit.json`, or one that is published."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qaudit import __version__
from qaudit.cli.speech import Bars

if TYPE_CHECKING:
    from qaudit.judge.table import Table
    from qaudit.saved.saved import SavedAudit


def audit_at(target: str, *, quiet: bool = False) -> Path:
    """Return the folder of an audit, or its file; fetch it where it is published."""
    if Path(target).exists():
        return Path(target)
    from qaudit.hub.publishing.published import (
        audit_folder,  # the Hub's client takes a while to load
    )

    with Bars(quiet=quiet) as bars:
        return audit_folder(target, bars)


def believed(target: str, *, quiet: bool = False) -> tuple[SavedAudit, Table]:
    """Read an audit with its evidence, and refuse one that does not agree with itself."""
    from qaudit.judge.agreement import refuse_edited
    from qaudit.judge.table import Table
    from qaudit.saved.saved import (
        read_saved,  # with numpy and scipy, which a report has no use for
    )

    saved = read_saved(audit_at(target, quiet=quiet))
    audit = saved.audit
    table = Table.of(audit.subjects, saved.measurements, audit.plan.recipe.confidence)
    refuse_edited(audit, table, version=__version__)
    return saved, table
