"""Few steps of a search where a contract holds after any number of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qaudit.core.schemes import duquant


@pytest.fixture(autouse=True, scope="module")
def _few_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(duquant, "STEPS", 8)
        yield
