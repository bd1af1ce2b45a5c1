"""What is written to the Hub: one commit, as a pull request or onto the branch of one.

The connections, the token's fence and the retries are those of `client`. Whatever may be repeated
without harm is: which account this is, which pull requests are open, how a file is to be sent,
and the bytes of a large file, which are stored by their hash. The commit is sent once. It is
sent again only if it is known that it was not taken, because there was no connection or the Hub
said to come back later; where the reply was lost, `LostReplyError` is raised, and the caller
looks for the pull request before anything else is done.

Given up: uploads in parts, which begin at gigabytes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import quote, urlencode

from qaudit.errors import HubError
from qaudit.hub.answers import account_in, complaints_in, discussions_in, number_in
from qaudit.hub.change import Change, PullRequest
from qaudit.hub.client import Client, checked
from qaudit.hub.entries import DroppedError
from qaudit.hub.patience import next_wait_seconds, wait_in_words
from qaudit.hub.refusals import LOG_IN, Asked
from qaudit.hub.upload import TAKEN, Came, as_json, upload_apart
from qaudit.hub.wire import Sent

_OPEN = ("open", "draft")
_MOST_PAGES = 50


class LostReplyError(Exception):
    """A commit was sent, and whether it was taken is not known."""

    def __init__(self, reason: str) -> None:
        """Keep what happened instead of a reply."""
        super().__init__(reason)
        self.reason = reason


class Publisher:
    """Who writes to one Hub."""

    def __init__(self, client: Client) -> None:
        """Write nothing yet."""
        self.client = client

    def must_be_let_in(self) -> None:
        """Refuse to begin what cannot be carried out: without a network, or without an account."""
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

    def who(self) -> str:
        """Return the name of the account that the token belongs to."""
        self.must_be_let_in()
        asked = Asked("who the token belongs to", "")
        answer, _ = self.client.ask(asked, f"{self.client.endpoint}/api/whoami-v2")
        return self.client.believed(asked, account_in, answer)

    def requests_of(self, author: str, repo: str) -> tuple[PullRequest, ...]:
        """Return the open pull requests of one account, the latest first."""
        asked = Asked(f"the pull requests of `{checked(repo)}`", repo)
        found: dict[int, PullRequest] = {}
        seen = 0
        for index in range(_MOST_PAGES):
            query = urlencode({"type": "pull_request", "author": author, "p": index})
            answer, _ = self.client.ask(asked, f"{self.client.api(asked)}/discussions?{query}")
            rows, total = self.client.believed(asked, discussions_in, answer)
            for row in rows:
                if row.is_request and row.author == author and row.status in _OPEN:
                    page = self.page(repo, row.number)
                    found[row.number] = PullRequest(row.number, row.title, page)
            seen += len(rows)
            if not rows or seen >= total:
                break
        return tuple(found[number] for number in sorted(found, reverse=True))

    def page(self, repo: str, number: int) -> str:
        """Return the address where a person reads a pull request."""
        return f"{self.client.endpoint}/{repo}/discussions/{number}"

    def must_be_a_card(self, repo: str, text: str) -> None:
        """Refuse a README whose metadata the Hub would not take."""
        asked = Asked(f"whether `README.md` of `{repo}` can be read", repo)
        sent = as_json({"content": text, "repoType": "model"}, answers=frozenset({200, 400}))
        answer, _ = self.client.ask(asked, f"{self.client.endpoint}/api/validate-yaml", sent)
        wrong = self.client.believed(asked, complaints_in, answer)
        if wrong:
            raise HubError(
                f"the Hub does not take the metadata of `README.md` in `{repo}`: "
                f"{self.client.wire.cleaned(wrong[0])}",
                hint="fix the front matter of the README on the Hub, then run this again",
            )

    def send(self, change: Change, came: Came) -> PullRequest:
        """Send a commit; return the pull request that it opened, or that it is part of now."""
        apart = upload_apart(self.client, change, came)
        asked = Asked(
            f"whether it takes the pull request for `{checked(change.repo)}`",
            change.repo, revision=change.branch, writes=True,
        )  # fmt: skip
        query = "" if change.onto else "?create_pr=1"
        url = f"{self.client.api(asked)}/commit/{quote(change.branch, safe='')}{query}"
        sent = Sent("POST", _lines(change, apart), {"Content-Type": "application/x-ndjson"}, TAKEN)
        text = self._once(asked, lambda: self.client.wire.text(asked, url, sent)[0])
        if change.onto:
            return change.onto
        try:
            number = number_in(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise LostReplyError("its answer makes no sense") from error
        return PullRequest(number, change.title, self.page(change.repo, number))

    def _once(self, asked: Asked, attempt: Callable[[], bytes]) -> bytes:
        """Send what must not be taken twice: again only where it is known that it was not."""
        failures = 0
        while True:
            try:
                return attempt()
            except DroppedError as dropped:
                if not dropped.unreached and dropped.status != 429:
                    raise LostReplyError(dropped.reason) from dropped
                failures += 1
                wait = next_wait_seconds(dropped, failures, asked.call, self.client.endpoint)
                self.client.say(wait_in_words(dropped, wait, asked.call))
                self.client.pause(wait)


def _lines(change: Change, apart: Collection[str]) -> bytes:
    """Write a commit as lines of JSON."""
    head = {
        "summary": change.title,
        "description": change.description,
        "parentCommit": change.parent,
    }
    lines: list[dict[str, Any]] = [{"key": "header", "value": head}]
    for a in change.additions:
        if a.path in apart:
            told = {"path": a.path, "algo": "sha256", "oid": a.sha256, "size": len(a.data)}
            lines.append({"key": "lfsFile", "value": told})
        else:
            content = base64.b64encode(a.data).decode()
            told = {"path": a.path, "encoding": "base64", "content": content}
            lines.append({"key": "file", "value": told})
    lines += [{"key": "deletedFile", "value": {"path": path}} for path in change.removed]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)
