"""An audit into a repository of the Hub: where it would go, and carrying that out.

First it is looked whether a pull request of ours is open there: of the same account, with our
mark in its title. If it holds all of this audit by the hashes of its files, there is nothing to
do. If it holds an older one, the change goes on top of its branch, so that one pull request is
read and not two. Only where there is none is one opened, against `main`.

So the same command may be run any number of times. Where the reply to a commit was lost, it is
looked for in the same way; if it is not found, nothing is sent again, because a server that
answers late may still be at it. The next run looks first, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from qaudit.errors import HubError, UnreachableError, UsageError
from qaudit.hub import Hub
from qaudit.hub.change import Change, PullRequest
from qaudit.hub.publish import LostReplyError, Publisher
from qaudit.hub.publishing.folder import Folder
from qaudit.hub.publishing.metadata import Repository
from qaudit.hub.publishing.plan import README, PublishPlan, plan_of
from qaudit.hub.publishing.published import AUDIT
from qaudit.report.document import paragraph
from qaudit.report.markdown import render_blocks
from qaudit.report.verdict import verdict
from qaudit.report.views import View

if TYPE_CHECKING:
    from qaudit.hub.entries import HubFile
    from qaudit.hub.upload import Came

MARK = "[qaudit]"
"""Ends the title of every pull request of ours."""

MESSAGE = "Add a quantization audit"
LARGEST_README_NBYTES = 5_000_000
_LONGEST_MESSAGE = 120
_WAITS_SECONDS = (0.0, 2.0, 5.0)  # before each look for what may have been taken


@dataclass(frozen=True, eq=False)
class Standing:
    """What is to be written, and onto which pull request; without one, a new one is opened."""

    plan: PublishPlan
    onto: PullRequest | None


@dataclass(frozen=True, eq=False)
class Outcome:
    """How publishing ended."""

    state: Literal["opened", "updated", "already open", "already published"]
    url: str
    plan: PublishPlan


def titled(message: str) -> str:
    """Return the title of a pull request of ours."""
    said = message.strip()
    if not said or not said.isprintable() or len(said) > _LONGEST_MESSAGE:
        raise UsageError(
            f"`--message` is not one line of at most {_LONGEST_MESSAGE} letters",
            hint="say in a few words what the pull request is for",
        )
    return f"{said} {MARK}"


def look(folder: Folder, repo: str, hub: Hub, subject: str | None = None) -> Standing:
    """Return what publishing would write, and where to; nothing is written."""
    own = _own_requests(repo, hub) if hub.client.logged_in else ()
    onto = own[0] if own else None
    if onto is not None:
        commit = hub.client.commit(repo, onto.revision)
    else:
        commit = hub.listing.commit(repo, "main")
    listed = {file.path: file for file in hub.listing.files(repo, commit)}
    audit_url = f"{hub.client.endpoint}/{repo}/blob/main/{AUDIT}"
    repository = Repository(repo, frozenset(f.identity for f in listed.values()), audit_url)
    readme = _readme(repo, commit, listed, hub)
    return Standing(plan_of(folder, repository, commit, listed, readme, subject), onto)


def carry_out(standing: Standing, folder: Folder, hub: Hub, title: str, came: Came) -> Outcome:
    """Open the pull request, or add to the one that is open, unless it holds all of it."""
    plan, onto, publisher = standing.plan, standing.onto, Publisher(hub.client)
    publisher.must_be_let_in()
    if plan.is_done:
        page = f"{hub.client.endpoint}/{plan.repo}"
        return (
            Outcome("already open", onto.url, plan)
            if onto
            else Outcome("already published", page, plan)
        )
    publisher.must_be_a_card(plan.repo, plan.readme[1])
    change = Change(
        repo=plan.repo,
        parent=plan.commit,
        title=title,
        description=_description(folder),
        additions=plan.additions,
        removed=plan.removed,
        onto=onto,
    )
    try:
        request = publisher.send(change, came)
    except LostReplyError as lost:
        request = _found(plan, hub, lost)
    return Outcome("updated" if onto else "opened", request.url, plan)


def _own_requests(repo: str, hub: Hub) -> tuple[PullRequest, ...]:
    """Return the open pull requests that this account opened with qaudit, the latest first."""
    publisher = Publisher(hub.client)
    found = publisher.requests_of(publisher.who(), repo)
    return tuple(request for request in found if request.title.endswith(MARK))


def _readme(repo: str, commit: str, listed: Mapping[str, HubFile], hub: Hub) -> str:
    """Return the README of a commit, checked by its hash; nothing if there is none."""
    file = listed.get(README)
    if file is None:
        return ""
    if file.nbytes > LARGEST_README_NBYTES:
        raise HubError(f"`{README}` of `{repo}` is too long", hint="shorten it on the Hub first")
    folder = hub.fetcher.files(repo, commit, README, [file], seen=False)
    try:
        return (folder / README).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise HubError(
            f"`{README}` of `{repo}` is not UTF-8", hint="write it anew in UTF-8 on the Hub first"
        ) from error


def _found(plan: PublishPlan, hub: Hub, lost: LostReplyError) -> PullRequest:
    """Look whether a commit was taken whose reply did not come."""
    hub.client.say(f"the reply was lost ({lost.reason}); looking whether the commit was taken")
    for seconds in _WAITS_SECONDS:
        if seconds:
            hub.client.pause(seconds)
        for request in _own_requests(plan.repo, hub):
            files = hub.listing.files(plan.repo, hub.client.commit(plan.repo, request.revision))
            listed = {file.path: file for file in files}
            there = all(addition.is_there(listed) for addition in plan.additions)
            if there and not any(path in listed for path in plan.removed):
                return request
    raise UnreachableError(
        f"the Hub did not say whether it took the commit for `{plan.repo}`, and it is not there "
        f"now: {lost.reason}",
        hint=f"look at {hub.client.endpoint}/{plan.repo}/discussions, then run the same command "
        "again: it looks there first, and opens no second pull request",
    ) from lost


def _description(folder: Folder) -> str:
    """Return what a pull request holds; the audit's hash tells one from another."""
    blocks = [
        paragraph(verdict(View(folder.audit))),
        paragraph(
            f"A report card for `{README}`; the audit and the evidence behind it in `qaudit/`.",
            f"Written by qaudit {folder.audit.qaudit}.",
        ),
        paragraph(f"`audit.json` has the sha256 `{folder.digest}`."),
    ]
    return f"{render_blocks(blocks)}\n"
