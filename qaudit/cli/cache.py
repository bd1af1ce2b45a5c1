"""`qaudit cache`: what lies on the disk because of scans, and taking it away again. No torch."""

from __future__ import annotations

from typing import Annotated

import typer

from qaudit.cli import options as o

cache = typer.Typer(
    help="What scans brought from the Hub: list it, remove it.", no_args_is_help=True
)

DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Say what would go; remove nothing.", envvar="QAUDIT_DRY_RUN"),
]


@cache.callback()
def root() -> None:
    """List and remove what scans brought into the cache that Hugging Face tools share."""


@cache.command("ls")
def list_(as_json: o.AsJson = False, quiet: o.Quiet = False) -> None:
    """List repositories by commit, with what they hold and what qaudit brought.

    With --quiet only names: one `org/name@commit` a line.

    Example: qaudit cache ls
    """
    from qaudit.cli.caching import listed
    from qaudit.cli.speech import print_result

    print_result(listed(as_json=as_json, quiet=quiet))


@cache.command("rm")
def remove(
    targets: Annotated[
        list[str], typer.Argument(metavar="REPO[@REV]...", help="A repository, or one revision.")
    ],
    dry_run: DryRun = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask.", envvar="QAUDIT_YES")
    ] = False,
    quiet: o.Quiet = False,
) -> None:
    """Remove what qaudit brought of a repository; files of other tools stay.

    Example: qaudit cache rm org/name@main --dry-run
    """
    from qaudit.cli.caching import removed
    from qaudit.cli.speech import print_result

    print_result(removed(targets, dry_run=dry_run, yes=yes, quiet=quiet))


@cache.command()
def prune(dry_run: DryRun = False) -> None:
    """Remove downloads that were broken off and that nobody goes on with.

    Example: qaudit cache prune --dry-run
    """
    from qaudit.cli.caching import pruned
    from qaudit.cli.speech import print_result

    print_result(pruned(dry_run=dry_run))
