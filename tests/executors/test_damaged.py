"""Whatever a record or a log holds: `status` and `collect` end in a sentence, inside the folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.cli.app import run as command
from qaudit.errors import QauditError
from qaudit.executors import records
from qaudit.executors.records import read_records
from qaudit.executors.status import render, run_status
from qaudit.judging import judge
from qaudit.planning.passes import next_round, planned_rounds
from qaudit.saved.parts import FIRST, read_run
from qaudit.types import units_of
from tests.support.damage import damaged, edited
from tests.support.parts import demo


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder whose first round is measured, with a diagnostic."""
    place = tmp_path_factory.mktemp("damaged")
    arguments = [*demo(place), "--checkpoints", "step10", "--checkpoints", "step200"]
    arguments += ["--set", "diagnostics=weights", "--out", place / "out"]
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(place)
        patched.setattr(records, "LAG_SECONDS", 0.0)
        assert command(["qaudit", "plan", *map(str, arguments)]) == 0
        assert command(["qaudit", "part", str(place / "out"), "--part", "0/1"]) == 0
        yield place / "out"


def read(out: Path) -> None:
    """Read a folder as `status` and `collect` do, up to the next round."""
    render(run_status(out))
    run = read_run(out)
    rounds = planned_rounds(run.plan.passes)
    units = units_of(rounds[0])
    record = judge(run.plan, read_records(run, out, FIRST, units), out)
    next_round(run.plan, rounds, record)


def test_a_whole_folder_is_read(measured: Path) -> None:
    read(measured)


@given(st.data())
def test_any_record_of_a_unit_is_read_or_missing(measured: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted((measured / "parts" / "units").glob("*.json"))))
    whole = path.read_text()
    try:
        if data.draw(st.booleans()):
            path.write_text(json.dumps(damaged(json.loads(whole), data)))
        else:
            path.write_bytes(edited(whole.encode(), data))
        read(measured)
    except QauditError as error:
        assert error.message
    finally:
        path.write_text(whole)


@given(st.data())
def test_any_log_of_a_part_is_read(measured: Path, data: st.DataObject) -> None:
    path = measured / "parts" / "0-of-1.jsonl"
    whole = path.read_text()
    lines = whole.splitlines()
    try:
        number = data.draw(st.integers(0, len(lines) - 1))
        lines[number] = json.dumps(damaged(json.loads(lines[number]), data))
        path.write_text("\n".join(lines[: data.draw(st.integers(1, len(lines)))]))
        if data.draw(st.booleans()):
            path.write_bytes(edited(whole.encode(), data))
        render(run_status(measured))
    finally:
        path.write_text(whole)


@pytest.mark.parametrize("name", ["x-of-y", "1-of-0", "-1-of-2", "1-of-2-of-3"])
def test_a_log_of_no_part_is_left_alone(measured: Path, name: str) -> None:
    path = measured / "parts" / f"{name}.jsonl"
    path.write_text(json.dumps({"at": time.time(), "began": True}) + "\n")
    try:
        assert [part.name for part in run_status(measured).parts] == ["0/1"]
    finally:
        path.unlink()


def test_a_part_whose_clock_is_ahead_is_silent(measured: Path) -> None:
    path = measured / "parts" / "1-of-2.jsonl"
    path.write_text(json.dumps({"at": time.time() + 90_000, "began": True, "host": "n9"}) + "\n")
    try:
        states = {part.name: part.state for part in run_status(measured).parts}
        assert states["1/2"] == "silent"
    finally:
        path.unlink()


@pytest.mark.parametrize("name", ["../x", "evidence/../../x", "/etc/passwd", "evidence//x", "x"])
def test_a_record_whose_names_lead_outside_is_missing(measured: Path, name: str) -> None:
    (path,) = (measured / "parts" / "units").glob("step10-*.json")
    whole = path.read_text()
    document = json.loads(whole)
    document["diagnostics"]["rows"]["weights"][0]["details"] = name
    try:
        path.write_text(json.dumps(document))
        assert [unit.label for unit in run_status(measured).state.missing] == ["step10"]
    finally:
        path.write_text(whole)


def test_a_record_without_one_of_its_results_is_missing(measured: Path) -> None:
    (path,) = (measured / "parts" / "units").glob("step10-*.json")
    whole = path.read_text()
    document = json.loads(whole)
    del document["results"][-1]
    try:
        path.write_text(json.dumps(document))
        assert [unit.label for unit in run_status(measured).state.missing] == ["step10"]
    finally:
        path.write_text(whole)
