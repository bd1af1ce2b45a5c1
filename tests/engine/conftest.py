"""A tiny checkpoint of each of two architectures, a pass over it, and a folder for results."""

import pytest

from qaudit.saved.results import ResultStore
from tests.support import passes


@pytest.fixture(scope="module", params=passes.CONFIGS)
def checkpoint(request, once):
    return once(passes.save, request.param)


@pytest.fixture(scope="module")
def finished(checkpoint, once):
    return once(passes.finished, checkpoint)


@pytest.fixture
def store(tmp_path):
    return ResultStore(tmp_path / "evidence")
