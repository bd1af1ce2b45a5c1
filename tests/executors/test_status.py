"""What `qaudit status` says of parts, and whatever a record or a log holds: inside the folder."""

import json
import os
import platform
import shutil
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qaudit.cli.app import run as command
from qaudit.errors import QauditError
from qaudit.executors import folder, records
from qaudit.executors.folder import parts_of, render, run_status
from qaudit.executors.records import PartLog, read_records
from qaudit.judging import judge
from qaudit.planning.price import next_round, planned_rounds
from qaudit.saved.parts import FIRST, read_run, unit_path
from qaudit.types import SILENT, units_of
from tests.support.damage import damaged, edited
from tests.support.parts import demo

HERE = platform.node()


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    place = tmp_path_factory.mktemp("planned")
    assert command(["qaudit", "plan", *map(str, demo(place)), "--out", str(place / "out")]) == 0
    return place / "out"


@pytest.fixture
def planned(plan, tmp_path):
    return shutil.copytree(plan, tmp_path / "out")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_stopped_subject_was_not_attempted(tmp_path, error):
    attempts = tmp_path / "step10.attempts"
    path = tmp_path / "0-of-1.jsonl"
    with pytest.raises(error), PartLog(path, lambda _: attempts, SILENT) as part:
        part.subject(0, 1, "step10")
        raise error
    assert attempts.exists() == (error is MemoryError)


def log(out, name, *lines, ago=1.0):
    text = "".join(json.dumps({"at": time.time() - ago, **line}) + "\n" for line in lines)
    (out / "parts" / f"{name}.jsonl").write_text(text)


def states(out):
    return {part.name: part.state for part in run_status(out).parts}


def began(**values):
    return {"began": True, "host": HERE, "pid": os.getpid(), "job": None, **values}


def test_without_a_queue_logs_and_processes_tell(planned):
    (planned / "parts" / "units").mkdir()
    log(planned, "0-of-5", began(), {"subject": "step10"}, {"ended": "done"})
    log(planned, "1-of-5", began(), {"subject": "step10"}, {"ended": "KeyboardInterrupt"})
    log(planned, "2-of-5", began(), {"subject": "step200"})
    log(planned, "3-of-5", began(pid=2**22 + 1), {"subject": "step200"})
    log(planned, "4-of-5", began(host="n7", pid=1), {"subject": "step200"}, ago=400)
    (planned / "parts" / "5-of-6.jsonl").write_text('{"at": 1, "began": tr')  # cut by a kill
    expected = {"0/5": "done", "1/5": "stopped", "2/5": "running", "3/5": "lost", "4/5": "silent"}
    assert states(planned) == expected
    text = render(run_status(planned))
    assert "round 1: 0 of 4 subjects measured, 0 failed, 4 missing" in text
    assert f"part 2/5      running  {HERE} step200" in text


def test_the_queue_tells_states(planned, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    squeue = tmp_path / "bin" / "squeue"
    squeue.touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for number, job in enumerate(("7", "8", "9", "10")):
        log(planned, f"{number}-of-4", began(host="n1", job=job), {"subject": "step10"})
    for answer, expected in (
        ("printf '7 RUNNING\\n8 PENDING\\n9 FAILED\\n'", ["running", "queued", "lost", "lost"]),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", ["lost"] * 4),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", ["running"] * 4),
    ):
        squeue.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/asked\n{answer}\n')
        assert list(states(planned).values()) == expected
        assert "--jobs=7,8,9,10" in (tmp_path / "asked").read_text()


def test_the_time_left_is_of_the_longest_part(planned, monkeypatch):
    run = read_run(planned)
    units = units_of(run.plan.passes)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(folder, "cost_of", lambda unit: 10.0)
    record = unit_path(run, units[0], planned).name
    done = {"measured": "step10", "outcome": "measured", "seconds": 20.0, "record": record}
    log(planned, "0-of-1", began(), {"subject": "step10"}, done, {"subject": "step200"}, ago=5)
    one = run_status(planned)
    assert one.left_seconds == pytest.approx(4 * 20 - 5)  # nothing is on disk yet
    assert one.waiting == ()
    (planned / "parts" / "0-of-1.jsonl").unlink()
    parts = parts_of(run, units, 3)
    assert len(parts) == 3
    for number in (0, 1):
        log(planned, f"{number}-of-3", began(), done, {"subject": "step10"}, ago=5)
    one = run_status(planned)
    assert one.left_seconds == pytest.approx(20 * max(map(len, parts[:2])) - 5)
    assert one.waiting == tuple(unit.label for unit in parts[2])
    text = render(one)
    assert f"about {one.left_seconds:.0f} s left in the parts that run; " in text
    assert text.splitlines()[0].endswith("in no part that runs")
    for path in (planned / "parts").glob("*.jsonl"):
        path.unlink()
    log(planned, "0-of-1", began(), {"subject": "step10"})
    assert run_status(planned).left_seconds is None  # none is made up before anything is measured
    assert "left" not in render(run_status(planned))


# ------------------------------------------------------------------------- damaged folders


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
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


def read(out):
    """Read a folder as `status` and `collect` do, up to the next round."""
    render(run_status(out))
    run = read_run(out)
    rounds = planned_rounds(run.plan.passes)
    units = units_of(rounds[0])
    record = judge(run.plan, read_records(run, out, FIRST, units), out)
    next_round(run.plan, rounds, record)


@settings(max_examples=15)
@given(st.data())
def test_any_record_of_a_unit_is_read_or_missing(measured, data):
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


@settings(max_examples=15)
@given(st.data())
def test_any_log_of_a_part_is_read(measured, data):
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


def test_logs_of_no_part_and_records_that_lead_outside_count_for_nothing(measured):
    began = json.dumps({"at": time.time() + 90_000, "began": True, "host": "n9"})
    strange = ("x-of-y", "1-of-0", "-1-of-2", "1-of-2-of-3", "1-of-2")
    paths = [measured / "parts" / f"{name}.jsonl" for name in strange]
    try:
        for path in paths:
            path.write_text(began + "\n")
        assert states(measured) == {"0/1": "done", "1/2": "silent"}
    finally:
        for path in paths:
            path.unlink()
    (path,) = (measured / "parts" / "units").glob("step10-*.json")
    whole = path.read_text()
    try:
        for name in ("../x", "evidence/../../x", "/etc/passwd", "evidence//x", "x"):
            document = json.loads(whole)
            document["diagnostics"]["rows"]["weights"][0]["details"] = name
            path.write_text(json.dumps(document))
            assert [unit.label for unit in run_status(measured).state.missing] == ["step10"]
    finally:
        path.write_text(whole)
