"""`qaudit pick`: name the one thing to ship from saved audits. Imports no torch."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from qaudit.cli import options as o


def pick(
    audits: Annotated[
        list[str],
        typer.Argument(metavar="AUDIT...", help="Output folders; a target is scanned first."),
    ],
    objective: Annotated[
        str,
        typer.Option(
            help="loss, loss@SCHEME, bits@1% (within a margin of full precision) or pareto.",
            envvar="QAUDIT_OBJECTIVE",
        ),
    ] = "loss",
    as_json: o.AsJson = False,
    quiet: o.Quiet = False,
) -> None:
    """Name one subject and scheme to ship, why, and what would change the answer.

    Exits with 3 when the documents cannot confirm it.

    Example: qaudit pick qaudit-out/demo --objective bits@2%
    """
    from qaudit.cli.picking import carry_out

    sys.exit(carry_out(audits, objective, as_json=as_json, quiet=quiet))
