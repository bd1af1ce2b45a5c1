"""`qaudit diff`: what changed between two saved audits. Imports no torch."""

from __future__ import annotations

from typing import Annotated

import typer

_Audit = "An output folder, its audit.json, or a published one (`org/name@v1`)."


def diff(
    a: Annotated[str, typer.Argument(help=f"The one before. {_Audit}")],
    b: Annotated[str, typer.Argument(help="The one after, named likewise.")],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="terminal, md or json.",
            envvar="QAUDIT_FORMAT",
            rich_help_panel="Output",
        ),
    ] = "terminal",
) -> None:
    """Say what changed from one saved audit to another, and what may be behind it.

    No gate: exits with 0 whatever it finds, once the two could be compared.

    Example: qaudit diff qaudit-out/demo qaudit-out/demo
    """
    from qaudit.cli.diffing import carry_out

    carry_out(a, b, form)
