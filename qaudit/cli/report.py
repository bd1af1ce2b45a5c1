"""`qaudit report`: render a saved audit again. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_PANEL = "Output"


def report(
    audit: Annotated[
        str,
        typer.Argument(help="An output folder, its audit.json, or `org/name@rev` on the Hub."),
    ],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="md, html, terminal or json.",
            envvar="QAUDIT_FORMAT",
            rich_help_panel=_PANEL,
        ),
    ] = "md",
    into: Annotated[
        Path | None,
        typer.Option(
            help="Put the card between its markers in this README; print nothing.",
            envvar="QAUDIT_INTO",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            help="Draw the pictures again, into this folder.",
            envvar="QAUDIT_PLOTS",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    sparklines: Annotated[
        bool,
        typer.Option(
            "--sparklines",
            help="Lines of text in the card, not pictures: for comments and step summaries.",
            envvar="QAUDIT_SPARKLINES",
            rich_help_panel=_PANEL,
        ),
    ] = False,
) -> None:
    """Print a saved audit as a card, a page, a summary or JSON.

    Example: qaudit report qaudit-out/demo --format terminal
    """
    from qaudit.cli.reporting import carry_out

    carry_out(audit, form, into=into, plots=plots, sparklines=sparklines)
