"""`qaudit lab run`: a controlled experiment, from training to its card and its summary."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from qaudit.cli import options as o


def _option(panel: str, text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


Names = Annotated[
    list[str],
    typer.Argument(metavar="NAME...", help="Experiments (`qaudit list experiments`), or a file."),
]
Size = Annotated[
    str,
    _option(
        "What to run", "smoke (minutes), cpu (half an hour a seed) or gpu.", envvar="QAUDIT_SIZE"
    ),
]
Seeds = Annotated[
    int,
    _option(
        "What to run",
        "So many seeds, from 1 on: each has its own first weights and order of data.",
        envvar="QAUDIT_SEEDS",
        min=1,
    ),
]
Compiled = Annotated[
    bool,
    _option(
        "How to compute",
        "Use torch.compile; needs a C++ compiler.",
        "--compile",
        envvar="QAUDIT_COMPILE",
    ),
]
Out = Annotated[
    Path,
    _option("Output", "Folder for runs, which experiments share, and cards.", envvar="QAUDIT_OUT"),
]
AsJson = Annotated[
    bool, _option("Output", "Print the summaries as JSON.", "--json", envvar="QAUDIT_JSON")
]


def run(
    names: Names,
    size: Size = "smoke",
    seeds: Seeds = 1,
    device: o.Device = None,
    compiled: Compiled = False,
    out: Out = Path("qaudit-out/lab"),
    dry_run: o.DryRun = False,
    as_json: AsJson = False,
    quiet: o.Quiet = False,
) -> None:
    """Train a controlled experiment, scan it, and sum up what its seeds show.

    Run the same command again to go on; more seeds are added to those that are there.

    Example: qaudit lab run wsd-cosine --size cpu --seeds 3 --dry-run
    """
    from qaudit.cli.experimenting import Asked, carry_out

    where = device or "auto"
    asked = Asked(tuple(names), size, seeds, out, where, compiled, dry_run, as_json, quiet)
    sys.exit(carry_out(asked))
