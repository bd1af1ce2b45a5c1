"""The same command again goes on after a kill, an interrupt or a full disk, and never twice.

What a scheme holds from one linear to the next (a second stream, a rotation of heads, learned
matrices, a rounded cache) is the same in every process that continues.
"""

import errno
import os
import random
import resource
import shutil
import signal
import sys
import warnings
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import qaudit.saved.results
from qaudit.cli.progress import Progress
from qaudit.core.registry import parse_scheme
from qaudit.engine import measure
from tests.support.cli import OUT, QUICK, TEXT, audit_of, cells, edited, refused, run_in
from tests.support.models import write_documents
from tests.support.parts import lasting, losses

KILLS = 12
CHANGES = 36
"""Of files, by a scan of which all is measured: it plans and reports again."""
SOUP = ("--soup", "step10+step200", "--schemes", "rtn-4bit,gptq-4bit:group=16")


@pytest.fixture
def passes(monkeypatch):
    """Return a list that grows by every pass: its subject, and the schemes measured in it."""
    seen = []
    really = measure.send

    def watched(task, *rest):
        seen.append((task.subject.label, *(scheme.short for scheme in task.schemes)))
        return really(task, *rest)

    monkeypatch.setattr("qaudit.engine.measure.send", watched)
    return seen


def must_be_killed(run):
    """Run something in a child of this process, which must kill itself in it."""
    with warnings.catch_warnings(action="ignore"):  # about threads of other tests
        child = os.fork()
    if not child:
        with suppress(BaseException):
            run()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def numbers(audit):
    """Return an audit without when it was made, how fast, and how much memory was free."""
    of_the_machine = ("seconds_low", "seconds_high", "nbytes_memory_available", "presets")
    plan = {name: value for name, value in audit["plan"].items() if name not in of_the_machine}
    rows = lasting(audit["measurements"])
    return {**audit, "environment": None, "plan": plan, "measurements": rows}


def times(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.npz")}


def test_a_killed_scan_goes_on_as_if_nothing_had_happened(scanned, scan, passes, monkeypatch):
    draw = Progress.block

    def block(self, done, total, what):
        draw(self, done, total, what)
        if len(passes) == 2 and done:  # in the middle of the second subject
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(Progress, "block", block)
        must_be_killed(lambda: scan("series"))
    before = times(OUT / "evidence")
    assert sorted(name.split("--")[0] for name in before) == ["step10", "step10"]
    assert not (OUT / "audit.json").exists()

    assert scan("series").code == 0
    assert [subject for subject, *_ in passes] == ["step200", "step1000"]
    assert before.items() <= times(OUT / "evidence").items()
    assert numbers(audit_of()) == numbers(audit_of(scanned / "out"))


def test_interrupts_end_in_words(place, scan, monkeypatch):
    for where in (
        "planning.prepare.make_plan",
        "executors.part.read_corpus",
        "engine.block_pass.make_batches",
        "saved.results.np.savez_compressed",
        "audit.judge",
        "report.folder.write",
    ):
        with monkeypatch.context() as patched:
            patched.setattr(f"qaudit.{where}", lambda *_, **__: signal.raise_signal(signal.SIGINT))
            done = scan("series/step10")
        refused(done, 130, "interrupted", "run the same command again: qaudit scan")
        assert not list(place.rglob("*.partial"))
    assert scan("series/step10").code == 0


def test_what_is_new_is_measured(place, scan, passes):
    assert scan("series/step10").code == 0
    passes.clear()
    done = scan("series/step10", "--schemes", "rtn-3bit")  # beside rtn-4bit
    assert passes == [("step10", "rtn-3bit")]
    schemes = [row["scheme"] for row in audit_of()["measurements"]]
    assert (schemes, done.code) == (["fp", "rtn-4bit", "rtn-3bit"], 0)
    scan("series/step10", "--schemes", "rtn-3bit", "--set", "context=16")
    assert len(passes) == 2
    edited(place / "series" / "step10" / "config.json", rms_norm_eps=0.01)
    scan("series/step10", "--schemes", "rtn-3bit", code=0)
    assert len(passes) == 3
    # The same weights under two names are measured once.
    shutil.copytree(place / "series" / "step10", place / "series" / "step20")
    passes.clear()
    scan("series/step10", "series/step20", "--out", "two", code=0)
    assert passes == [("step10", "rtn-4bit")]
    rows = cells(Path("two"))
    assert (len(rows), rows["step10", "rtn-4bit"]["ce"]) == (4, rows["step20", "rtn-4bit"]["ce"])


@pytest.mark.usefixtures("finished")
def test_other_weights_and_damaged_evidence_are_measured_anew(place, scan, passes, qaudit):
    first = audit_of()
    scan("series", code=0)
    assert (passes, numbers(audit_of())) == ([], numbers(first))
    before = {cell: row["ce"] for cell, row in cells().items()}
    file = place / "series" / "step200" / "model.safetensors"
    stamps = file.stat()
    tensors = load_file(file)
    tensors["model.norm.weight"][0] *= 2
    save_file(tensors, file, metadata={"format": "pt"})
    os.utime(file, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))  # no cache by date or size
    assert file.stat().st_size == stamps.st_size

    assert scan("series").code == 0
    after = {cell: row["ce"] for cell, row in cells().items()}
    assert passes == [("step200", "rtn-4bit")]
    moved = {cell for cell in before if after[cell] != before[cell]}
    assert (after.keys(), moved) == (before.keys(), {("step200", "fp"), ("step200", "rtn-4bit")})
    # Evidence that is cut short or edited is not believed.
    first = audit_of()
    (file,) = (OUT / "evidence").glob("step10--rtn-4bit--*.npz")
    whole = file.read_bytes()
    columns = dict(np.load(file))
    for kept in (0, 200, -30, None):
        passes.clear()
        file.write_bytes(whole[:kept])
        if kept is None:
            np.savez_compressed(file, **{**columns, "nll_sum": columns["nll_sum"] / 2})
            assert qaudit("gate", "out", "--policy", "explore").code == 4
        assert scan("series").code == 0
        assert (passes, numbers(audit_of())) == ([("step10", "rtn-4bit")], numbers(first))


LACKING = [
    (("series", "--checkpoints", "step200"), "`step10`"),
    (("series", "--schemes", "gptq-3bit"), "rtn-3bit"),
    (("series", "--evaluation", "further.jsonl"), "evaluation.jsonl as its"),
    (("series", "--set", "evaluation_documents=5"), "documents beyond 5"),
    (("series/step200",), "`step10`"),
    (("series",), "the diagnostic `weights`"),
]


@pytest.mark.usefixtures("finished")
def test_an_audit_is_replaced_by_none_that_lacks_what_it_has(place, scan):
    write_documents(place / "further.jsonl", range(300, 312))
    assert scan("series", "--schemes", "rtn-3bit", "--set", "diagnostics=weights").code == 0
    raw = (OUT / "audit.json").read_bytes()
    for arguments, lacking in LACKING:
        done = scan(*arguments)
        refused(done, 2, "which this scan would replace by one without", "--out out-2")
        assert lacking in done.err
        assert (OUT / "audit.json").read_bytes() == raw


# --------------------------------------------------------------------------------- full disks


def test_a_disk_that_fills_up_keeps_what_was_measured(place, scan, passes, monkeypatch):
    really, written = qaudit.saved.results.np.savez_compressed, []

    def write(file, **arrays):
        written.append(file.name)
        if len(written) > 3:
            file.write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        really(file, **arrays)

    with monkeypatch.context() as patched:
        patched.setattr("qaudit.saved.results.np.savez_compressed", write)
        refused(scan("series"), 4, "no space left on device while writing", "same command again")
    assert len(times(OUT / "evidence")) == 3
    assert not list(place.rglob("*.partial"))
    assert scan("series").code == 0
    # Of the second subject, fp was on disk; of the first, everything.
    assert [subject for subject, *_ in passes] == ["step10", "step200", "step200", "step1000"]
    # A file that the system cuts off is not left behind.
    passes.clear()
    with files_of_at_most(24_000):  # enough for plan and evidence, not for the audit
        done = scan("series", "--out", "cut")
    refused(done, 4, "audit.json` cannot be written: file too large", "same command again")
    assert not list(place.rglob("*.partial"))
    assert len(times(Path("cut/evidence"))) == 6
    assert scan("series", "--out", "cut").code == 0
    assert len(passes) == 3


@contextmanager
def files_of_at_most(nbytes):
    """Let this process write no longer file, as a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_hidden_states_that_find_no_place_on_disk(place, scan, scanned, monkeypatch):
    temporary = place / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    really = measure.send

    def limited(*arguments):
        with files_of_at_most(1000):
            return really(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr("qaudit.engine.measure.send", limited)
        done = scan("series", "--set", "stream_memory=0")
    refused(done, 4, "while spilling hidden states", "`--set stream_memory=SIZE`")
    assert list(temporary.iterdir()) == []
    assert scan("series", "--set", "stream_memory=0").code == 0
    assert audit_of()["findings"] == audit_of(scanned / "out")["findings"]
    ours, whole = (numbers(audit_of(folder / "out")) for folder in (place, scanned))
    assert {**ours, "plan": 0, "recipe": 0} == {**whole, "plan": 0, "recipe": 0}


NOT_FINISHED = "`out` is not finished: 1 of 3 subjects; run it again"


def test_an_unfinished_scan_says_so_and_shows_what_is_measured(scan, qaudit, monkeypatch):
    really = measure.send

    def send(task, *rest):
        if task.subject.label == "step200":
            signal.raise_signal(signal.SIGINT)
        return really(task, *rest)

    resume = "`qaudit scan out/plan.json --out out`"
    with monkeypatch.context() as patched:
        stop = lambda *_, **__: signal.raise_signal(signal.SIGINT)  # noqa: E731
        patched.setattr("qaudit.executors.part.read_corpus", stop)
        scan("series")
    for command in ("report out", "status out", "collect out"):
        sentence = "`out` is not finished: 0 of 3 subjects; run it again"
        refused(qaudit(*command.split()), 3, sentence, "qaudit scan out/plan.json")
    with monkeypatch.context() as patched:
        patched.setattr("qaudit.engine.measure.send", send)
        done = scan("series")
    again = f"run the same command again: qaudit scan {' '.join(QUICK)} series"
    refused(done, 130, "interrupted; what was measured is in `out`", again)
    assert len(times(OUT / "evidence")) == 2
    for command in (
        "gate out", "pick out", "diff out out", "export out --out file",
        "publish out org/name --dry-run",
    ):  # fmt: skip
        refused(qaudit(*command.split()), 3, NOT_FINISHED, resume)
    assert not (OUT / "audit.json").exists()
    shown = qaudit("report", "out", "--format", "terminal", code=3)
    assert NOT_FINISHED.replace("`", "") in shown.err.replace("`", "")
    assert "step10" in shown.out and "step200: not measured yet" in shown.out
    card = qaudit("report", "out", code=3)
    assert "plots/" not in card.out  # nothing is drawn there yet

    assert qaudit("scan", "out/plan.json", "--out", "out").code == 0  # as the hint says
    whole = audit_of()["measurements"]
    assert {row["subject"] for row in whole} == {"step10", "step200", "step1000"}
    qaudit("report", "out", code=0)
    assert "3 of 3 subjects measured" in qaudit("status", "out", code=0).out
    (OUT / "audit.json").unlink()
    qaudit("collect", "out", code=0)
    assert audit_of()["measurements"] == whole


def killed_at(root, allowed):
    """Return a hook that kills this process before it changes one file more below a folder.

    A file that is opened to be written is empty then.
    """
    changes = 0

    def count(event, arguments):
        nonlocal changes
        opens = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (not opens and event != "os.rename") or isinstance(arguments[0], int):
            return
        if changes > allowed or root not in Path(os.fsdecode(arguments[0])).absolute().parents:
            return
        changes += 1
        if changes > allowed:
            with suppress(OSError):  # of a folder that is not made yet
                os.open(arguments[0], arguments[2]) if opens else None
            os.kill(os.getpid(), signal.SIGKILL)

    return count


@pytest.mark.slow
@pytest.mark.parametrize("target", ["series", "lab/tiny"])
def test_kills_before_changes_of_files_change_nothing(target, place, qaudit, serve_root, online):
    """Each is later than the one before; then the scan is left to end."""
    if target != "series":
        shutil.copytree(place / "series", online / "root" / target)
        serve_root()
    scan = ("scan", target, *TEXT, *SOUP, "--out")
    assert qaudit(*scan, "whole").code == 0
    for moment in sorted(random.Random(target).sample(range(CHANGES), KILLS)):
        hook = killed_at(place.parent, moment)
        must_be_killed(lambda: (sys.addaudithook(hook), qaudit(*scan, "out")))  # noqa: B023
    assert qaudit(*scan, "out").code == 0
    ours, whole = (numbers(audit_of(place / name)) for name in ("out", "whole"))
    assert ours["measurements"] == whole["measurements"]
    assert qaudit("gate", OUT, "-q").code in (0, 1, 3)


# ----------------------------------------------------------------- schemes with state of every kind

CALIBRATED = (
    "gptaq-4bit:group=16",
    "qronos-4bit:group=16",
    "mr-gptq:block=16",
    "duquant-4bit:block=16",
    "flatquant-4bit:steps=3",
    "base-q-w4a4:steps=3:kv=int4",
)
DATA_FREE = ("hqq-4bit:group=16", "rtn-4bit:group=16:kv=int4")
LABELS = ("step10", "step200", "step1000")
SETTINGS = (
    "series", *TEXT, "--schemes", ",".join((*CALIBRATED, *DATA_FREE)), "--set", "repeats=2",
    "--set", "calibration_documents=2", "--set", "context=32",
)  # fmt: skip


def streams_of(code, *arguments, interrupted_at=None):
    """Run the command line, which ends with a code; return every stream that it measured."""
    streams = []
    send = measure.send

    def recorded(task, *rest):
        if task.subject.label == interrupted_at:
            raise KeyboardInterrupt
        measured = send(task, *rest)
        streams.extend((task.subject.label, task.remark, spec) for spec in measured)
        return measured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qaudit.engine.measure.send", recorded)
        assert run_in(Path.cwd(), *arguments) == code
    return streams


@pytest.fixture(scope="module")
def streams(shipped, tmp_path_factory):
    """Return what one process measured, and what two did before and after an interrupt.

    The working directory has the audits: `whole`, `resumed`, and `collected` from two parts.
    """
    place = shutil.copytree(shipped, tmp_path_factory.mktemp("scheme_state") / "place")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        every = streams_of(0, "scan", *SETTINGS, "--out", "whole")
        before = streams_of(130, "scan", *SETTINGS, "--out", "resumed", interrupted_at=LABELS[1])
        after = streams_of(0, "scan", *SETTINGS, "--out", "resumed")
        streams_of(0, "plan", *SETTINGS, "--out", "collected")
        for code in (3, 0):  # what the first round chooses is drawn again in the second
            for part in ("0/2", "1/2"):
                streams_of(0, "part", "collected", "--part", part)
            streams_of(code, "collect", "collected")
        yield [every, before, after]


def of_scheme(audit, spec):
    """Return the losses of a scheme's documents, to the bit, and its other numbers."""
    rows = [row for row in audit_of(audit)["measurements"] if row["spec"] == spec]
    documents = {key: value for key, value in losses(audit).items() if key[1] == spec}
    return documents, sorted(map(str, lasting(rows)))


@pytest.mark.slow
@pytest.mark.parametrize("text", (*CALIBRATED, *DATA_FREE))
def test_schemes_have_the_numbers_of_one_process_and_draw_again(streams, text):
    spec = parse_scheme(text).spec
    every, before, after = (Counter(one for one in run if one[2] == spec) for run in streams)
    assert {subject for subject, *_ in before} == {LABELS[0]}
    assert before + after == every  # nothing is measured twice
    documents, rows = of_scheme(Path("whole"), spec)
    for name in ("resumed", "collected"):
        assert of_scheme(Path(name), spec) == (documents, rows)
    draws = (0, 1) if text in CALIBRATED else (0,)
    assert set(documents) == {(label, spec, draw) for label in LABELS for draw in draws}
    if text in CALIBRATED:
        assert all(documents[label, spec, 0] != documents[label, spec, 1] for label in LABELS)
