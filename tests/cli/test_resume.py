"""The same command again goes on after a kill, an interrupt or a full disk, and never twice."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import qaudit.engine.measure
import qaudit.saved.results
from qaudit.planning.prepare import default_folder
from tests.support.cli import QUICK, Run, audit_of, refused, run_in
from tests.support.models import write_documents

SERIES = ["step10", "step200", "step1000"]

# Runs the command line, says so in the middle of the second subject, and waits to be stopped.
STOPS = """
import sys, time
from qaudit.cli import main
from qaudit.cli.progress import Progress

class Stop:
    subjects = 0

def subject(self, done, total, label, passes=1, draw=Progress.subject):
    Stop.subjects += 1
    draw(self, done, total, label, passes)

def block(self, done, total, what, draw=Progress.block):
    draw(self, done, total, what)
    if Stop.subjects == 2 and done:
        print("in the middle", flush=True)
        time.sleep(600)

Progress.subject, Progress.block = subject, block
main()
"""


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Return a list that grows by every pass: its subject, and the schemes measured in it."""
    seen: list[tuple[str, ...]] = []
    really = qaudit.engine.measure.send

    def watched(task: Any, *rest: Any) -> Any:
        seen.append((task.subject.label, *(scheme.short for scheme in task.schemes)))
        return really(task, *rest)

    monkeypatch.setattr("qaudit.engine.measure.send", watched)
    return seen


@pytest.fixture(scope="module")
def scanned(shipped: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what a scan of the series left, in `series`, and one of its first, in `step10`."""
    folder = tmp_path_factory.mktemp("scanned") / "place"
    shutil.copytree(shipped, folder)
    for target in ("series", "series/step10"):
        assert run_in(folder, "scan", *QUICK[:-1], f"of-{Path(target).name}", target) == 0
    return folder


@pytest.fixture
def after_series(scanned: Path, place: Path) -> None:
    shutil.copytree(scanned / "of-series", place / "out")


@pytest.fixture
def after_step10(scanned: Path, place: Path) -> None:
    shutil.copytree(scanned / "of-step10", place / "out")


def numbers(audit: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what an audit concludes, without when, how fast and in which file."""
    other = {"seconds", "evidence_sha256"}
    rows = [*audit["measurements"], *audit["comparisons"], *audit["findings"], audit["pick"]]
    return [{key: value for key, value in row.items() if key not in other} for row in rows]


def without_times(audit: dict[str, Any]) -> dict[str, Any]:
    """Return a whole audit without when it was made, how fast, and how much memory was free."""
    of_the_machine = ("seconds_low", "seconds_high", "nbytes_memory_available", "presets")
    plan = {name: value for name, value in audit["plan"].items() if name not in of_the_machine}
    rows = [
        {name: value for name, value in row.items() if name not in ("seconds", "evidence_sha256")}
        for row in audit["measurements"]
    ]
    return {**audit, "environment": None, "plan": plan, "measurements": rows}


def stopped(place: Path, how: signal.Signals) -> tuple[int, str]:
    """Start a scan in another process and stop it in the middle of the second subject."""
    process = subprocess.Popen(
        [sys.executable, "-c", STOPS, "scan", "series", *QUICK],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "in the middle\n"
    process.send_signal(how)
    _, err = process.communicate()
    return process.returncode, err


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.npz")}


def test_a_killed_scan_goes_on_and_ends_as_if_nothing_had_happened(
    place: Path, scanned: Path, scan: Run, passes: list[tuple[str, ...]]
) -> None:
    code, _ = stopped(place, signal.SIGKILL)
    before = times(place / "out" / "evidence")
    assert code == -signal.SIGKILL
    assert sorted(name.split("--")[0] for name in before) == ["step10", "step10"]
    assert not (place / "out" / "audit.json").exists()

    assert scan("series").code == 0
    assert [subject for subject, *_ in passes] == ["step200", "step1000"]
    after = times(place / "out" / "evidence")
    assert {name: after[name] for name in before} == before

    whole = audit_of(scanned / "of-series")
    assert without_times(audit_of(place / "out")) == without_times(whole)


@pytest.mark.slow
def test_an_interrupted_scan_says_how_to_go_on(place: Path) -> None:
    code, err = stopped(place, signal.SIGINT)
    assert "error: interrupted; results are kept in `out`" in err
    assert f"hint: run the same command again: qaudit scan series {' '.join(QUICK)}" in err
    assert "Traceback" not in err
    assert code == 130
    assert len(times(place / "out" / "evidence")) == 2


@pytest.mark.parametrize(
    "where",
    [
        "qaudit.planning.prepare.make_plan",
        "qaudit.executors.part.read_corpus",
        "qaudit.engine.block_pass.make_batches",
        "qaudit.saved.results.np.savez_compressed",
        "qaudit.audit.judge",
        "qaudit.report.folder.write",
    ],
)
def test_an_interrupt_anywhere_ends_in_words(
    place: Path, scan: Run, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(where, lambda *_, **__: signal.raise_signal(signal.SIGINT))
        refused(
            scan("series/step10"), 130, "interrupted", "run the same command again: qaudit scan"
        )
    assert not list(place.rglob("*.partial"))
    assert scan("series/step10").code == 0


@pytest.mark.usefixtures("after_series")
def test_a_finished_scan_is_not_measured_again(
    place: Path, scan: Run, passes: list[tuple[str, ...]]
) -> None:
    first = audit_of(place / "out")
    assert scan("series").code == 0
    assert passes == []
    assert numbers(audit_of(place / "out")) == numbers(first)


@pytest.mark.usefixtures("after_step10")
def test_one_scheme_more_measures_that_scheme_and_other_text_all(
    place: Path, scan: Run, passes: list[tuple[str, ...]]
) -> None:
    done = scan("series/step10", "--schemes", "rtn-3bit")  # beside rtn-4bit
    assert passes == [("step10", "rtn-3bit")]
    schemes = [row["scheme"] for row in audit_of(place / "out")["measurements"]]
    assert schemes == ["fp", "rtn-4bit", "rtn-3bit"]
    assert done.code == 0
    scan("series/step10", "--schemes", "rtn-3bit", "--set", "context=16")
    assert len(passes) == 2


@pytest.mark.usefixtures("after_series")
def test_other_weights_under_the_same_name_are_measured_anew(
    place: Path, scan: Run, passes: list[tuple[str, ...]]
) -> None:
    before = {row["subject"]: row["ce"] for row in audit_of(place / "out")["measurements"]}
    file = place / "series" / "step200" / "model.safetensors"
    stamps = file.stat()
    tensors = load_file(file)
    tensors["model.norm.weight"][0] *= 2
    save_file(tensors, file, metadata={"format": "pt"})
    os.utime(file, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))  # no cache by date or size
    assert file.stat().st_size == stamps.st_size

    assert scan("series").code == 0
    after = {row["subject"]: row["ce"] for row in audit_of(place / "out")["measurements"]}
    assert passes == [("step200", "rtn-4bit")]
    assert after["step200"] != before["step200"]
    assert {**after, "step200": 0} == {**before, "step200": 0}


@pytest.mark.usefixtures("after_step10")
def test_another_config_with_the_same_weights_is_measured_anew(
    place: Path, scan: Run, passes: list[tuple[str, ...]]
) -> None:
    config = place / "series" / "step10" / "config.json"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-02'))
    assert config.read_text(encoding="utf-8") != text
    assert scan("series/step10").code == 0
    assert len(passes) == 1


def test_the_same_weights_under_two_names_are_measured_once(
    place: Path, scan: Run, passes: list[tuple[str, ...]]
) -> None:
    shutil.copytree(place / "series" / "step10", place / "series" / "step20")
    assert scan("series/step10", "series/step20").code == 0
    assert passes == [("step10", "rtn-4bit")]
    rows = audit_of(place / "out")["measurements"]
    by_name = {(row["subject"], row["scheme"]): row["ce"] for row in rows}
    assert len(by_name) == 4
    assert by_name["step10", "rtn-4bit"] == by_name["step20", "rtn-4bit"]


@pytest.mark.usefixtures("after_step10")
@pytest.mark.parametrize("kept", [0, 200, -30])
def test_evidence_that_is_cut_short_is_measured_anew(
    place: Path, scan: Run, passes: list[tuple[str, ...]], kept: int
) -> None:
    (file,) = (place / "out" / "evidence").glob("step10--rtn-4bit--*.npz")
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    assert scan("series/step10").code == 0
    assert passes == [("step10", "rtn-4bit")]
    assert len(file.read_bytes()) > len(whole) // 2


@pytest.mark.usefixtures("after_series")
def test_edited_evidence_is_measured_anew_and_not_believed(
    place: Path, scan: Run, qaudit: Run
) -> None:
    first = audit_of(place / "out")
    (file,) = (place / "out" / "evidence").glob("step10--rtn-4bit--*.npz")
    with np.load(file) as arrays:
        columns = {name: arrays[name] for name in arrays.files}
    np.savez_compressed(file, **{**columns, "nll_sum": columns["nll_sum"] / 2})
    assert qaudit("gate", "out", "--policy", "explore").code == 4
    assert scan("series").code == 0
    numbers = [
        [row["ce"] for row in audit["measurements"]] for audit in (first, audit_of(place / "out"))
    ]
    assert numbers[0] == numbers[1]


LACKING = [
    (("series", "--checkpoints", "step200"), "`step10`", "scan series --schemes rtn-4bit,rtn"),
    (("series", "--schemes", "gptq-3bit"), "rtn-3bit", "--schemes rtn-4bit,rtn-3bit,gptq-3bit"),
    (("series", "--evaluation", "further.jsonl"), "evaluation.jsonl as its", "out-2`"),
    (("series", "--set", "evaluation_documents=5"), "documents beyond 5", "--out out`"),
    (("series/step200",), "`step10`", "as `--out out-2`"),
    (("series",), "the diagnostic `weights`", "diagnostics=weights"),
]


@pytest.mark.usefixtures("after_series")
def test_an_audit_is_replaced_by_none_that_lacks_what_it_has(place: Path, scan: Run) -> None:
    write_documents(place / "further.jsonl", range(300, 312))
    assert scan("series", "--schemes", "rtn-3bit", "--set", "diagnostics=weights").code == 0
    raw = (place / "out" / "audit.json").read_bytes()
    for arguments, lacking, adding in LACKING:
        done = scan(*arguments)
        refused(done, 2, "which this scan would replace by one without", adding)
        assert lacking in done.err
        assert (place / "out" / "audit.json").read_bytes() == raw


def test_what_quick_measures_has_a_folder_of_its_own() -> None:
    assert default_folder(["demo"], {"quick": True}).name == "demo-quick"
    assert default_folder(["demo"], {"quick": None}).name == "demo"


# --------------------------------------------------------------------------------- full disks


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_up_keeps_what_was_measured(
    place: Path, scan: Run, passes: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    really, written = qaudit.saved.results.np.savez_compressed, []

    def write(file: Any, **arrays: Any) -> None:
        written.append(file.name)
        if len(written) > 3:
            file.write(b"half")
            full()
        really(file, **arrays)

    with monkeypatch.context() as patched:
        patched.setattr("qaudit.saved.results.np.savez_compressed", write)
        refused(scan("series"), 4, "no space left on device while writing", "same command again")
    assert len(times(place / "out" / "evidence")) == 3
    assert not list(place.rglob("*.partial"))
    assert scan("series").code == 0
    # Of the second subject, fp was on disk; of the first, everything.
    assert [subject for subject, *_ in passes] == ["step10", "step200", "step200", "step1000"]


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Let this process write no longer file, as a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_the_system_cuts_off_is_not_left_behind(
    place: Path, scan: Run, passes: list[tuple[str, ...]]
) -> None:
    with files_of_at_most(24_000):  # enough for plan and evidence, not for the audit
        done = scan("series")
    refused(done, 4, "audit.json` cannot be written: file too large", "same command again")
    assert not list(place.rglob("*.partial"))
    assert len(times(place / "out" / "evidence")) == 6
    assert scan("series").code == 0
    assert len(passes) == 3


def test_hidden_states_that_find_no_place_on_disk(
    place: Path, scan: Run, scanned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = place / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    really = qaudit.engine.measure.send

    def limited(*arguments: Any) -> Any:
        with files_of_at_most(1000):
            return really(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr("qaudit.engine.measure.send", limited)
        done = scan("series", "--set", "stream_memory=0")
    refused(done, 4, "while spilling hidden states", "`--set stream_memory=SIZE`")
    assert list(temporary.iterdir()) == []
    assert scan("series", "--set", "stream_memory=0").code == 0
    assert numbers(audit_of(place / "out")) == numbers(audit_of(scanned / "of-series"))


NOT_FINISHED = "`out` is not finished: 1 of 3 subjects; run it again"


@pytest.fixture
def unfinished(place: Path, scan: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Interrupt a scan of three checkpoints in the second."""
    really = qaudit.engine.measure.send

    def send(task: Any, *rest: Any) -> Any:
        if task.subject.label == "step200":
            signal.raise_signal(signal.SIGINT)
        return really(task, *rest)

    with monkeypatch.context() as patched:
        patched.setattr("qaudit.engine.measure.send", send)
        refused(scan("series"), 130, "interrupted", "run the same command again")
    return place / "out"


def test_commands_say_that_a_scan_is_not_finished(unfinished: Path, qaudit: Run) -> None:
    hint = "`qaudit scan out/plan.json --out out`"
    for command in (
        ("gate", "out"),
        ("pick", "out"),
        ("diff", "out", "out"),
        ("export", "out", "--out", "file"),
        ("publish", "out", "org/name", "--dry-run"),
    ):
        refused(qaudit(*command), 3, NOT_FINISHED, hint)
    assert not (unfinished / "audit.json").exists()


def test_a_report_shows_what_is_measured_so_far(unfinished: Path, qaudit: Run, place: Path) -> None:
    shown = qaudit("report", "out", "--format", "terminal")
    assert shown.code == 3
    assert NOT_FINISHED.replace("`", "") in shown.err.replace("`", "")
    assert "step10" in shown.out
    assert "step200: not measured yet" in shown.out
    card = qaudit("report", "out")
    assert card.code == 3
    assert "plots/" not in card.out  # nothing is drawn there yet

    assert qaudit("scan", "out/plan.json", "--out", "out").code == 0  # as the hint says
    assert len(audit_of(unfinished)["subjects"]) == 3
    assert qaudit("report", "out").code == 0


def test_nothing_measured_is_nothing_to_report(
    place: Path, scan: Run, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(
            "qaudit.executors.part.read_corpus",
            lambda *_, **__: signal.raise_signal(signal.SIGINT),
        )
        scan("series")
    sentence = "`out` is not finished: 0 of 3 subjects; run it again"
    for command in (("report", "out"), ("status", "out"), ("collect", "out")):
        refused(qaudit(*command), 3, sentence, "qaudit scan out/plan.json")
