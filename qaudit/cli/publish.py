"""`qaudit publish`: open a pull request with a card, the audit and its evidence. No torch here."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from qaudit.cli import options as o

_WHAT, _OUTPUT = "What to write", "Output"


def publish(
    audit: Annotated[
        str,
        typer.Argument(
            metavar="AUDIT", help="An output folder, its audit.json, or a repo that holds one."
        ),
    ],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="A model on the Hub: `org/name`.")],
    subject: Annotated[
        str | None,
        typer.Option(
            help="Which subject REPO holds, where its weights do not tell.",
            envvar="QAUDIT_SUBJECT",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    message: Annotated[
        str,
        typer.Option(
            help="Title of the pull request; `[qaudit]` is put behind it.",
            envvar="QAUDIT_MESSAGE",
            rich_help_panel=_WHAT,
        ),
    ] = "Add a quantization audit",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print every file and every change of the README; write nothing.",
            envvar="QAUDIT_DRY_RUN",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print what was written, and where, as JSON.",
            envvar="QAUDIT_JSON",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    quiet: o.Quiet = False,
) -> None:
    """Open a pull request on the Hub with the card, the audit and its evidence.

    Run it again with the same audit and it finds its own pull request; with a newer one, and it
    adds to it. The token is that of `hf auth login` or `HF_TOKEN`, and is given nowhere else.

    Example: qaudit publish qaudit-out/demo org/name --dry-run
    """
    from qaudit.cli.publishing import Request, carry_out

    sys.exit(carry_out(Request(audit, repo, subject, message, dry_run, as_json, quiet)))
