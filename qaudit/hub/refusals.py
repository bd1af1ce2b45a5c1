"""A status of the Hub -> a sentence that says which of repo, revision, file or right it is.

The Hub hides what a caller may not see: without a token, a private repository and a missing
one give the same 401, often without any code. The sentence then says both. A repository that
is gated says so in `X-Error-Code`, and so do a missing revision and a missing file. What the
server writes itself is shown only for unexpected statuses: cleaned, cut, without the token.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass

from qaudit.errors import HubError
from qaudit.hub.entries import Kind

LOG_IN = "log in with `hf auth login` or set `HF_TOKEN`"


@dataclass(frozen=True)
class Asked:
    """What a call is about, in the words of its caller."""

    call: str  # "the files of `org/name`"
    repo: str
    kind: Kind = "model"
    revision: str | None = None
    path: str | None = None
    writes: bool = False

    @property
    def what(self) -> str:
        """Name the repository; that it holds a model goes without saying."""
        return f"`{self.repo}`" if self.kind == "model" else f"{self.kind} `{self.repo}`"

    @property
    def where(self) -> str:
        """Name the repository at a revision, and the file if it is about one."""
        revision = f"`{self.revision}` of " if self.revision else ""
        return f"`{self.path}` in {revision}{self.what}" if self.path else f"{revision}{self.what}"

    def page(self, endpoint: str) -> str:
        """Return the address where a person can look at the repository."""
        return f"{endpoint}/{'datasets/' if self.kind == 'dataset' else ''}{self.repo}"


@dataclass(frozen=True)
class Caller:
    """Who asked: where, and with a token or without."""

    endpoint: str
    token: str | None

    def __post_init__(self) -> None:
        """Refuse a token that no header can hold, without showing it."""
        if self.token and not re.fullmatch(r"[!-~]+", self.token):
            raise HubError(
                "the token for the Hub holds characters that no token has",
                hint="look for a line break or a quote in `HF_TOKEN`, or log in again",
            )

    def __repr__(self) -> str:
        """Show all but the token."""
        return f"Caller({self.endpoint!r}, logged_in={self.token is not None})"

    def cleaned(self, text: str) -> str:
        """Return a server's own words on one short line, with the token cut out of them."""
        if self.token:
            text = text.replace(self.token, "...")
        plain = "".join(" " if unicodedata.category(c)[0] in "CZ" else c for c in text)
        line = " ".join(plain.split()).replace("`", "'")
        return f"{line[:200]}..." if len(line) > 200 else line


def refusal(status: int, headers: Mapping[str, str], asked: Asked, caller: Caller) -> HubError:
    """Make the error for an answer that says no."""
    code, message = headers.get("x-error-code", ""), headers.get("x-error-message", "")
    if code == "GatedRepo":
        return _gated(asked, caller, known=status == 403)
    if code == "RevisionNotFound":
        return no_revision(asked)
    if code == "EntryNotFound":
        return no_file(asked)
    if message == "Access to this resource is disabled.":
        return HubError(f"{asked.what} is disabled on the Hub", hint="audit another one")
    if status == 401 and code != "RepoNotFound" and caller.token:
        return _wrong_token(asked)
    if status in (401, 404):
        return _no_repository(asked, caller)
    if status == 403:
        return _forbidden(asked, caller, message)
    if status == 412:
        return HubError(
            f"`{asked.revision}` of {asked.what} has moved since it was read",
            hint="run the same command again: it reads what is there now",
        )
    said = f": {caller.cleaned(message)}" if message.strip() else ""
    return HubError(
        f"the Hub answers {status} when asked for {asked.call}{said}",
        hint=f"look at {asked.page(caller.endpoint)}, and report what you see there",
    )


def no_revision(asked: Asked, hint: str = "") -> HubError:
    """Make the error for a branch, tag or commit that is not there."""
    return HubError(
        f"{asked.what} has no revision `{asked.revision}`",
        hint=hint
        or (
            f"`qaudit series {asked.repo}` lists those it has"
            if asked.kind == "model"
            else "leave the revision out for what is there now"
        ),
    )


def no_file(asked: Asked) -> HubError:
    """Make the error for a file that is not there."""
    return HubError(
        f"there is no `{asked.path}` in {Asked('', asked.repo, asked.kind, asked.revision).where}",
        hint="check the path; upper and lower case differ",
    )


def not_known_offline(asked: Asked, hint: str = "") -> HubError:
    """Make the error for what is not known here and must not be asked for."""
    return HubError(
        f"this machine does not know {asked.call}, and `HF_HUB_OFFLINE` keeps it from asking",
        hint=hint
        or "unset `HF_HUB_OFFLINE` and run the command once online; what it learns is kept",
    )


def _gated(asked: Asked, caller: Caller, *, known: bool) -> HubError:
    page = asked.page(caller.endpoint)
    if known:
        return HubError(
            f"{asked.what} is gated, and your account has no access to it",
            hint=f"ask for access at {page}, then run the same command again",
        )
    if caller.token:
        return HubError(
            f"{asked.what} is gated, and the token that was sent is not accepted for it",
            hint=f"{LOG_IN} again, with an account that has access ({page})",
        )
    return HubError(
        f"{asked.what} is gated, and you are not logged in",
        hint=f"ask for access at {page}, then {LOG_IN}",
    )


def _wrong_token(asked: Asked) -> HubError:
    return HubError(
        f"the Hub does not accept the token that was sent to ask for {asked.call}",
        hint="it may be mistyped or expired: log in again with `hf auth login`, "
        "or set `HF_TOKEN` to another one",
    )


def _no_repository(asked: Asked, caller: Caller) -> HubError:
    if caller.token:
        return HubError(
            f"{asked.what} does not exist, or is private and closed to this token",
            hint=f"check the name at {asked.page(caller.endpoint)}",
        )
    return HubError(
        f"{asked.what} does not exist, or is private",
        hint=f"check the name; if it is private, {LOG_IN}",
    )


def _forbidden(asked: Asked, caller: Caller, message: str) -> HubError:
    said = f" ({caller.cleaned(message)})" if message.strip() else ""
    if asked.writes:
        return HubError(
            f"this token has no right to write to {asked.what}{said}",
            hint=f"use a token with the role `write`: {LOG_IN}; and see at "
            f"{asked.page(caller.endpoint)} whether it takes pull requests",
        )
    who = (
        "this token has no right to read"
        if caller.token
        else "without a token there is no right to read"
    )
    return HubError(
        f"{who} {asked.where}{said}",
        hint=f"use a token that may read {asked.page(caller.endpoint)}, or {LOG_IN}",
    )
