"""Parts on devices of several kinds: the first decides, others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import Run, refused
from tests.support.parts import demo

pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.mark.slow
def test_a_part_on_another_kind_of_device_is_refused(
    tmp_path: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert qaudit("plan", *demo(tmp_path), "--out", "out").code == 0
    for kind, code in (("A100", 0), ("H200", 78), ("A100", 0)):
        monkeypatch.setattr("qaudit.engine.tasks.device_name", lambda _, kind=kind: kind)
        done = qaudit("part", "out", "--part", "0/2" if kind == "A100" else "1/2")
        assert done.code == code
        if code:
            refused(done, 78, "this device is `H200`", "use `A100` for all parts")
