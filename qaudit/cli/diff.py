"""`qaudit diff`: what changed between two saved audits. Imports no torch."""

from __future__ import annotations

from typing import Annotated

import typer

from qaudit.cli.options import option
from qaudit.cli.terminal import print_result
from qaudit.settings import OUTPUT

_AUDIT = "An output folder, its audit.json, or a published one (`org/name@v1`)."


def diff(
    a: Annotated[str, typer.Argument(help=f"The earlier audit. {_AUDIT}")],
    b: Annotated[str, typer.Argument(help="The later audit, named likewise.")],
    form: Annotated[str, option(OUTPUT, "terminal, md or json.", "--format")] = "terminal",
) -> int:
    """Show what changed from one saved audit to another, and what may have caused it.

    This is no gate: it exits with 0 whatever changed, once the two can be compared.

    Example: qaudit diff qaudit-out/demo qaudit-out/demo
    """
    from qaudit.cli.audits import audit_at
    from qaudit.judge.diff import Side
    from qaudit.judge.diff import diff as compare
    from qaudit.report.diff import FORMATS, render
    from qaudit.report.format import renderer_of
    from qaudit.saved.evidence import read_saved

    renderer_of(form, FORMATS)  # a wrong one is refused before anything is downloaded
    audits = [(target, read_saved(audit_at(target)).checked()) for target in (a, b)]
    before, after = (Side(target, saved.audit, saved.measurements) for target, saved in audits)
    print_result(render(compare(before, after), form))
    return 0
