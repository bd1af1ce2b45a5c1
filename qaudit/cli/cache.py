"""`qaudit cache`: list what scans downloaded, and remove it. Imports no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from qaudit.cli.options import AsJson, Quiet, option
from qaudit.cli.terminal import print_result, say
from qaudit.errors import Interrupted, UsageError
from qaudit.settings import OUTPUT

if TYPE_CHECKING:
    from qaudit.hub.holdings import Holding

cache = typer.Typer(help="List and remove downloads of scans.", no_args_is_help=True)

DryRun = Annotated[
    bool, option(OUTPUT, "Print what would be removed; remove nothing.", "--dry-run")
]


@cache.callback()
def root() -> None:
    """List and remove what scans downloaded into the cache that Hugging Face tools share."""


@cache.command("ls")
def list_(as_json: AsJson = False, quiet: Quiet = False) -> int:
    """List repositories by commit: the bytes in the cache, and those that qaudit downloaded.

    With --quiet only names: one `org/name@commit` a line.

    Example: qaudit cache ls
    """
    from qaudit.checkpoints.places import hub_cache, own_cache
    from qaudit.hub.holdings import holdings, nbytes_on_disk

    held = holdings()
    if as_json:
        folders = {"hub_cache": str(hub_cache()), "own_cache": str(own_cache())}
        rows = {"nbytes": nbytes_on_disk(held), "holdings": [asdict(h) for h in held]}
        print_result(json.dumps({**folders, **rows}, indent=1))
    elif quiet:
        print_result("\n".join(f"{holding.repo}@{holding.commit}" for holding in held))
    else:
        print_result(_table(held))
    return 0


@cache.command("rm")
def remove(
    targets: Annotated[
        list[str], typer.Argument(metavar="REPO[@REV]...", help="A repository, or one revision.")
    ],
    dry_run: DryRun = False,
    yes: Annotated[bool, option(OUTPUT, "Do not ask.", "--yes", "-y")] = False,
    quiet: Quiet = False,
) -> int:
    """Remove what qaudit downloaded of a repository; files of other tools stay.

    Example: qaudit cache rm org/name@main --dry-run
    """
    from qaudit.core.sizes import size
    from qaudit.hub.holdings import remove as remove_one
    from qaudit.report.format import plural

    matching = dict.fromkeys(holding for target in targets for holding in _matching(target))
    going = [holding for holding in matching if holding.nbytes_downloaded]
    total = f"{size(sum(h.nbytes_downloaded for h in going))} of {plural(len(going), 'commit')}"
    if not going:
        print_result("qaudit downloaded nothing of these")
    elif dry_run:
        names = [f"  {_name(holding)}@{holding.commit}" for holding in going]
        print_result("\n".join([f"would remove {total}", *names]))
    elif not yes and not _confirmed(f"remove {total}?"):
        print_result("nothing was removed")
    else:
        freed = 0
        for holding in going:
            nbytes = remove_one(holding)
            if nbytes is None and not quiet:
                say(f"{_name(holding)}@{holding.commit[:12]} stays: a scan uses it")
            freed += nbytes or 0
        print_result(f"removed {size(freed)}")
    return 0


@cache.command()
def prune(dry_run: DryRun = False) -> int:
    """Remove unfinished downloads that no process continues.

    Example: qaudit cache prune --dry-run
    """
    from qaudit.core.sizes import size
    from qaudit.hub.holdings import leftovers, remove_leftover
    from qaudit.report.format import plural

    unfinished = leftovers()
    if not unfinished:
        print_result("there is no unfinished download")
        return 0
    nbytes = sum(p.lstat().st_size if dry_run else remove_leftover(p) for p in unfinished)
    verb = "would remove" if dry_run else "removed"
    print_result(f"{verb} {size(nbytes)} in {plural(len(unfinished), 'file')}")
    return 0


def _table(held: Sequence[Holding]) -> str:
    from tabulate import tabulate

    from qaudit.checkpoints.places import hub_cache, own_cache
    from qaudit.core.sizes import size
    from qaudit.hub.holdings import leftovers, nbytes_on_disk

    rows = [
        [
            _name(holding),
            holding.commit[:12],
            size(holding.nbytes),
            size(holding.nbytes_downloaded) if holding.nbytes_downloaded else "0",
        ]
        for holding in held
    ]
    head = ["repository", "commit", "size", "by qaudit"]
    table = tabulate(rows, head, tablefmt="plain", disable_numparse=True) if rows else "nothing"
    total = f"{size(nbytes_on_disk(held))} in {hub_cache()}"
    if unfinished := leftovers():
        nbytes = sum(path.lstat().st_size for path in unfinished)
        total += f"; {size(nbytes)} more in unfinished downloads: `qaudit cache prune`"
    return f"{table}\n\n{total}\nanswers of the Hub are kept in {own_cache()}"


def _matching(target: str) -> list[Holding]:
    from qaudit.hub.holdings import holdings, remembered_commit

    repo, _, revision = target.removeprefix("hf://").partition("@")
    kind = "dataset" if repo.startswith("datasets/") else "model"
    of_repo = [h for h in holdings() if (h.kind, h.repo) == (kind, repo.removeprefix("datasets/"))]
    if not of_repo:
        raise UsageError(
            f"the cache has nothing of `{target}`", hint="see `qaudit cache ls` for its contents"
        )
    if not revision:
        return of_repo
    commit = remembered_commit(of_repo[0].repo, revision, of_repo[0].kind) or revision
    matches = [holding for holding in of_repo if holding.commit.startswith(commit)]
    if len(matches) != 1:
        wrong = "names several commits" if matches else "is not in the cache"
        commits = ", ".join(holding.commit[:12] for holding in matches or of_repo)
        raise UsageError(f"revision `{revision}` of `{repo}` {wrong}", hint=f"one of {commits}")
    return matches


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError(
            "removing asks first, and stdin is not a terminal",
            hint="add `--yes`, or look with `--dry-run`",
        )
    try:
        return typer.confirm(question, err=True)
    except typer.Abort as error:
        raise Interrupted("interrupted; nothing was removed", hint="add `--yes`") from error


def _name(holding: Holding) -> str:
    return f"datasets/{holding.repo}" if holding.kind == "dataset" else holding.repo
