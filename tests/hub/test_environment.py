"""Variables of the environment that make no sense: a sentence that names the variable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.errors import QauditError, UsageError
from qaudit.hub import environment
from qaudit.hub.client import Client
from qaudit.hub.failures import requested_wait_seconds
from qaudit.hub.series import find_all

ODD = [
    ("HF_ENDPOINT", "http://localhost:99999999"),
    ("HF_ENDPOINT", "http://localhost:x"),
    ("HF_ENDPOINT", "http://[::1"),
    ("HF_ENDPOINT", "\x1b[31m"),
    ("HF_HUB_DOWNLOAD_TIMEOUT", "x"),
    ("HF_HUB_DOWNLOAD_TIMEOUT", ""),
    ("HF_HUB_ETAG_TIMEOUT", "1.5"),
    ("HTTP_PROXY", "http://[::1"),
    ("HTTPS_PROXY", "http://a:b:c"),
    ("ALL_PROXY", "ftp://x"),
    ("all_proxy", "socks5://x"),
    ("SSL_CERT_FILE", "/nowhere/certificates"),
]


@pytest.mark.parametrize(("name", "value"), ODD)
def test_an_odd_variable_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught:
        Client.from_environment()
    assert f"`{name}`" in caught.value.message
    assert caught.value.message.isprintable()
    assert caught.value.hint


def test_certificates_are_read_once_for_each_place_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, contexts = httpx2.create_ssl_context, list[object]()
    monkeypatch.setattr(httpx2, "create_ssl_context", lambda: contexts.append(1) or read())
    environment._certificates.cache_clear()
    for _ in range(2):
        Client.from_environment()
    assert len(contexts) == 1
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/certificates")
    with pytest.raises(UsageError, match="SSL_CERT_FILE"):
        Client.from_environment()
    assert len(contexts) == 2


def test_a_local_audit_names_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "x")
    with pytest.raises(UsageError, match="HF_HUB_DOWNLOAD_TIMEOUT"):
        find_all([str(tmp_path)], None, pytest.fail)


def test_a_process_that_starts_with_it_names_it() -> None:
    code = "from qaudit.hub import open_hub; open_hub()"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_DOWNLOAD_TIMEOUT": "x"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "UsageError: `HF_HUB_DOWNLOAD_TIMEOUT` is `x`" in found.stderr


@given(text=st.text(max_size=20).filter(lambda text: "\0" not in text))
def test_any_endpoint_is_taken_or_refused(text: str) -> None:
    try:
        Client(text)
    except QauditError as error:
        assert "HF_ENDPOINT" in error.message


@given(after=st.text(max_size=40) | st.integers(0, 10**40).map(str), limit=st.text(max_size=40))
def test_any_header_gives_a_wait_or_none(after: str, limit: str) -> None:
    headers = {"retry-after": after, "ratelimit": limit}
    wait = requested_wait_seconds(429, headers, 0.0)
    assert wait is None or wait >= 0


def test_a_wait_of_years_is_read_as_one() -> None:
    assert requested_wait_seconds(429, {"retry-after": "1000000000"}, 0.0) == 1e9
