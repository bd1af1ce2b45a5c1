"""A local Hugging Face Hub that the unmodified client takes for the real one.

    with Hub(root, tokens={"hf_bob": "bob"}).running() as hub:
        HfApi(endpoint=hub.url) ...
        hub.faults.append({"match": "GET /cdn", "cut": 1000, "times": 1})

    python -m tests.support.hub ROOT --port 8765 --token hf_alice=alice

Folders are served as repos, in which every file has the id that git would give (folders.py); what
goes wrong is said by the test (wire.py). What the real Hub has and this one lacks: the
content-addressed xet storage, git over HTTP, spaces, renamed repos, and the making of repos.
"""

import contextlib
from collections.abc import Callable

import pytest

from tests.support.hub.folders import write_headers
from tests.support.hub.server import Hub

__all__ = ["Hub", "Serve", "serve", "write_headers"]


Serve = Callable[..., Hub]
"""Start a Hub over a folder; it takes the arguments of `Hub`."""


@pytest.fixture
def serve():
    """Start Hubs that are gone when the test ends, and fail a test in which one had a bug."""
    with contextlib.ExitStack() as stack:

        def start(root=None, **settings):
            return stack.enter_context(Hub(root, **settings).running())

        yield start
