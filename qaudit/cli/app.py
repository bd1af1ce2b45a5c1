"""The Typer application and the commands that need no file of their own."""

from __future__ import annotations

from typing import Annotated

import typer

from qaudit import __version__
from qaudit.cli.cache import cache
from qaudit.cli.diff import diff
from qaudit.cli.doctor import doctor
from qaudit.cli.gate import gate
from qaudit.cli.help import group_options
from qaudit.cli.lab import lab
from qaudit.cli.pick import pick
from qaudit.cli.publish import publish
from qaudit.cli.report import report
from qaudit.cli.scan import scan
from qaudit.cli.series import series
from qaudit.cli.soup import soup

app = typer.Typer(
    name="qaudit",
    help="Which checkpoint or soup should ship, and does it survive 3- and 4-bit quantization?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a traceback with locals can hold a token
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Which checkpoint or soup should ship, and does it survive 3- and 4-bit quantization?"""


app.command()(scan)
app.command()(series)
app.command()(pick)
app.command()(gate)
app.command()(diff)
app.command()(soup)
app.command()(report)
app.command()(publish)
app.command()(doctor)
app.add_typer(cache, name="cache")
app.add_typer(lab, name="lab")


@app.command("list")
def list_(
    kind: Annotated[
        str,
        typer.Argument(
            help="schemes, merges, diagnostics, families, recipes, experiments, policies or rules."
        ),
    ] = "schemes",
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print names and descriptions as JSON.",
            envvar="QAUDIT_JSON",
            rich_help_panel="Output",
        ),
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet",
            "-q",
            help="Only names, one a line.",
            envvar="QAUDIT_QUIET",
            rich_help_panel="Output",
        ),
    ] = False,
) -> None:
    """List what is registered, one a line, with its description.

    Example: qaudit list schemes
    """
    from qaudit.cli.listing import listing
    from qaudit.cli.speech import print_result

    print_result(listing(kind, as_json=as_json, quiet=quiet))


group_options(app)
