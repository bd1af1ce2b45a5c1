"""Two hosts on one folder: live files stay, late ones are waited for, numbers are equal."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from qaudit.executors import records
from tests.support.cli import Run, refused
from tests.support.parts import MAIN, demo, numbers, same_audit, start, until

pytestmark = pytest.mark.usefixtures("without_pictures")

NAMESPACES = ["unshare", "--pid", "--uts", "--fork", "--mount-proc", "--kill-child"]
if os.getuid():
    NAMESPACES[1:1] = ["--user", "--map-root-user"]

SLOW = """
import time
from pathlib import Path
import numpy as np

savez = np.savez_compressed

def slow(file, **arrays):
    savez(file, **arrays)
    file.flush()
    Path("writing").touch()
    while not Path("go").exists():
        time.sleep(0.01)

np.savez_compressed = slow
"""


COSTS = {
    "nbytes_memory_available", "seconds_low", "seconds_high", "detectable_relative_error", "digest"
}  # fmt: skip


def why_not() -> str:
    """Return why there are no namespaces here; empty where there are."""
    if shutil.which("unshare") is None:
        return "`unshare` is not installed"
    done = subprocess.run(
        [*NAMESPACES, "hostname", "n1"], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else f"no namespaces here: {done.stderr.strip()}"


WHY_NOT = why_not()


@pytest.fixture
def planned(tmp_path: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert qaudit("plan", *demo(tmp_path), "--out", "out").code == 0
    return tmp_path / "out"


def host(name: str, place: Path, *arguments: object, main: str = MAIN) -> subprocess.Popen[str]:
    """Start a command on a host of its own: its name and its process numbers are no others'."""
    shell = ["sh", "-c", 'hostname "$0" && exec "$@"', name]
    return start(place, *arguments, main=main, before=[*NAMESPACES, *shell])


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_two_hosts_with_equal_process_numbers_leave_each_others_files(
    planned: Path, qaudit: Run
) -> None:
    place = planned.parent
    slow = host("n1", place, "part", planned, "--part", "0/1", main=SLOW + MAIN)
    until((place / "writing").exists)
    (half,) = (planned / "evidence").glob("*.partial")
    assert ".n1-" in half.name
    other = host("n2", place, "part", planned, "--part", "0/1")  # the same subjects, all of them
    _, err = other.communicate(timeout=300)
    assert other.returncode == 0, err
    assert half.exists()
    (place / "go").touch()
    _, err = slow.communicate(timeout=300)
    assert slow.returncode == 0, err
    assert not list(planned.rglob("*.partial"))
    assert '"pid": 1,' in (planned / "parts" / "0-of-1.jsonl").read_text()
    assert qaudit("collect", planned).code == 0
    assert qaudit("scan", *demo(place), "--out", "whole").code == 0
    same_audit(place / "whole", planned)


def test_collect_waits_for_what_a_log_names_and_the_folder_does_not_show_yet(
    planned: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert qaudit("part", planned, "--part", "0/1").code == 0
    record = next((planned / "parts" / "units").glob("step10-*.json"))
    evidence = next((planned / "evidence").glob("step200--*.npz"))
    hidden = {path: path.rename(path.with_suffix(".hidden")) for path in (record, evidence)}

    def a_moment_later(_: float) -> None:
        path, place = hidden.popitem()
        place.rename(path)

    monkeypatch.setattr(records.time, "sleep", a_moment_later)
    done = qaudit("collect", planned)
    assert done.code == 0, done.err
    assert "waiting up to 60 s until `" in done.err
    assert hidden == {}


def test_collect_waits_neither_for_what_no_part_measured_nor_for_ever(
    planned: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_: float) -> None:
        raise AssertionError("waited")

    with monkeypatch.context() as patched:
        patched.setattr(records.time, "sleep", never)
        refused(qaudit("collect", planned), 3, "4 are not measured yet", "qaudit part")
    assert qaudit("part", planned, "--part", "0/1").code == 0
    next((planned / "parts" / "units").glob("step10-*.json")).unlink()
    monkeypatch.setattr(records, "LAG_SECONDS", 0.0)
    refused(qaudit("collect", planned), 3, "1 is not measured yet: `step10`", "qaudit part")


def planned_in(folder: Path) -> Any:
    """Return a plan without what it costs: that is the host's, and known better by now."""

    def without_costs(value: Any) -> Any:
        if isinstance(value, list):
            return [without_costs(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {name: without_costs(item) for name, item in value.items() if name not in COSTS}

    return without_costs(json.loads((folder / "plan.json").read_text(encoding="utf-8")))


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_two_hosts_plan_the_same(planned: Path, qaudit: Run) -> None:
    """A plan that another host makes again is the same one, and its parts stay."""
    assert qaudit("part", planned, "--part", "0/1").code == 0
    before = planned_in(planned)
    again = host("n2", planned.parent, "plan", *demo(planned.parent), "--out", "out")
    _, err = again.communicate(timeout=300)
    assert again.returncode == 0, err
    assert planned_in(planned) == before
    qaudit("collect", planned)
    assert len(numbers(planned)) == 4 * 3
