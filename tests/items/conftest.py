"""Toy data of the twelve tasks for every test of this folder."""

import pytest

from tests.support import toys


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Return a folder of data sets, as org/name."""
    return toys.write(tmp_path_factory.mktemp("data"), toys.SUBJECTS, documents=6)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QAUDIT_CACHE", str(tmp_path / "qaudit"))
