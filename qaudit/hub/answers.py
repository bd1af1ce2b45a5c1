"""What the Hub answers: names that are checked, failures by what they are called, and waits.

Names in an answer become paths on this machine and sizes become promises about its disk: a commit
is forty hexadecimal digits, a size is a whole number, a path stays below the folder it is joined
to. One bad entry refuses the whole answer, because a listing with holes would price, fetch and
identify something else than what was requested.

Variables of the environment are read at every call: two clients of one process may have different
settings, and a variable that is set after a module was loaded counts.

The Hub hides what an account may not see: without a token, a private repository and a missing one
give the same 401, often without any code. The message then names both. A gated repository, a
missing revision and a missing file have an `X-Error-Code`. The server's own words are shown for
unexpected statuses only: cleaned, cut, without the token.

The Hub counts requests in windows of five minutes and announces when the next one opens; that is
waited out. Without such an announcement, waits grow, and a fraction of each is drawn from the
request itself, so that several workers do not return in the same instant and a test knows every
number.
"""

from __future__ import annotations

import os
import re
import time
import unicodedata
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

from qaudit.errors import HubError, UnreachableError, UsageError
from qaudit.types import Ref

if TYPE_CHECKING:  # a local audit checks the variables and needs no connection
    import httpx2

COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
_KIND = re.compile("branch|tag")
_LARGEST_FILE = 1 << 53  # past it JSON numbers lose their last digits elsewhere
_LONGEST_PATH, _LONGEST_NAME = 4096, 255  # bytes; what file systems take
_REPOSITORY = re.compile(r"\w([\w.-]{0,94}\w)?(/\w([\w.-]{0,94}\w)?)?", re.ASCII)


T = TypeVar("T")
Kind = Literal["model", "dataset"]
"""What a repository holds."""


class GarbledError(ValueError):
    """An answer is not what the Hub sends."""


@dataclass(frozen=True)
class Revision:
    """A name that a repository gives to a commit."""

    name: str
    commit: str
    kind: Literal["branch", "tag"]


@dataclass(frozen=True)
class HubFile:
    """A file at one commit, known by the hash of its bytes before any of them is fetched."""

    path: str
    nbytes: int
    git_id: str  # of the bytes, or of the LFS pointer that stands for them
    sha256: str | None  # of the bytes, where they are kept by LFS

    @classmethod
    def identified(cls, path: str, nbytes: int, identity: str) -> HubFile:
        if identity.startswith("git:"):
            return cls(path, nbytes, identity.removeprefix("git:"), None)
        return cls(path, nbytes, "", identity)

    @property
    def blob(self) -> str:
        """Return the name of the file of the shared cache that holds these bytes."""
        return self.sha256 or self.git_id

    @property
    def identity(self) -> str:
        return self.sha256 or f"git:{self.git_id}"


def is_commit(text: str) -> bool:
    return COMMIT.fullmatch(text) is not None


def revisions_in(rows: Any) -> tuple[Revision, ...]:
    """Read the name, commit and kind of each revision."""
    revisions: dict[str, Revision] = {}
    for name, commit, kind in rows_in(rows, 3):
        plain_path(name, "the name of a revision")
        matching(COMMIT, commit, f"the commit of `{name}`")
        matching(_KIND, kind, f"the kind of `{name}`")
        _add(revisions, f"{kind} `{name}`", Revision(name, commit, kind))
    return tuple(revisions.values())


def files_in(rows: Any) -> tuple[HubFile, ...]:
    """Read the path, size, git id and sha256 of each file in a tree."""
    files: dict[str, HubFile] = {}
    for path, nbytes, git_id, sha256 in rows_in(rows, 4):
        plain_path(path, "the path of a file")
        whole_number(nbytes, path)
        matching(COMMIT, git_id, f"the git id of `{path}`")
        if sha256 is not None:
            matching(SHA256, sha256, f"the sha256 of `{path}`")
        _add(files, f"file `{path}`", HubFile(path, nbytes, git_id, sha256))
    return tuple(sorted(files.values(), key=lambda file: file.path))


def shapes_in(rows: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Read the name, dtype and shape of each tensor."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, dtype, shape in rows_in(rows, 3):
        if not isinstance(name, str) or not isinstance(dtype, str) or not isinstance(shape, list):
            raise GarbledError("an entry is not a tensor")
        _add(shapes, name, (dtype, tuple(whole_number(n, "a tensor") for n in shape)))
    return shapes


def is_repository(text: str) -> bool:
    """Return whether a text is `name` or `owner/name` by the rules of the Hub."""
    plain = _REPOSITORY.fullmatch(text) is not None
    return plain and not any(part in text for part in ("--", "..")) and not text.endswith(".git")


def repository_of(target: str, *, glob: bool = False) -> Ref | None:
    """Return what `[hf://]org/name[@revision][//folder]` names; None for any other text."""
    ref = Ref.parse(target)
    owner, slash, name = ref.location.partition("/")
    name = owner + slash + (re.sub(r"[*?\[\]]", "x", name) if glob else name)
    odd = target.endswith(("@", "//")) or "@" in (ref.revision or "")
    return ref if "/" in name and is_repository(name) and not odd else None


def rows_in(value: Any, columns: int) -> list[Sequence[Any]]:
    if not isinstance(value, list):
        raise GarbledError("it is not a list")
    if any(not isinstance(row, list | tuple) or len(row) != columns for row in value):
        raise GarbledError(f"an entry of it does not have {columns} parts")
    return value


def _add(table: dict[str, T], name: str, value: T) -> None:
    if name in table:
        raise GarbledError(f"it names {name} twice")
    table[name] = value


def plain_path(value: Any, what: str) -> str:
    """Return a relative path of plain segments, which cannot leave its folder."""
    if not isinstance(value, str) or not value:
        raise GarbledError(f"{what} is missing")
    segments = value.split("/")
    if any(segment in ("", ".", "..") for segment in segments) or "\\" in value:
        raise GarbledError(f"{what} is {quoted(value)}, which is not a plain relative path")
    if any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in value):
        raise GarbledError(f"{what} is {quoted(value)}, which holds control characters")
    longest = max(len(segment.encode()) for segment in segments)
    if len(value.encode()) > _LONGEST_PATH or longest > _LONGEST_NAME:
        raise GarbledError(f"{what} is longer than a file's name may be")
    return value


def whole_number(value: Any, path: str) -> int:
    """Return a whole number that JSON holds exactly."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST_FILE:
        raise GarbledError(f"the size of `{path}` is {quoted(value)}")
    return value


def matching(pattern: re.Pattern[str], value: Any, what: str) -> str:
    """Return a text that a pattern matches."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise GarbledError(f"{what} is {quoted(value)}, which is no such id")
    return value


def quoted(value: Any) -> str:
    """Return a foreign value for a message: escaped and short."""
    text = ascii(value)
    return f"`{text[:80]}...`" if len(text) > 80 else f"`{text}`"


# ---------------------------------------------------------------------------- the environment

ENDPOINT = "https://huggingface.co"
Origin = tuple[str, str, int]
"""Scheme, host and port: what a token is for."""


def check_variables() -> None:
    """Refuse values that the client's library could not be imported with."""
    for name in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):
        value = os.environ.get(name)
        if value is not None and not re.fullmatch(r"\s*[1-9]\d{0,4}\s*", value):
            raise UsageError(
                f"`{name}` is `{ascii(value)[1:-1][:60]}`, which is not a number of seconds",
                hint=f"set `{name}` to a whole number from 1 to 99999, or unset it",
            )


def environment_token() -> str | None:
    from huggingface_hub import get_token
    from huggingface_hub.errors import OIDCError

    try:
        return get_token()
    except (OSError, ValueError, OIDCError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
        raise HubError(
            f"the token for the Hub cannot be read: {why.lower()}",
            hint="log in again with `hf auth login`, or set `HF_TOKEN`",
        ) from None  # the cause may quote the token


def is_set(name: str) -> bool:
    return os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")


def origin_of(url: str) -> Origin:
    """Return scheme, host and port of an address, all empty if it is none."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        return "", "", 0
    return parts.scheme, (parts.hostname or "").lower(), port


def endpoint_origin(endpoint: str) -> Origin:
    """Return the origin of an address that may be the Hub's; a password in it is refused."""
    scheme, host, port = origin_of(endpoint)
    if not host or scheme not in ("http", "https") or "@" in endpoint:
        shown = endpoint.rpartition("@")[2]
        raise UsageError(
            f"`HF_ENDPOINT` is `{ascii(shown)[1:-1][:200]}`, which is not the address of a Hub",
            hint="set `HF_ENDPOINT` to something like `https://huggingface.co`, or unset it",
        )
    return scheme, host, port


def session() -> httpx2.Client:
    """Return the library's session, with the proxies and certificates of the environment."""
    import httpx2
    from huggingface_hub import get_session

    try:
        return get_session()
    except (httpx2.InvalidURL, ValueError, ImportError, OSError) as error:
        names = ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"]
        names += ["SSL_CERT_FILE", "SSL_CERT_DIR"]
        used = [n for name in names for n in (name, name.lower()) if os.environ.get(n)]
        why = " ".join(str(error).split())[:200] if not isinstance(error, ImportError) else "SOCKS"
        raise UsageError(
            f"no connection can be made with `{'`, `'.join(used)}` as they are set: {why}",
            hint="set proxies to addresses like `http://proxy:3128` and certificates to a file "
            "that is there, or unset them",
        ) from error


# ------------------------------------------------------------------------------------ failures

LOG_IN = "log in with `hf auth login` or set `HF_TOKEN`"
RESUME = "run the same command again: it goes on from here"
"""The hint for every failure that may pass with time."""

TRIES, TRIES_UNREACHED = 6, 3  # without a connection, more waiting rarely helps
LONGEST_WAIT_SECONDS = 360.0
"""A window of the Hub and some; a longer wait ends the command with a hint."""

_WAITS_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)
_WAITS_LIMITED_SECONDS = (15.0, 30.0, 60.0, 120.0, 120.0)  # past the end of a window
_RATE_LIMIT = re.compile(r'"\w+"\s*;\s*r\s*=\s*(\d{1,9})\s*;\s*t\s*=\s*(\d{1,9})')


@dataclass(eq=False)
class DroppedError(Exception):
    """A transfer broke off: the bytes before that are good, and the rest can be requested again."""

    reason: str
    wait_seconds: float | None = None  # as the server requested it
    status: int | None = None
    unreached: bool = False  # no connection was made, so there is not even a status

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Request:
    """What a request is about, for messages."""

    call: str  # "the files of `org/name`"
    repo: str
    kind: Kind = "model"
    revision: str | None = None
    path: str | None = None
    writes: bool = False

    @property
    def what(self) -> str:
        return f"`{self.repo}`" if self.kind == "model" else f"{self.kind} `{self.repo}`"

    @property
    def where(self) -> str:
        revision = f"`{self.revision}` of " if self.revision else ""
        return f"`{self.path}` in {revision}{self.what}" if self.path else f"{revision}{self.what}"

    def page(self, endpoint: str) -> str:
        return f"{endpoint}/{'datasets/' if self.kind == 'dataset' else ''}{self.repo}"


@dataclass(frozen=True)
class Credentials:
    """The address of a Hub, and the token for it, if there is one."""

    endpoint: str
    token: str | None = field(repr=False)

    def __post_init__(self) -> None:
        if self.token and not re.fullmatch(r"[!-~]+", self.token):
            raise HubError(
                "the token for the Hub holds characters that no token has",
                hint="look for a line break or a quote in `HF_TOKEN`, or log in again",
            )

    def cleaned(self, text: str) -> str:
        """Return a server's own words on one short line, with the token cut out of them."""
        if self.token:
            text = text.replace(self.token, "...")
        plain = "".join(" " if unicodedata.category(c)[0] in "CZ" else c for c in text)
        line = " ".join(plain.split()).replace("`", "'")
        return f"{line[:200]}..." if len(line) > 200 else line


def refusal(
    status: int, headers: Mapping[str, str], request: Request, credentials: Credentials
) -> HubError:
    code, message = headers.get("x-error-code", ""), headers.get("x-error-message", "")
    page, has_token = request.page(credentials.endpoint), credentials.token is not None
    words = credentials.cleaned(message) if message.strip() else ""
    why = f"the Hub answers {status} when asked for {request.call}{f': {words}' if words else ''}"
    hint = f"look at {page}, and report what you see there"
    if code == "RevisionNotFound":
        return no_revision(request)
    if code == "EntryNotFound":
        return no_file(request)
    if code == "GatedRepo":
        why, hint = "you are not logged in", f"ask for access at {page}, then {LOG_IN}"
        if has_token:
            why = "the token that was sent is not accepted for it"
            hint = f"{LOG_IN} again, with an account that has access ({page})"
        if status == 403:
            why = "your account has no access to it"
            hint = f"ask for access at {page}, then run the same command again"
        why = f"{request.what} is gated, and {why}"
    elif message == "Access to this resource is disabled.":
        why, hint = f"{request.what} is disabled on the Hub", "audit another one"
    elif status == 401 and code != "RepoNotFound" and has_token:
        why = f"the Hub does not accept the token that was sent to ask for {request.call}"
        hint = (
            "it may be mistyped or expired: log in again with `hf auth login`, "
            "or set `HF_TOKEN` to another one"
        )
    elif status in (401, 404) and has_token:
        why = f"{request.what} does not exist, or is private and closed to this token"
        hint = f"check the name at {page}"
    elif status in (401, 404):
        why = f"{request.what} does not exist, or is private"
        hint = f"check the name; if it is private, {LOG_IN}"
    elif status == 403:
        why = f"right to read {request.where}"
        hint = f"use a token that may read {page}, or {LOG_IN}"
        if request.writes:
            why = f"right to write to {request.what}"
            hint = f"use a token with the role `write`: {LOG_IN}; and see at {page} whether it "
            hint += "takes pull requests"
        begin = "this token has no" if has_token else "without a token there is no"
        why = f"{begin} {why}{f' ({words})' if words else ''}"
    elif status == 412:
        why = f"`{request.revision}` of {request.what} has moved since it was read"
        hint = "run the same command again: it reads what is there now"
    return HubError(why, hint=hint)


def no_revision(request: Request, hint: str = "") -> HubError:
    if not hint and request.kind == "model":
        hint = f"`qaudit series {request.repo}` lists those it has"
    return HubError(
        f"{request.what} has no revision `{request.revision}`",
        hint=hint or "leave the revision out for what is there now",
    )


def no_file(request: Request) -> HubError:
    where = Request("", request.repo, request.kind, request.revision).where
    return HubError(
        f"there is no `{request.path}` in {where}",
        hint="check the path; upper and lower case differ",
    )


def not_known_offline(request: Request, hint: str = "") -> HubError:
    """Return the error for what neither the cache nor, offline, the Hub can answer."""
    return HubError(
        f"this machine does not know {request.call}, and `HF_HUB_OFFLINE` keeps it from asking",
        hint=hint
        or "unset `HF_HUB_OFFLINE` and run the command once online; what it learns is kept",
    )


def requested_wait_seconds(status: int, headers: Mapping[str, str], now: float) -> float | None:
    """Return how long a response asks to wait, if it does; `now` is in seconds since 1970."""
    rate = _RATE_LIMIT.search(headers.get("ratelimit", ""))
    if status == 429 and rate is not None and int(rate[1]) == 0:
        return int(rate[2]) + 1.0  # its clock counts whole seconds
    after = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d{1,300}", after, re.ASCII):
        return float(after)
    try:
        date = parsedate_to_datetime(after)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return max(0.0, (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - now)


def wait_seconds(dropped: DroppedError, failures: int, call: str, before: str) -> float:
    """Return how long to wait after so many failures: as requested, or longer each time.

    `before` is what the Hub does afterwards; a wait of hours is not begun.
    """
    if (requested := dropped.wait_seconds) is not None:
        if requested > LONGEST_WAIT_SECONDS:
            raise UnreachableError(
                f"the Hub asks to wait {requested:.6g} s before it {before}",
                hint=f"when that time is over, {RESUME}; to be let in more often, {LOG_IN}",
            ) from dropped
        return requested
    waits = _WAITS_LIMITED_SECONDS if dropped.status == 429 else _WAITS_SECONDS
    fraction = zlib.crc32(f"{call} {failures}".encode()) / 2**32
    return waits[min(failures, len(waits)) - 1] * (0.75 + 0.5 * fraction)


def dropped_response(response: httpx2.Response) -> DroppedError | None:
    status = response.status_code
    if status not in (408, 429) and status < 500:
        return None
    wait = requested_wait_seconds(status, response.headers, time.time())
    return DroppedError(f"it answers {status}", wait, status=status)
