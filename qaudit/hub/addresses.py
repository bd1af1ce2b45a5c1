"""The addresses of the environment: the Hub, proxies and certificates, each refused by name."""

from __future__ import annotations

import os
from http.cookiejar import CookieJar, DefaultCookiePolicy
from urllib.parse import urljoin, urlsplit

import httpx2

from qaudit import __version__
from qaudit.errors import UsageError

Origin = tuple[str, str, int]
"""Scheme, host and port: what a token is for."""


def origin_of(url: str) -> Origin:
    """Return scheme, host and port of an address, all empty if it is none."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        return "", "", 0
    return parts.scheme, (parts.hostname or "").lower(), port


def joined(url: str, location: str) -> str:
    """Return where a location leads from an address, or nothing if that is nowhere."""
    try:
        return urljoin(url, location)
    except ValueError:
        return ""


def checked_endpoint(endpoint: str) -> Origin:
    """Return the origin of an address that may be the Hub's; a password in it is refused."""
    scheme, host, port = origin_of(endpoint)
    if not host or scheme not in ("http", "https") or "@" in endpoint:
        shown = endpoint.rpartition("@")[2]
        raise UsageError(
            f"`HF_ENDPOINT` is `{ascii(shown)[1:-1][:200]}`, which is not the address of a Hub",
            hint="set `HF_ENDPOINT` to something like `https://huggingface.co`, or unset it",
        )
    return scheme, host, port


def http_client(auth: httpx2.Auth, timeout_seconds: float) -> httpx2.Client:
    """Open a client with the proxies and certificates of the environment, and no cookies."""
    try:
        return httpx2.Client(
            auth=auth,
            timeout=timeout_seconds,
            headers={"User-Agent": f"qaudit/{__version__}"},
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        )
    except (httpx2.InvalidURL, ValueError, ImportError) as error:
        names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
        found = [n for name in names for n in (name, name.lower()) if os.environ.get(n)]
        why = " ".join(str(error).split())[:200] if not isinstance(error, ImportError) else "SOCKS"
        raise UsageError(
            f"`{'`, `'.join(found)}` cannot be used as a proxy: {why}",
            hint="set it to an address like `http://proxy:3128`, or unset it",
        ) from error
    except OSError as error:
        raise UsageError(
            f"`SSL_CERT_FILE` or `SSL_CERT_DIR` cannot be read: {error.strerror or error}",
            hint="set it to a file of certificates that is there, or unset it",
        ) from error
