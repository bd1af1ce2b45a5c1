"""Parts on devices of several kinds: recorded, one subject measured on each, and a finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import Run, audit_of, refused
from tests.support.parts import demo, losses, same_audit

pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture
def planned(tmp_path: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert qaudit("plan", *demo(tmp_path), "--out", "out").code == 0
    return tmp_path / "out"


def on(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("qaudit.engine.machine.device_name", lambda _: kind)


def mixed(folder: Path) -> list[dict[str, object]]:
    return [one for one in audit_of(folder)["findings"] if one["rule"] == "QA044"]


@pytest.mark.slow
def test_one_subject_is_measured_on_each_kind_of_device(
    planned: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, kind in enumerate(("A100", "H200")):
        on(monkeypatch, kind)
        assert qaudit("part", planned, "--part", f"{number}/2").code == 0
    assert qaudit("collect", planned).code == 3  # what ships, on the other kind
    (finding,) = mixed(planned)
    assert "on 2 kinds of devices (A100, H200), and by how much" in str(finding["message"])
    assert (finding["level"], finding["outcome"]) == ("warn", "inconclusive")
    due = qaudit("collect", planned)
    refused(due, 3, "round 2 has 1 subject, and 1 is not measured yet", "qaudit part")
    on(monkeypatch, "L4")
    assert "0 subjects, 0 measured" in qaudit("part", planned, "--part", "0/1").err
    for kind in ("A100", "H200"):
        on(monkeypatch, kind)
        assert qaudit("part", planned, "--part", "0/1").code == 0
    assert qaudit("collect", planned).code == 0
    (finding,) = mixed(planned)
    assert finding["level"] == "info"  # here they are one and the same CPU
    assert "differs by 0 nats per token" in str(finding["message"])
    assert qaudit("report", planned, "--format", "md").out.count("kinds of devices") >= 1
    assert qaudit("scan", *demo(planned.parent), "--out", "whole").code == 0
    assert losses(planned.parent / "whole") == losses(planned)


@pytest.mark.slow
def test_one_kind_is_no_finding(planned: Path, qaudit: Run) -> None:
    for _ in range(2):
        assert qaudit("part", planned, "--part", "0/1").code == 0
        code = qaudit("collect", planned).code
    assert code == 0
    assert mixed(planned) == []
    assert "measured_on" not in audit_of(planned)["environment"]
    assert qaudit("scan", *demo(planned.parent), "--out", "whole").code == 0
    same_audit(planned.parent / "whole", planned)
