"""What tests anywhere may ask for: `serve`, which turns a folder into a running Hub."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from tests.support.hub.server import Hub


class Serve(Protocol):
    """Start a Hub over a folder; it takes the arguments of `Hub`."""

    def __call__(self, root: Path | None = None, **settings: Any) -> Hub: ...


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start Hubs that are gone when the test ends, and fail a test in which one had a bug."""
    from tests.support.hub.server import Hub

    with contextlib.ExitStack() as stack:

        def start(root: Path | None = None, **settings: Any) -> Hub:
            return stack.enter_context(Hub(root, **settings).running())

        yield start
