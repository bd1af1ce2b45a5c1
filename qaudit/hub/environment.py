"""The environment's variables for the Hub: address, token, proxies, each refused by its name.

They are read at every call: two clients of one process may have different settings, and a
variable that is set after a module was loaded counts.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from qaudit.errors import HubError, UsageError

if TYPE_CHECKING:  # a local audit checks the variables and needs no connection
    import httpx2

ENDPOINT = "https://huggingface.co"
Origin = tuple[str, str, int]
"""Scheme, host and port: what a token is for."""


@dataclass(frozen=True)
class Settings:
    """The settings of a client; the token is in no text that is made of them."""

    endpoint: str
    token: str | None = field(repr=False)
    offline: bool
    timeout_seconds: float


def check_variables() -> None:
    """Refuse values that the client's library could not be imported with."""
    for name in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):
        value = os.environ.get(name)
        if value is not None and not re.fullmatch(r"\s*[1-9]\d{0,4}\s*", value):
            raise UsageError(
                f"`{name}` is `{ascii(value)[1:-1][:60]}`, which is not a number of seconds",
                hint=f"set `{name}` to a whole number from 1 to 99999, or unset it",
            )


def environment_settings() -> Settings:
    check_variables()
    offline = _is_set("HF_HUB_OFFLINE") or _is_set("TRANSFORMERS_OFFLINE")
    anonymous = offline or _is_set("HF_HUB_DISABLE_IMPLICIT_TOKEN")
    return Settings(
        endpoint=os.environ.get("HF_ENDPOINT") or ENDPOINT,
        token=None if anonymous else _token(),
        offline=offline,
        timeout_seconds=float(os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT") or 30),
    )


def _token() -> str | None:
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


def _is_set(name: str) -> bool:
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
    except (httpx2.InvalidURL, ValueError, ImportError) as error:
        names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
        used = [n for name in names for n in (name, name.lower()) if os.environ.get(n)]
        why = " ".join(str(error).split())[:200] if not isinstance(error, ImportError) else "SOCKS"
        raise UsageError(
            f"`{'`, `'.join(used)}` cannot be used as a proxy: {why}",
            hint="set it to an address like `http://proxy:3128`, or unset it",
        ) from error
    except OSError as error:
        raise UsageError(
            f"`SSL_CERT_FILE` or `SSL_CERT_DIR` cannot be read: {error.strerror or error}",
            hint="set it to a file of certificates that is there, or unset it",
        ) from error
