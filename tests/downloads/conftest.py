"""No thread of a download outlives its test."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest

from tests.support.downloads import Fake


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterable[None]:
    yield
    assert not [t.name for t in threading.enumerate() if t.name.startswith("downloads")]


@pytest.fixture
def fake() -> Fake:
    return Fake()
