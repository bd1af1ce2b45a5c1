"""What the Hub answers about accounts, pull requests and uploads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from qaudit.hub.checks import (
    SHA256,
    GarbledError,
    matching,
    plain_path,
    quoted,
    table_in,
    tables_in,
    text_in,
    whole_number,
)

_DISCUSSION = re.compile(r"\S+/discussions/[1-9]\d{0,8}")
_IN_A_HEADER = re.compile(r"[\x20-\x7e]*")


@dataclass(frozen=True)
class Discussion:
    """A discussion of a repository, which may be a pull request."""

    number: int
    title: str
    author: str
    status: str
    is_request: bool


def account_in(answer: Any) -> str:
    """Read the name of the account that a token belongs to."""
    return text_in(table_in(answer, "the answer").get("name"), "the name of the account")


def discussions_in(answer: Any) -> tuple[tuple[Discussion, ...], int]:
    """Read one page of discussions and pull requests, and how many there are in all."""
    table = table_in(answer, "the answer")
    rows = tables_in(table.get("discussions"), "the page", "a discussion")
    return tuple(map(_discussion, rows)), whole_number(
        table.get("count"), "the list of discussions"
    )


def complaints_in(answer: Any) -> tuple[str, ...]:
    """Read what is wrong with the metadata of a README, if anything is."""
    errors = table_in(answer, "the answer").get("errors", [])
    rows = tables_in(errors, "the complaints", "a complaint")
    return tuple(text_in(row.get("message"), "a complaint") for row in rows)


def modes_in(answer: Any) -> dict[str, tuple[str, bool]]:
    """Read how each file is to be sent, and whether the repository leaves it out."""
    files = table_in(answer, "the answer").get("files")
    return {
        plain_path(table.get("path"), "the path of a file"): (
            text_in(table.get("uploadMode"), "how a file is to be sent"),
            table.get("shouldIgnore") is True,
        )
        for table in tables_in(files, "the list of files", "a file")
    }


def links_in(answer: Any) -> dict[str, dict[str, dict[str, Any]]]:
    """Read where the bytes of large files go, by their sha256: `upload` and then `verify`."""
    objects = table_in(answer, "the answer").get("objects")
    links: dict[str, dict[str, dict[str, Any]]] = {}
    for table in tables_in(objects, "the list of files", "a file"):
        if "error" in table:
            message = table_in(table["error"], "an error").get("message")
            raise GarbledError(f"it refuses a file: {quoted(message)}")
        actions = table_in(table.get("actions") or {}, "what is to be done")
        oid = matching(SHA256, table.get("oid"), "the hash of a file")
        links[oid] = {
            name: _link(actions[name]) for name in ("upload", "verify") if name in actions
        }
    return links


def number_in(answer: Any) -> int:
    """Read the number of the pull request that a commit opened."""
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


def _link(value: Any) -> dict[str, Any]:
    table = table_in(value, "a link")
    headers = table_in(table.get("header") or {}, "the headers of a link")
    if not all(_IN_A_HEADER.fullmatch(f"{k}{v}") for k, v in headers.items()):
        raise GarbledError("the headers of a link hold what no header can")
    return {
        "href": text_in(table.get("href"), "a link"),
        "header": {name: str(value) for name, value in headers.items()},
    }
