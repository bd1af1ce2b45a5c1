"""Courses of these tests are known: few samples tell what they hold."""

from __future__ import annotations

from functools import partial

import pytest

from qaudit.core import changepoint


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take fewer samples: chances of 1 % are all that is expected."""
    fewer = partial(changepoint.trajectory, samples=399)
    monkeypatch.setattr("qaudit.diagnostics.phases.trajectory", fewer)
