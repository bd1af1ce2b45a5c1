"""`qaudit report`: render a saved audit again. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    audit: Annotated[Path, typer.Argument(help="An output folder, or its audit.json.")],
    form: Annotated[
        str, typer.Option("--format", help="md, terminal or json.", envvar="QAUDIT_FORMAT")
    ] = "md",
) -> None:
    """Print a saved audit as a card, a summary or JSON.

    Example: qaudit report qaudit-out/demo --format terminal
    """
    from qaudit.cli.speech import print_result
    from qaudit.report.folder import read_folder, render

    print_result(render(read_folder(audit), form))
