"""What `qaudit diff` does once its options are parsed: read both, compare, print."""

from __future__ import annotations

from qaudit.cli.audits import believed
from qaudit.cli.speech import print_result
from qaudit.errors import UsageError
from qaudit.judge.diff import Side
from qaudit.judge.diff import diff as compare
from qaudit.report.diff import FORMATS, render


def carry_out(a: str, b: str, form: str) -> None:
    """Print what changed from a to b."""
    if form not in FORMATS:  # before anything is fetched
        raise UsageError(f"there is no format `{form}`", hint=f"one of {', '.join(FORMATS)}")
    print_result(render(compare(_side(a), _side(b)), form))


def _side(target: str) -> Side:
    saved, _ = believed(target)
    return Side(target, saved.audit, saved.measurements)
