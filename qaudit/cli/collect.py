"""`qaudit collect`: judge what parts have measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qaudit.cli.options import AsJson, Quiet
from qaudit.cli.terminal import print_result, say


def collect(
    out: Annotated[Path, typer.Argument(help="The folder of the plan.")],
    others: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[OTHER]...", help="Copies of it in which parts ran, too."),
    ] = None,
    *,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Judge what parts have measured, and write the card; no GPU and no torch is needed.

    Exits 3 while parts are missing, and names the round that is due: further draws of calibration
    text, searches for soups. Run the parts and `collect` again until it exits 0.

    Example: qaudit collect out
    """
    from qaudit import audit
    from qaudit.cli.progress import Progress
    from qaudit.errors import MissingParts
    from qaudit.report.card import render_terminal
    from qaudit.saved.audits import to_json

    try:
        with Progress(quiet=quiet) as progress:
            collected = audit.collect(out, *(others or ()), watch=progress)
    except MissingParts as error:
        error.hint = f"measure them: `qaudit part {out} --part K/N` for each K below N, then again"
        raise
    print_result(to_json(collected.record) if as_json else render_terminal(collected.record))
    if not quiet:
        for row in collected.skipped:
            say(f"skipped {row.subject}: {row.reason}")
        say(f"wrote {out / 'card.md'}, report.html, audit.json, evidence/ and plots/")
    return 3 if collected.skipped or collected.record.diagnostics.skipped else 0
