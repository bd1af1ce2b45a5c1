"""`qaudit gate`: hold a saved audit to a policy. Imports no torch."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from qaudit.cli import options as o

_JUDGED, _OUTPUT = "What it is held to", "Output"


def gate(
    audit: Annotated[
        str,
        typer.Argument(
            metavar="AUDIT", help="An output folder, its audit.json, or a repo that holds one."
        ),
    ],
    policy: Annotated[
        str,
        typer.Option(
            help="explore, release, strict, or a YAML file of your own.",
            envvar="QAUDIT_POLICY",
            rich_help_panel=_JUDGED,
        ),
    ] = "release",
    baseline: Annotated[
        str | None,
        typer.Option(
            help="The audit of the release before: a folder, or `org/name@revision`.",
            envvar="QAUDIT_BASELINE",
            rich_help_panel=_JUDGED,
        ),
    ] = None,
    form: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            help="terminal, md, json, junit, sarif, github, badge or shields; "
            "`junit=FILE` writes it there. Repeatable.",
            envvar="QAUDIT_FORMAT",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    quiet: o.Quiet = False,
) -> None:
    """Hold an audit to a policy, by its saved evidence: no GPU, no model, no torch.

    Exits with 0 if it holds, 1 if it is breached, 3 if documents or measurements are missing
    to tell. No format changes that.

    Example: qaudit gate qaudit-out/demo --policy strict --format junit=gate.xml
    """
    from qaudit.cli.gating import Request, carry_out

    sys.exit(carry_out(Request(audit, policy, baseline, tuple(form or ()), quiet)))
