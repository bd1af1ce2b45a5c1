"""An audit into a repository of the Hub: where it would go, and carrying that out.

First the open pull requests are searched for one of ours: of the same account, with our mark in
its title. If it holds all of this audit by the hashes of its files, there is nothing to do. If it
holds an older one, the change goes on top of its branch, so that there is one pull request to
read and not two. Only where there is none is one opened, against `main`.

So the same command may be run any number of times. Where the reply to a commit was lost, the
search is the same; if it finds nothing, nothing is sent again, because a server that answers late
may still be at work. The next run searches first, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from qaudit.errors import HubError, UnreachableError, UsageError
from qaudit.hub import Hub
from qaudit.hub.answers import HubFile
from qaudit.hub.publishing.commit import LostReplyError, Publisher
from qaudit.hub.publishing.metadata import Repository
from qaudit.hub.publishing.plan import README, Folder, PublishPlan, plan_of
from qaudit.hub.publishing.published import AUDIT
from qaudit.hub.publishing.upload import Change, PullRequest, UploadProgress
from qaudit.report import document as doc
from qaudit.report.markdown import render_blocks
from qaudit.report.verdict import banner, headline
from qaudit.report.views import View

MARK = "[qaudit]"
"""Ends the title of every pull request of ours."""

LARGEST_README_NBYTES = 5_000_000
_LONGEST_MESSAGE = 120
_WAITS_SECONDS = (0.0, 2.0, 5.0)  # before each search for a commit whose reply was lost


@dataclass(frozen=True, eq=False)
class Proposal:
    """What is to be written, and onto which pull request; without one, a new one is opened."""

    plan: PublishPlan
    onto: PullRequest | None


@dataclass(frozen=True, eq=False)
class Outcome:
    """How publishing ended."""

    state: Literal["opened", "updated", "already open", "already published"]
    url: str
    plan: PublishPlan


def title_of(message: str) -> str:
    text = message.strip()
    if not text or not text.isprintable() or len(text) > _LONGEST_MESSAGE:
        raise UsageError(
            f"`--message` is not one line of at most {_LONGEST_MESSAGE} letters",
            hint="say in a few words what the pull request is for",
        )
    return f"{text} {MARK}"


def propose(folder: Folder, repo: str, hub: Hub, subject: str | None = None) -> Proposal:
    """Return the files and the place of a pull request; nothing is written."""
    onto, commit, listed = there(repo, hub)
    audit_url = f"{hub.client.endpoint}/{repo}/blob/main/{AUDIT}"
    repository = Repository(repo, frozenset(f.identity for f in listed.values()), audit_url)
    readme = _readme(repo, commit, listed, hub)
    return Proposal(plan_of(folder, repository, commit, listed, readme, subject), onto)


def there(repo: str, hub: Hub) -> tuple[PullRequest | None, str, dict[str, HubFile]]:
    """Return our open pull request, and the commit and files that a change goes upon."""
    ours = _own_pull_requests(repo, hub) if hub.client.logged_in else ()
    onto = ours[0] if ours else None
    if onto is not None:
        commit = hub.client.commit(repo, onto.revision)
    else:
        commit = hub.listing.commit(repo, "main")
    return onto, commit, {file.path: file for file in hub.listing.files(repo, commit)}


def submit(
    proposal: Proposal, description: str, hub: Hub, title: str, progress: UploadProgress
) -> Outcome:
    """Open the pull request, or add to the one that is open, unless it holds all of it."""
    plan, onto, publisher = proposal.plan, proposal.onto, Publisher(hub.client)
    publisher.require_account()
    if plan.is_done:
        if onto:
            return Outcome("already open", onto.url, plan)
        return Outcome("already published", f"{hub.client.endpoint}/{plan.repo}", plan)
    publisher.check_readme(plan.repo, plan.readme[1])
    change = Change(
        repo=plan.repo,
        parent=plan.commit,
        title=title,
        description=description,
        additions=plan.additions,
        removed=plan.removed,
        onto=onto,
    )
    try:
        pull_request = publisher.send(change, progress)
    except LostReplyError as lost:
        pull_request = _search(plan, hub, lost)
    return Outcome("updated" if onto else "opened", pull_request.url, plan)


def _own_pull_requests(repo: str, hub: Hub) -> tuple[PullRequest, ...]:
    """Return the open pull requests that this account opened with qaudit, the latest first."""
    publisher = Publisher(hub.client)
    pull_requests = publisher.open_pull_requests(publisher.account(), repo)
    return tuple(
        pull_request for pull_request in pull_requests if pull_request.title.endswith(MARK)
    )


def _readme(repo: str, commit: str, listed: Mapping[str, HubFile], hub: Hub) -> str:
    """Return the README of a commit, checked by its hash; nothing if there is none."""
    file = listed.get(README)
    if file is None:
        return ""
    if file.nbytes > LARGEST_README_NBYTES:
        raise HubError(f"`{README}` of `{repo}` is too long", hint="shorten it on the Hub first")
    folder = hub.fetcher.files(repo, commit, README, [file], show=False)
    try:
        return (folder / README).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise HubError(
            f"`{README}` of `{repo}` is not UTF-8", hint="write it anew in UTF-8 on the Hub first"
        ) from error


def _search(plan: PublishPlan, hub: Hub, lost: LostReplyError) -> PullRequest:
    """Return the pull request of a commit whose reply was lost, if the commit was taken."""
    hub.client.say(f"the reply was lost ({lost.reason}); looking whether the commit was taken")
    for seconds in _WAITS_SECONDS:
        if seconds:
            hub.client.pause(seconds)
        for pull_request in _own_pull_requests(plan.repo, hub):
            commit = hub.client.commit(plan.repo, pull_request.revision)
            listed = {file.path: file for file in hub.listing.files(plan.repo, commit)}
            has_all = all(addition.is_in(listed) for addition in plan.additions)
            if has_all and not any(path in listed for path in plan.removed):
                return pull_request
    raise UnreachableError(
        f"the Hub did not say whether it took the commit for `{plan.repo}`, and it is not there "
        f"now: {lost.reason}",
        hint=f"look at {hub.client.endpoint}/{plan.repo}/discussions, then run the same command "
        "again: it looks there first, and opens no second pull request",
    ) from lost


def description_of(folder: Folder) -> str:
    view = View(folder.audit)
    blocks: list[doc.Block] = [
        doc.paragraph(headline(view)),
        *(banner(view.verdict) if view.verdict else ()),
        doc.paragraph(
            f"A report card for `{README}`; the audit and the evidence behind it in `qaudit/`.",
            f"Written by qaudit {folder.audit.qaudit}.",
        ),
        doc.paragraph(f"`audit.json` has the sha256 `{folder.digest}`."),
    ]
    return f"{render_blocks(blocks)}\n"
