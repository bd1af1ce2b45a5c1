"""A Hub with a few small revisions, a cache of one's own, and a fetcher that never waits."""

import pytest
from huggingface_hub import close_session, constants

from tests.support.fetching import REVISIONS, Desk, write
from tests.support.hub import Hub


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write(tmp_path_factory.mktemp("hub"), REVISIONS)


@pytest.fixture(autouse=True)
def _online(monkeypatch):
    """Let the library send requests, each test over connections of its own."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    close_session()
    yield
    close_session()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def served(root, request):
    """Serve the folder with the settings that a module calls SERVED."""
    with Hub(root, **getattr(request.module, "SERVED", {})).running() as hub:
        yield hub


@pytest.fixture
def hub(served):
    """Return the Hub without faults, also after a test that stopped it."""
    served.stop()
    served.start()
    for entries in (served.faults, served.log, served.leaks):
        entries.clear()
    return served


@pytest.fixture
def desk(hub, cache):
    return Desk(hub)
