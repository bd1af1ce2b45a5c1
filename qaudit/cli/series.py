"""`qaudit series`: what a target holds, as a table, before anything is measured."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from qaudit.cli import options as o

Check = Annotated[
    bool,
    typer.Option(
        "--check",
        envvar="QAUDIT_CHECK",
        help="Read every file tree, so that equal revisions are known.",
    ),
]
All = Annotated[bool, typer.Option("--all", envvar="QAUDIT_ALL", help="Show every row; fold none.")]
AsJson = Annotated[
    bool, typer.Option("--json", envvar="QAUDIT_JSON", help="Print the series as JSON, whole.")
]
After = Annotated[
    str | None,
    typer.Option(
        "--after",
        envvar="QAUDIT_AFTER",
        metavar="AUDIT",
        help="Say which checkpoints are worth measuring next, by this audit of the series.",
    ),
]


def series(
    targets: o.Targets,
    checkpoints: o.Checkpoints = None,
    stage: o.Stage = None,
    every: o.Every = None,
    last: o.Last = None,
    limit: o.Limit = None,
    family: o.Family = None,
    check: Check = False,
    after: After = None,
    everything: All = False,
    as_json: AsJson = False,
    quiet: o.Quiet = False,
) -> None:
    """Show a series: stage, step, tokens, learning rate, size, and what is odd.

    What a scan would measure is marked. Names cost one call of the Hub; only the file trees of
    what is selected are read, and kept for ever, unless `--check` asks for all. `--after` predicts
    from an audit what the other checkpoints would show, and names the most promising.

    Example: qaudit series allenai/OLMo-2-1124-7B --check
    """
    from qaudit.cli.cataloguing import Request, carry_out

    asked = {
        "targets": targets,
        "checkpoints": checkpoints,
        "stages": stage,
        "every": every,
        "last": last,
        "limit": limit,
        "family": family,
    }
    sys.exit(carry_out(Request(asked, check, everything, as_json, quiet, after)))
