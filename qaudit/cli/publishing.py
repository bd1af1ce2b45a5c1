"""What `qaudit publish` does once its options are parsed: read, look, show or write, and say where.

The audit is read and its evidence hashed before anything is asked, so that a damaged one never
costs a request. What a README says came from the Hub, and is printed without what moves a cursor.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from qaudit.cli.speech import Bars, print_result
from qaudit.errors import UsageError
from qaudit.hub import Hub, open_hub
from qaudit.hub.answers import is_repository
from qaudit.hub.publishing.folder import read_for_publishing
from qaudit.hub.publishing.plan import README, PublishPlan
from qaudit.hub.publishing.publish import Standing, look, titled
from qaudit.hub.publishing.publish import carry_out as write
from qaudit.hub.publishing.published import audit_folder
from qaudit.report.format import plural, printable, size


@dataclass(frozen=True)
class Request:
    """The options of one `publish`."""

    audit: str
    repo: str
    subject: str | None
    message: str
    dry_run: bool
    as_json: bool
    quiet: bool


def carry_out(request: Request) -> int:
    """Publish, or show what that would write; return the exit code."""
    repo, title = _repository(request.repo), titled(request.message)
    with Bars(quiet=request.quiet) as bars:
        folder = read_for_publishing(audit_folder(request.audit, bars))
        hub = open_hub(bars)
        standing = look(folder, repo, hub, request.subject)
        for text in () if request.dry_run else standing.plan.notes:
            bars.said(text)
        if not request.dry_run:
            done = write(
                standing, folder, hub, title, lambda *count: bars.counted("large files", *count)
            )
    if request.dry_run:
        shown = _as_json(standing) if request.as_json else "\n".join(_shown(standing, hub))
        print_result(shown)
        return 0
    if request.as_json:
        told = {"state": done.state, "url": done.url, **_told(done.plan)}
        print_result(json.dumps(told, indent=2))
    else:
        print_result(f"{done.state}: {done.url}")
    return 0


def _repository(text: str) -> str:
    repo = text.removeprefix("hf://")
    if "/" not in repo or not is_repository(repo):
        what = "names a revision" if "@" in repo else "is no name of a repository"
        raise UsageError(
            f"`{repo}` {what}",
            hint="write `org/name`: a pull request is opened for its `main`",
        )
    return repo


# ------------------------------------------------------------------------------------ a dry run


def _shown(standing: Standing, hub: Hub) -> Iterator[str]:
    """Yield the lines that say what would be written, and nothing that would not."""
    plan = standing.plan
    yield _where(standing, hub)
    yield ""
    rows: list[tuple[str, str, str]] = [
        (a.path, f"{len(a.data):,}", state) for a, state in plan.files
    ]
    rows += [(path, "", "removed") for path in plan.removed]
    yield tabulate(rows, ("file", "bytes", ""), tablefmt="plain", disable_numparse=True,
                   colalign=("left", "right", "left"))  # fmt: skip
    nbytes = sum(len(a.data) for a in plan.additions)
    yield ""
    yield f"{plural(len(plan.additions), 'file')} to send, {size(nbytes)}; nothing was written"
    for text in plan.notes:
        yield f"note: {printable(text)}"
    if difference := _difference(plan):
        yield ""
        yield from (printable(line) for line in difference)


def _where(standing: Standing, hub: Hub) -> str:
    plan, page = standing.plan, f"{hub.client.endpoint}/{standing.plan.repo}"
    if standing.onto is not None:
        return f"{'already open' if plan.is_done else 'would update'}: {standing.onto.url}"
    if plan.is_done:
        return f"already published: {page}"
    told = f"would open a pull request at {page}/discussions"
    if not hub.client.logged_in:
        told += " (not logged in: one that is open is not looked for)"
    return told


def _difference(plan: PublishPlan) -> list[str]:
    before, after = (text.splitlines() for text in plan.readme)
    names = (README if plan.readme[0] else "/dev/null", README)
    return list(difflib.unified_diff(before, after, *names, lineterm=""))


def _as_json(standing: Standing) -> str:
    plan, onto = standing.plan, standing.onto
    told: dict[str, Any] = {
        "state": "dry run",
        "url": onto.url if onto else None,
        **_told(plan),
        "readme_diff": "\n".join(_difference(plan)),
    }
    return json.dumps(told, indent=2)


def _told(plan: PublishPlan) -> dict[str, Any]:
    return {
        "repo": plan.repo,
        "commit": plan.commit,
        "files": [
            {"path": a.path, "nbytes": len(a.data), "sha256": a.sha256, "state": state}
            for a, state in plan.files
        ],
        "removed": list(plan.removed),
        "notes": list(plan.notes),
    }
