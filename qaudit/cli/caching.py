"""What `qaudit cache` does once its options are parsed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import typer
from tabulate import tabulate

from qaudit.checkpoints.places import hub_cache, own_cache
from qaudit.cli.speech import note
from qaudit.errors import Interrupted, UsageError
from qaudit.hub.holdings import (
    Holding,
    holdings,
    leftovers,
    nbytes_on_disk,
    remembered_commit,
    remove,
    remove_leftover,
)
from qaudit.report.format import plural, size


def listed(*, as_json: bool, quiet: bool) -> str:
    """Return what the shared cache holds, and where."""
    held = holdings()
    if as_json:
        places = {"hub_cache": str(hub_cache()), "own_cache": str(own_cache())}
        found = {"nbytes": nbytes_on_disk(held), "holdings": [asdict(h) for h in held]}
        return json.dumps({**places, **found}, indent=1)
    if quiet:
        return "\n".join(f"{holding.repo}@{holding.commit}" for holding in held)
    rows = [
        [
            _name(h),
            h.commit[:12],
            size(h.nbytes),
            size(h.nbytes_brought) if h.nbytes_brought else "0",
        ]
        for h in held
    ]
    head = ["repository", "commit", "holds", "by qaudit"]
    table = tabulate(rows, head, tablefmt="plain", disable_numparse=True) if rows else "nothing"
    total = f"{size(nbytes_on_disk(held))} in {hub_cache()}"
    broken_off = leftovers()
    if broken_off:
        nbytes = sum(path.lstat().st_size for path in broken_off)
        total += f"; {size(nbytes)} more were broken off: `qaudit cache prune`"
    return f"{table}\n\n{total}\nwhat the Hub told is kept in {own_cache()}"


def removed(targets: Sequence[str], *, dry_run: bool, yes: bool, quiet: bool) -> str:
    """Remove what was brought of some repositories; return what went."""
    asked = [h for target in targets for h in _matching(target)]
    going = [h for h in dict.fromkeys(asked) if h.nbytes_brought]
    nbytes = sum(h.nbytes_brought for h in going)
    said = f"{size(nbytes)} of {plural(len(going), 'commit')}"
    if not going:
        return "nothing of these was brought by qaudit"
    if dry_run:
        return "\n".join([f"would remove {said}", *(f"  {_name(h)}@{h.commit}" for h in going)])
    if not yes and not _agreed(f"remove {said}?"):
        return "nothing was removed"
    freed = 0
    for holding in going:
        one = remove(holding)
        if one is None and not quiet:
            note(f"{_name(holding)}@{holding.commit[:12]} is used by a scan, so it stays")
        freed += one or 0
    return f"removed {size(freed)}"


def pruned(*, dry_run: bool) -> str:
    """Remove downloads that nobody goes on with; return what went."""
    found = leftovers()
    if not found:
        return "no download was broken off"
    nbytes = sum(path.lstat().st_size if dry_run else remove_leftover(path) for path in found)
    verb = "would remove" if dry_run else "removed"
    return f"{verb} {size(nbytes)} in {plural(len(found), 'file')}"


def _matching(target: str) -> list[Holding]:
    """Return the holdings that `org/name` or `org/name@rev` means."""
    repo, _, revision = target.removeprefix("hf://").partition("@")
    kind = "dataset" if repo.startswith("datasets/") else "model"
    of_repo = [h for h in holdings() if (h.kind, h.repo) == (kind, repo.removeprefix("datasets/"))]
    if not of_repo:
        raise UsageError(
            f"the cache holds nothing of `{target}`", hint="see `qaudit cache ls` for what it holds"
        )
    if not revision:
        return of_repo
    commit = remembered_commit(of_repo[0].repo, revision, of_repo[0].kind) or revision
    found = [h for h in of_repo if h.commit.startswith(commit)]
    if not found:
        commits = ", ".join(h.commit[:12] for h in of_repo)
        raise UsageError(
            f"the cache holds no revision `{revision}` of `{repo}`", hint=f"one of {commits}"
        )
    return found


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("nobody is there to ask", hint="say `--yes`, or look with `--dry-run`")
    try:
        return typer.confirm(question, err=True)
    except typer.Abort as error:
        raise Interrupted("interrupted; nothing was removed", hint="say `--yes`") from error


def _name(holding: Holding) -> str:
    return f"datasets/{holding.repo}" if holding.kind == "dataset" else holding.repo
