"""What `qaudit diff` does once its options are parsed: read both, compare, print."""

from __future__ import annotations

from pathlib import Path

from qaudit import __version__
from qaudit.cli.speech import Bars, print_result
from qaudit.engine.saved import read_saved
from qaudit.errors import UsageError
from qaudit.judge.agreement import refuse_edited
from qaudit.judge.diff import Side
from qaudit.judge.diff import diff as compare
from qaudit.judge.table import Table
from qaudit.report.diff import FORMATS, render


def carry_out(a: str, b: str, form: str) -> None:
    """Print what changed from a to b."""
    if form not in FORMATS:  # before anything is fetched
        raise UsageError(f"there is no format `{form}`", hint=f"one of {', '.join(FORMATS)}")
    print_result(render(compare(_side(a), _side(b)), form))


def _side(target: str) -> Side:
    """Read an audit and its evidence, and refuse one that does not agree with itself."""
    saved = read_saved(_folder(target))
    audit = saved.audit
    table = Table.of(audit.subjects, saved.measurements, audit.plan.recipe.confidence)
    refuse_edited(audit, table, version=__version__)
    return Side(target, audit, saved.measurements)


def _folder(target: str) -> Path:
    if Path(target).exists():
        return Path(target)
    from qaudit.engine.published import audit_folder  # the Hub's client takes a while to load

    with Bars(quiet=False) as bars:
        return audit_folder(target, bars)
