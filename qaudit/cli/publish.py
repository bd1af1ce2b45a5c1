"""`qaudit publish` and `gallery`: an audit on the Hub, and many on one page. No torch here.

The audit is read and its evidence hashed before the first request, so that a damaged one never
costs any. A README comes from the Hub: it is printed without what moves a cursor.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qaudit.cli.options import AuditPlace, Quiet, audit_at, option
from qaudit.cli.terminal import complain, print_result
from qaudit.errors import UsageError
from qaudit.settings import OUTPUT

if TYPE_CHECKING:
    from qaudit.hub import Hub
    from qaudit.hub.publish import PublishPlan


_WRITE, _SAME = "What to write", {"show_default": "the one with the same weights"}
_NOTHING = "Print the files and every change of the README; write nothing."
Contained = option(_WRITE, "The subject that REPO contains.", **_SAME)
Title = option(_WRITE, "Title of the pull request; `[qaudit]` is appended.")
Preview = option(OUTPUT, _NOTHING, "--dry-run")
Json = option(OUTPUT, "Print what was written, and where, as JSON.", "--json")
MOST_FILES = 4  # of one folder, before a dry run sums them up in a row


def publish(
    audit: AuditPlace,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="A model on the Hub: `org/name`.")],
    subject: Annotated[str | None, Contained] = None,
    message: Annotated[str, Title] = "Add a quantization audit",
    dry_run: Annotated[bool, Preview] = False,
    as_json: Annotated[bool, Json] = False,
    quiet: Quiet = False,
) -> int:
    """Open a pull request on the Hub with the card, the audit and its evidence.

    Run again with the same audit, it finds its own pull request; with a newer one, it adds to
    it. The token is that of `hf auth login` or `HF_TOKEN`, and goes nowhere else.

    Example: qaudit publish qaudit-out/demo org/name --dry-run
    """
    from qaudit.cli.progress import Progress
    from qaudit.hub import open_hub
    from qaudit.hub.publish import (
        audit_folder,
        description_of,
        propose,
        read_for_publishing,
        submit,
        title_of,
    )

    repo, title = repository(repo), title_of(message)
    with Progress(quiet=quiet) as progress:
        folder = read_for_publishing(audit_folder(audit, progress))
        hub = open_hub(progress)
        plan = propose(folder, repo, hub, subject)
        if dry_run and as_json:
            url = plan.onto.url if plan.onto else None
            difference = "\n".join(_difference(plan))
            rows = {"state": "dry run", "url": url, **_rows(plan), "readme_diff": difference}
            print_result(json.dumps(rows, indent=2))
            return 0
        if dry_run:
            print_result("\n".join(_preview(plan, hub)))
            return 0
        for text in plan.notes:
            progress.note(text)
        count = partial(progress.count, "files")
        submitted = submit(plan, description_of(folder), hub, title, count)
    if as_json:
        rows = {"state": submitted.state, "url": submitted.url, **_rows(submitted.plan)}
        print_result(json.dumps(rows, indent=2))
    else:
        print_result(f"{submitted.state}: {submitted.url}")
    return 0


def repository(text: str) -> str:
    from qaudit.hub.names import repository_of

    ref = repository_of(text)
    if ref is None or ref.revision is not None or ref.subfolder is not None:
        what = "names a revision" if "@" in text else "is no name of a repository"
        raise UsageError(
            f"`{text}` {what}", hint="write `org/name`: a pull request is opened for its `main`"
        )
    return ref.location


def _preview(plan: PublishPlan, hub: Hub) -> Iterator[str]:
    from tabulate import tabulate

    from qaudit.report.format import plural, printable
    from qaudit.support.sizes import size

    yield _where(plan, hub)
    yield ""
    files = [(a.path, a.nbytes, state) for a, state in plan.files]
    rows = [(name, f"{nbytes:,}", state) for name, nbytes, state in _summed_up(files)]
    rows += [(path, "", "removed") for path in plan.removed]
    yield tabulate(rows, ("file", "bytes", ""), tablefmt="plain", disable_numparse=True,
                   colalign=("left", "right", "left"))  # fmt: skip
    nbytes = sum(a.nbytes for a in plan.additions)
    yield ""
    yield f"{plural(len(plan.additions), 'file')} to send, {size(nbytes)}; nothing was written"
    for text in plan.notes:
        yield f"note: {printable(text)}"
    if difference := _difference(plan):
        yield ""
        yield from (printable(line) for line in difference)


def _summed_up(files: Iterable[tuple[str, int, str]]) -> Iterator[tuple[str, int, str]]:
    """Yield files with size and state; many files of one folder and state in one row."""

    def folder_and_state(file: tuple[str, int, str]) -> tuple[str, str]:
        return file[0].rpartition("/")[0], file[2]

    for (folder, state), group in groupby(sorted(files, key=folder_and_state), folder_and_state):
        rows = list(group)
        if folder and len(rows) > MOST_FILES:
            yield f"{folder}/ ({len(rows)} files)", sum(nbytes for _, nbytes, _ in rows), state
        else:
            yield from rows


def _where(plan: PublishPlan, hub: Hub) -> str:
    page = f"{hub.client.endpoint}/{plan.repo}"
    if plan.onto is not None:
        return f"{'already open' if plan.is_done else 'would update'}: {plan.onto.url}"
    if plan.is_done:
        return f"already published: {page}"
    opened = f"would open a pull request at {page}/discussions"
    unknown = "" if hub.client.logged_in else " (not logged in: there may be an open one already)"
    return opened + unknown


def _difference(plan: PublishPlan) -> list[str]:
    from qaudit.hub.publish import README

    before, after = (text.splitlines() for text in plan.readme)
    names = (README if plan.readme[0] else "/dev/null", README)
    return list(difflib.unified_diff(before, after, *names, lineterm=""))


def _rows(plan: PublishPlan) -> dict[str, Any]:
    return {
        "repo": plan.repo,
        "commit": plan.commit,
        "files": [
            {"path": a.path, "nbytes": a.nbytes, "sha256": a.sha256, "state": state}
            for a, state in plan.files
        ],
        "removed": list(plan.removed),
        "notes": list(plan.notes),
    }


def gallery(
    audits: Annotated[
        list[str],
        typer.Argument(
            metavar="AUDIT...", help="Output folders, or published audits (`org/name@v1`)."
        ),
    ],
    out: Annotated[Path, option(OUTPUT, "The folder of the page.", "--out")],
) -> int:
    """Write a page of many audits, and a Parquet table of all their rows.

    Every number is computed again from evidence, and nothing else is shown. An audit that disagrees
    with its own is left out, and the exit code is that of its error.

    Example: qaudit gallery qaudit-out/demo --out site
    """
    from qaudit.gallery import rows_of, write_gallery

    rows, refused = rows_of(audits, audit_at)
    for error in refused:
        complain(error)
    if rows:
        write_gallery(rows, out)
        print_result(str(out / "index.html"))
    return max((error.code for error in refused), default=0)
