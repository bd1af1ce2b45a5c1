"""What holds for every test: one thread, no network, no settings of the person who runs it."""

from __future__ import annotations

import os
import uuid

# Before anything imports torch: results must not depend on how many cores are at hand, and
# several workers share them.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["HF_TOKEN_PATH"] = os.devnull  # nobody's token goes to a server of a test
os.environ["MPLBACKEND"] = "Agg"

import pytest
from hypothesis import settings

from tests.house.source import sizes

pytest_plugins = ["tests.support.hub.fixtures"]

settings.register_profile("busy", deadline=None)  # a core that others use is no finding
settings.load_profile("busy")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for name in list(os.environ):
        if name.startswith("QAUDIT_"):
            monkeypatch.delenv(name)
    cache = tmp_path_factory.getbasetemp() / f"qaudit-cache-{uuid.uuid4().hex}"
    monkeypatch.setenv("QAUDIT_CACHE", str(cache))  # one for each test, made if it is used


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what has outgrown the house's sizes; a warning to read, never a failure."""
    if lines := sizes():
        terminalreporter.section("sizes")
        for line in lines:
            terminalreporter.write_line(line)
