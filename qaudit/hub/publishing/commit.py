"""Writing to the Hub: one commit, as a pull request or onto the branch of one.

The connections, the token's fence and the retries are those of `client`. Requests that may be
repeated without harm are: the name of the account, the open pull requests, how a file is to be
sent, and the bytes of a large file, which are stored by their hash. The commit is sent once. It
is sent again only if it is known that it was not taken, because there was no connection or the
Hub requested a pause; where the reply was lost, `LostReplyError` is raised, and the caller looks
for the pull request before anything else is done.

Given up: uploads in parts, which begin at gigabytes.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from qaudit.errors import HubError
from qaudit.hub.answers import matching, table_in, tables_in, text_in, whole_number
from qaudit.hub.client import Client, checked
from qaudit.hub.failures import LOG_IN, DroppedError, Request, next_wait_seconds, wait_in_words
from qaudit.hub.publishing.upload import (
    SUCCESS,
    Change,
    PullRequest,
    UploadProgress,
    as_json,
    upload_files,
)
from qaudit.hub.wire import Payload

_OPEN = ("open", "draft")
_MOST_PAGES = 50
_DISCUSSION = re.compile(r"\S+/discussions/[1-9]\d{0,8}")


@dataclass(frozen=True)
class Discussion:
    """A discussion of a repository, which may be a pull request."""

    number: int
    title: str
    author: str
    status: str
    is_request: bool


class LostReplyError(Exception):
    """A commit was sent, and whether it was taken is not known."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Publisher:
    """The write requests of one Hub."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def require_account(self) -> None:
        if self.client.offline:
            raise HubError(
                "a pull request needs the network, and `HF_HUB_OFFLINE` keeps it away",
                hint="unset `HF_HUB_OFFLINE` and run the command again",
            )
        if not self.client.logged_in:
            raise HubError(
                "a pull request needs an account, and you are not logged in",
                hint=f"{LOG_IN}, with a token that may write",
            )

    def account(self) -> str:
        self.require_account()
        request = Request("the account of the token", "")
        answer, _ = self.client.ask(request, f"{self.client.endpoint}/api/whoami-v2")
        return self.client.parsed(request, account_in, answer)

    def open_pull_requests(self, author: str, repo: str) -> tuple[PullRequest, ...]:
        """Return the open pull requests of one account, the latest first."""
        request = Request(f"the pull requests of `{checked(repo)}`", repo)
        pull_requests: dict[int, PullRequest] = {}
        seen = 0
        for index in range(_MOST_PAGES):
            query = urlencode({"type": "pull_request", "author": author, "p": index})
            url = f"{self.client.api(request)}/discussions?{query}"
            rows, total = self.client.parsed(
                request, discussions_in, self.client.ask(request, url)[0]
            )
            for row in rows:
                if row.is_request and row.author == author and row.status in _OPEN:
                    pull_requests[row.number] = self._pull_request(repo, row.number, row.title)
            seen += len(rows)
            if not rows or seen >= total:
                break
        return tuple(pull_requests[number] for number in sorted(pull_requests, reverse=True))

    def check_readme(self, repo: str, text: str) -> None:
        request = Request(f"whether `README.md` of `{repo}` can be read", repo)
        card = as_json({"content": text, "repoType": "model"}, statuses=frozenset({200, 400}))
        answer, _ = self.client.ask(request, f"{self.client.endpoint}/api/validate-yaml", card)
        complaints = self.client.parsed(request, complaints_in, answer)
        if complaints:
            raise HubError(
                f"the Hub does not take the metadata of `README.md` in `{repo}`: "
                f"{self.client.wire.credentials.cleaned(complaints[0])}",
                hint="fix the front matter of the README on the Hub, then run this again",
            )

    def send(self, change: Change, progress: UploadProgress) -> PullRequest:
        """Send a commit; return the pull request that it opened, or that it is part of now."""
        apart = upload_files(self.client, change, progress)
        request = Request(
            f"whether it takes the pull request for `{checked(change.repo)}`",
            change.repo,
            revision=change.branch,
            writes=True,
        )
        text = self._send_once(request, change, _lines(change, apart))
        if change.onto:
            return change.onto
        try:
            number = number_in(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise LostReplyError("its answer makes no sense") from error
        return self._pull_request(change.repo, number, change.title)

    def _send_once(self, request: Request, change: Change, lines: bytes) -> bytes:
        """Send what must not be taken twice: again only where it is known that it was not."""
        url = change.url(self.client, request, "commit")
        payload = Payload("POST", lines, {"Content-Type": "application/x-ndjson"}, SUCCESS)
        failures = 0
        while True:
            try:
                return self.client.wire.text(request, url, payload)[0]
            except DroppedError as dropped:
                if not dropped.unreached and dropped.status != 429:
                    raise LostReplyError(dropped.reason) from dropped
                failures += 1
                wait = next_wait_seconds(dropped, failures, request.call, self.client.endpoint)
                self.client.say(wait_in_words(dropped, wait, request.call))
                self.client.pause(wait)

    def _pull_request(self, repo: str, number: int, title: str) -> PullRequest:
        return PullRequest(number, title, f"{self.client.endpoint}/{repo}/discussions/{number}")


def _lines(change: Change, apart: Collection[str]) -> bytes:
    head = {
        "summary": change.title,
        "description": change.description,
        "parentCommit": change.parent,
    }
    lines: list[dict[str, Any]] = [{"key": "header", "value": head}]
    for a in change.additions:
        if a.path in apart:
            about = {"path": a.path, "algo": "sha256", "oid": a.sha256, "size": a.nbytes}
            lines.append({"key": "lfsFile", "value": about})
        else:
            content = base64.b64encode(a.data).decode()
            about = {"path": a.path, "encoding": "base64", "content": content}
            lines.append({"key": "file", "value": about})
    lines += [{"key": "deletedFile", "value": {"path": path}} for path in change.removed]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def account_in(answer: Any) -> str:
    return text_in(table_in(answer, "the answer").get("name"), "the name of the account")


def discussions_in(answer: Any) -> tuple[tuple[Discussion, ...], int]:
    table = table_in(answer, "the answer")
    rows = tables_in(table.get("discussions"), "the page", "a discussion")
    return tuple(map(_discussion, rows)), whole_number(
        table.get("count"), "the list of discussions"
    )


def complaints_in(answer: Any) -> tuple[str, ...]:
    errors = table_in(answer, "the answer").get("errors", [])
    rows = tables_in(errors, "the complaints", "a complaint")
    return tuple(text_in(row.get("message"), "a complaint") for row in rows)


def number_in(answer: Any) -> int:
    url = text_in(table_in(answer, "the answer").get("pullRequestUrl"), "the pull request")
    return int(matching(_DISCUSSION, url, "the address of the pull request").rpartition("/")[2])


def _discussion(table: dict[str, Any]) -> Discussion:
    author = table.get("author")  # none where the account is gone
    return Discussion(
        number=whole_number(table.get("num"), "the number of a discussion"),
        title=text_in(table.get("title"), "the title of a discussion"),
        author=text_in(author.get("name", ""), "an author") if isinstance(author, dict) else "",
        status=text_in(table.get("status"), "the state of a discussion"),
        is_request=table.get("isPullRequest") is True,
    )
