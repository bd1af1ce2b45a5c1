"""A plan measured in parts: the same audit as one machine's, whatever is killed on the way."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qaudit.executors import measuring as measuring_module
from qaudit.executors import records
from tests.house.test_without_torch import BLOCK
from tests.support.cli import OUT, TEXT, audit_of, edited, flipped, refused, run_in, weights_in
from tests.support.models import write_documents
from tests.support.parts import MAIN, ROOT, ended, losses, same_audit, start, until
from tests.support.quantized import quantized_copy

OF_SCAN = ("--soup", "step10+step200", "--set", "context=32")
ASKED = (
    "series", *TEXT, "--schemes", "gptq-3bit:group=16,rtn-3bit:group=16", *OF_SCAN, "--set",
    "calibration_documents=2",
)  # fmt: skip
STEP200 = Path("series/step200")
BOTH = ["step200", "mean(step10+step200)"]


@pytest.fixture(scope="module")
def measured(shipped, tmp_path_factory):
    """Return a folder with a plan that one part measured in `out`, and one process in `whole`."""
    folder = shutil.copytree(shipped, tmp_path_factory.mktemp("measured") / "place")
    write_documents(folder / "calibration.jsonl", range(100, 108))
    assert run_in(folder, "plan", *ASKED, "--out", "out") == 0
    assert run_in(folder, "part", "out", "--part", "0/1") == 0
    assert run_in(folder, "scan", *ASKED, "--out", "whole") == 0
    return folder


@pytest.fixture
def planned(measured, place, qaudit):
    """Return a folder with a plan for parts, whose calibration text has eight documents."""
    shutil.copy(measured / "calibration.jsonl", place)
    assert qaudit("plan", *ASKED, "--out", "out").code == 0
    return place / "out"


@pytest.fixture
def once(measured, place):
    """Return a copy of a plan of which one part measured the first round."""
    shutil.copy(measured / "calibration.jsonl", place)
    return shutil.copytree(measured / "out", place / "out")


def parts(qaudit, out, count):
    return {qaudit("part", out, "--part", f"{k}/{count}").code for k in range(count)}


def finish(qaudit, out, count=1):
    """Run rounds until nothing is due."""
    for _ in range(4):
        assert parts(qaudit, out, count) <= {0}
        if qaudit("collect", out).code == 0:
            return out
    raise AssertionError("rounds do not end")


def status(qaudit, out):
    return json.loads(qaudit("status", out, "--json").out)


def test_parts_give_the_audit_that_one_process_gives(measured, planned, qaudit, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(records.time, "sleep", None)  # nothing is waited for
        due = qaudit("collect", planned)
    refused(due, 3, "round 1 has 4 subjects, and 4 are not measured yet", "qaudit part")
    for text, sentence in ("x", "is no part"), ("1/0", "is no part"), ("3/2", "no part 3 of 2"):
        assert sentence in qaudit("part", planned, "--part", text).err
    for number, scheduler in enumerate(("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")):
        with monkeypatch.context() as patched:
            patched.setenv(scheduler, str(number))
            done = qaudit("part", planned, "--part", "2")
        assert (done.code, f"part {number}/2" in done.err) == (0, True)
    assert qaudit("collect", planned).code == 0
    same_audit(measured / "whole", planned)
    before = losses(planned)
    files = sorted(path.name for path in (planned / "evidence").glob("*.npz"))
    assert qaudit("scan", *ASKED, "--out", planned).code == 0
    assert losses(planned) == before
    assert sorted(path.name for path in (planned / "evidence").glob("*.npz")) == files


def test_what_is_not_fit_for_a_plan_is_refused_before_weights(planned, place, qaudit, monkeypatch):
    qaudit("plan", *ASKED, "--out", "other", "--set", "context=16", code=0)
    done = qaudit("collect", planned, "other")
    refused(done, 2, "was measured by another plan", "copy the folder of the plan")
    part = ("part", planned, "--part", "0/1")
    for name, value, sentence, hint in (
        ("planning.pin._installed", {"torch": "9.9"}, "torch 9.9 instead of", "environment of the"),
        ("executors.part.wrong_products", 7, "7 of 1048576 products in float32", "another device"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(f"qaudit.{name}", lambda *_, value=value: value)
            refused(qaudit(*part), 78, sentence, hint)
    write_documents(place / "evaluation.jsonl", range(300, 312))
    refused(qaudit(*part), 78, "the text is not that of the plan", "the same files")
    assert not (planned / "evidence").exists()


def test_a_search_is_a_round_behind_its_candidates(place, qaudit):
    asked = ("series", *TEXT, "--schemes", "rtn-3bit:group=16", "--checkpoints", "step10")
    asked = (*asked, "--set", "diagnostics=weights", "--soup", "greedy(step10+step200+step1000)")
    assert qaudit("plan", *asked, "--out", "out").code == 0
    for due in ("round 1 has 1 subject", "round 2 has 2 subjects", "round 3 has 1 subject"):
        refused(qaudit("collect", "out"), 3, f"{due}, and", "qaudit part")
        assert parts(qaudit, "out", 2) == {0}
    assert qaudit("collect", "out").code == 0
    assert qaudit("scan", *asked, "--out", "whole").code == 0
    same_audit(place / "whole", OUT)
    first, second = (audit_of(place / name)["diagnostics"] for name in ("whole", "out"))
    for name in ("greedy", "weights"):
        assert first[name] == second[name]


def test_collect_waits_for_what_a_log_names_and_not_for_ever(once, qaudit, monkeypatch):
    record = next((once / "parts" / "units").glob("step10-*.json"))
    evidence = next((once / "evidence").glob("step200--*.npz"))
    hidden = {path: path.rename(path.with_suffix(".hidden")) for path in (record, evidence)}

    def a_moment_later(_):
        path, place = hidden.popitem()
        place.rename(path)

    monkeypatch.setattr(records.time, "sleep", a_moment_later)
    assert "waiting up to 60 s until `" in qaudit("collect", once, code=0).err
    assert hidden == {}
    record.unlink()
    monkeypatch.setattr(records, "LAG_SECONDS", 0.0)
    refused(qaudit("collect", once), 3, "1 is not measured yet: `step10`", "qaudit part")
    # A subject that ends its process twice is given up.
    record.with_suffix(".attempts").write_text("n1 1\nn2 2\n")  # as two kills leave it
    assert qaudit("part", once, "--part", "0/1").code == 3
    assert status(qaudit, once)["failed"] == ["step10"]
    assert qaudit("collect", once).code == 3
    (skipped,) = [row for row in audit_of(once)["skipped"] if row["subject"] == "step10"]
    assert "2 processes ended while they measured it" in skipped["reason"]
    assert qaudit("part", once, "--part", "0/1").code == 0
    assert status(qaudit, once)["failed"] == []


def test_a_part_stopped_while_it_is_imported_says_so(planned):
    stopped_at_import = (
        "import os, signal, sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Stop())\n"
    )
    process = start(planned.parent, "part", planned, "--part", "0/1", main=stopped_at_import + MAIN)
    assert "was stopped by SIGTERM" in ended(process, 75)


# ----------------------------------------------------------- small files that decide numbers


EDITS = [
    ("config.json", "has", lambda file: edited(file, rms_norm_eps=0.5)),
    ("tokenizer_config.json", "has changed", lambda file: edited(file, eos_token="a")),
    ("added_tokens.json", "", lambda file: file.write_text("{}")),
    ("model.safetensors.index.json", "was added", lambda file: file.write_text("{}")),
    ("tokenizer.json", "was removed", lambda file: file.unlink()),
]


def test_a_part_refuses_small_files_that_are_not_the_plans(measured, planned, qaudit):
    shutil.copytree(STEP200, "kept")
    for name, state, change in EDITS:
        change(STEP200 / name)
        assert qaudit("part", planned, "--part", "0/1").code == 3
        (unit,) = (planned / "parts" / "units").glob("step200-*.json")
        sentence = f"`{name}` of `step200` {state}"
        assert sentence in unit.read_text()
        shutil.rmtree(STEP200)
        shutil.copytree("kept", STEP200)
    assert (status(qaudit, planned)["failed"], status(qaudit, planned)["missing"]) == (BOTH, [])
    assert qaudit("collect", planned).code == 3
    audit = audit_of(planned)
    assert [row["subject"] for row in audit["skipped"]] == BOTH  # it is a member
    assert sentence in audit["skipped"][0]["reason"]
    assert {row["subject"] for row in audit["measurements"]} == {"step10", "step1000"}

    before = edited(STEP200 / "config.json", rms_norm_eps=0.5)
    assert qaudit("plan", *ASKED, "--out", "out").code == 0
    assert "1 measured now, 1 failed" in qaudit("part", planned, "--part", "0/1").err
    assert status(qaudit, planned)["failed"] == BOTH[1:]  # its members are not of one shape now
    (STEP200 / "config.json").write_text(before)
    assert qaudit("plan", *ASKED, "--out", "out").code == 0
    same_audit(measured / "whole", finish(qaudit, planned))


def test_a_file_that_ships_is_the_one_of_the_plan(place, qaudit):
    quantized_copy(place / "series/step10", place / "model-GPTQ", "gptq")
    asked = ("series/step10", "--shipped", "model-GPTQ", *TEXT, "--schemes", "rtn-4bit:group=32")
    assert qaudit("plan", *asked, "--set", "context=32", "--out", "out").code == 0
    flipped(place / "model-GPTQ" / "model.safetensors")
    qaudit("part", "out", "--part", "0/1", code=3)
    qaudit("collect", "out")
    (unit,) = (OUT / "parts" / "units").glob("*.json")
    assert "the weights of `model-GPTQ` have changed" in unit.read_text()
    (place / "model-GPTQ" / "quantize_config.json").write_text("{}")
    done = qaudit("part", "out", "--part", "0/1")
    refused(done, 4, "`quantize_config.json` of `model-GPTQ` was added", "plan again")


def test_an_audit_has_the_hashes_of_small_files_and_an_export_refuses_others(place, scan, qaudit):
    scheme = "rtn-4bit:group=32"
    assert scan("series", "--soup", "late=last:2", "--schemes", scheme).code == 0
    audit = audit_of()
    for checkpoint in audit["plan"]["checkpoints"]:
        names = {file["name"] for file in checkpoint["settings"]}
        assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    late = next(subject for subject in audit["subjects"] if subject["label"] == "late")
    assert late["configuration"] == late["members"][0]["label"]
    edited(STEP200 / "config.json", rms_norm_eps=0.5)
    done = qaudit("export", "out", "--subject", "step200", "--scheme", scheme, "--out", "new")
    refused(done, 4, "`config.json` of `step200` has changed", "plan again")
    assert not (place / "new").exists()


# ------------------------------------------------------------------------- what ends a part


@pytest.mark.slow
def test_a_killed_subject_is_given_up_and_a_stopped_one_not(measured, planned, qaudit, monkeypatch):
    for stop in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # as schedulers do
        with monkeypatch.context() as patched:
            patched.setattr(measuring_module, "measure", lambda *_: signal.raise_signal(stop))  # noqa: B023
            done = qaudit("part", planned, "--part", "0/1")
        refused(done, 75, f"was stopped by {stop.name}; what was measured is kept", "")
    assert not list((planned / "parts" / "units").glob("*.attempts"))
    log = (planned / "parts" / "0-of-1.jsonl").read_text()
    assert log.count('"ended": "KeyboardInterrupt"') == 3
    killed = (  # as the kernel does where memory runs out: a shell reports 137
        "import os, signal, qaudit.executors.measuring as measuring\n"
        "measuring.measure = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for _ in range(2):
        process = start(planned.parent, "part", planned, "--part", "0/1", main=killed + MAIN)
        ended(process, -signal.SIGKILL)
        assert len(list((planned / "parts" / "units").glob("*.attempts"))) == 1
    assert [part["state"] for part in status(qaudit, planned)["parts"]] == ["lost"]
    done = qaudit("part", planned, "--part", "0/1")
    assert (done.code, "1 failed" in done.err) == (3, True), done.err
    assert len(status(qaudit, planned)["failed"]) == 1
    same_audit(measured / "whole", finish(qaudit, planned))


@pytest.mark.slow
def test_parts_of_a_lost_node_are_measured_elsewhere(measured, planned, qaudit, monkeypatch):
    """What a node leaves: a log without an end, an attempt, a half-written file."""
    qaudit("part", planned, "--part", "0/2", code=0)
    with monkeypatch.context() as patched:
        patched.setattr("qaudit.executors.part.device_name", lambda _: "H200")
        refused(qaudit("part", planned, "--part", "1/2"), 78, "this device is `H200`", "use `")
    record = next((planned / "parts" / "units").glob("*.json"))
    gone = json.dumps({"at": 0.0, "began": True, "host": "n9", "pid": 1, "job": None})
    (planned / "parts" / "1-of-2.jsonl").write_text(f'{gone}\n{{"at": 0.0, "subject": "step')
    record.with_suffix(".attempts").write_text("n9 0\n")
    (planned / "evidence" / "x.n9-0123456789abcdef.partial").write_bytes(b"half")
    states = {part["part"]: part["state"] for part in status(qaudit, planned)["parts"]}
    assert states == {"0/2": "done", "1/2": "silent"}
    same_audit(measured / "whole", finish(qaudit, planned))


@pytest.mark.slow
def test_copies_are_merged_by_content_on_a_node_without_torch(measured, place, planned, qaudit):
    shutil.copytree(planned, place / "far")
    assert qaudit("part", planned, "--part", "0/2").code == 0
    assert qaudit("part", place / "far", "--part", "1/2").code == 0
    ended(start(place, "collect", planned, place / "far", main=BLOCK + MAIN))
    same_audit(measured / "whole", planned)


@pytest.mark.slow
def test_a_whole_node_runs_the_parts_of_its_gpus_by_the_script_of_the_docs(place, planned, qaudit):
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    (script,) = [s for s in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "for gpu in" in s]
    function = f'qaudit() {{ {shlex.join([sys.executable, "-c", MAIN])} "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-c", function + script],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SLURM_ARRAY_TASK_ID": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("measured now, 0 failed") == 4  # there are four subjects
    assert qaudit("collect", planned).code == 0


NAMESPACES = ["unshare", "--pid", "--uts", "--fork", "--mount-proc", "--kill-child"]
if os.getuid():
    NAMESPACES[1:1] = ["--user", "--map-root-user"]
COSTS = "nbytes_memory_available seconds_low seconds_high detectable_relative_error digest"

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


def why_not():
    """Return why there are no namespaces here; empty where there are."""
    if shutil.which("unshare") is None:
        return "`unshare` is not installed"
    command = [*NAMESPACES, "hostname", "n1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"no namespaces here: {done.stderr.strip()}"


def host(name, place, *arguments, main=MAIN):
    """Start a command on a host of its own: its name and its process numbers are no others'."""
    shell = ["sh", "-c", 'hostname "$0" && exec "$@"', name]
    return start(place, *arguments, main=main, before=[*NAMESPACES, *shell])


def without_costs(value):
    """Return a plan without what it costs: that is the host's, and known better by now."""
    if isinstance(value, list):
        return [without_costs(item) for item in value]
    if isinstance(value, dict):
        return {key: without_costs(one) for key, one in value.items() if key not in COSTS.split()}
    return value


@pytest.mark.slow
def test_two_hosts_plan_the_same_and_leave_each_others_files(measured, planned, place, qaudit):
    if reason := why_not():
        pytest.skip(reason)
    slow = host("n1", place, "part", planned, "--part", "0/1", main=SLOW + MAIN)
    until((place / "writing").exists)
    (half,) = (planned / "evidence").glob("*.partial")
    assert ".n1-" in half.name
    other = host("n2", place, "part", planned, "--part", "0/1")  # the same subjects, all of them
    ended(other)
    assert half.exists()
    (place / "go").touch()
    ended(slow)
    assert not list(planned.rglob("*.partial"))
    assert '"pid": 1,' in (planned / "parts" / "0-of-1.jsonl").read_text()
    plans = [json.loads((planned / "plan.json").read_text())]
    ended(host("n2", place, "plan", *ASKED, "--out", "out"))
    plans.append(json.loads((planned / "plan.json").read_text()))
    assert without_costs(plans[0]) == without_costs(plans[1])
    assert qaudit("collect", planned).code == 0
    same_audit(measured / "whole", planned)


# ----------------------------------------------------------------------- parts of the Hub


SHIPPED = "lab/series-GPTQ"
OF_HUB = ("lab/series", *TEXT, "--schemes", "rtn-3bit:group=16", *OF_SCAN)


@pytest.fixture
def hub(place, online, serve_root):
    quantized_copy(place / "series/step10", online / "root" / SHIPPED / "v1", "gptq")
    shutil.move(place / "series", online / "root" / "lab/series")
    return serve_root(main=None)


def test_what_was_not_fetched_or_was_edited_is_named_and_fixed(hub, qaudit, online, monkeypatch):
    def offline(code, *command):
        with monkeypatch.context() as patched:
            patched.setenv("HF_HUB_OFFLINE", "1")
            return qaudit(*command, code=code)

    part = ("part", "out", "--part", "0/1")
    qaudit("plan", *OF_HUB, "--out", "out", code=0)
    offline(3, *part)
    assert offline(0, "status", "out").out.startswith("round 1: 0 of 4 subjects measured, 4 failed")
    assert "HF_HUB_OFFLINE" in offline(4, "collect", "out").err

    hub.faults.append({"match": r"HEAD|GET .*resolve/.*\.safetensors", "status": 404, "times": 2})
    done = qaudit("fetch", "out", code=3)
    assert "1 of 3 checkpoints and 0 texts are in the cache" in done.err
    assert done.err.count("not downloaded step") == 2
    offline(3, *part)
    hub.faults.clear()
    assert qaudit("fetch", "out").code == 0

    config = next((online / "hf").rglob("config.json")).resolve()  # equal ones are one blob
    text = edited(config, rms_norm_eps=0.5)
    offline(4, *part)
    qaudit(*part, code=0)
    assert config.read_text() == text  # fetched again
    assert qaudit("collect", "out").code == 0


@pytest.mark.slow
def test_parts_run_offline_once_a_login_node_has_fetched(hub, place, qaudit, online, monkeypatch):
    asked = (*OF_HUB, "--shipped", f"{SHIPPED}@v1", "--checkpoints", "step10")
    asked = tuple(word for word in asked if word not in OF_SCAN[:2])
    for words, out, shown in ((OF_HUB, "out", "3 of 3"), (asked, "files", "2 of 2")):
        assert qaudit("plan", *words, "--out", out).code == 0
        if out == "out":
            assert weights_in(online / "hf") == []
        said = ended(start(place, "fetch", out, main=BLOCK + MAIN))
        assert f"{shown} checkpoints and 0 texts are in the cache" in said
        hub.log.clear()
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert parts(qaudit, out, 2) == {0}
        assert qaudit("collect", out).code == 0
        assert hub.log == []
        monkeypatch.delenv("HF_HUB_OFFLINE")
        assert qaudit("scan", *words, "--out", f"{out}-whole").code == 0
        same_audit(place / f"{out}-whole", place / out)
    assert audit_of(place / "files")["measurements"][-1]["scheme"] == "series-GPTQ"


@pytest.mark.slow
def test_caches_of_nodes_fetch_what_each_part_needs(hub, place, qaudit, online, monkeypatch):
    asked = (*OF_HUB, "--set", "diagnostics=weights", "--set", "repeats=1")
    assert qaudit("plan", *asked, "--out", "out").code == 0
    fetched = []
    for number in range(3):
        monkeypatch.setenv("HF_HOME", str(online / f"node{number}"))
        assert qaudit("part", "out", "--part", f"{number}/3").code == 0
        fetched.append(len({path.resolve() for path in weights_in(online / f"node{number}")}))
    assert qaudit("collect", "out").code == 0
    monkeypatch.setenv("HF_HOME", str(online / "hf"))
    assert qaudit("scan", *asked, "--out", "whole").code == 0
    first, second = (audit_of(place / name)["diagnostics"]["weights"] for name in ("out", "whole"))
    assert first == second
    assert any(row["previous"] for row in first)
    same_audit(place / "whole", OUT)
    assert sum(fetched) >= 4  # two of three parts begin behind another one's checkpoint


@pytest.mark.slow
def test_a_part_with_a_disk_budget_evicts_what_it_fetched(hub, place, qaudit, online, monkeypatch):
    assert qaudit("plan", *OF_HUB, "--out", "out").code == 0
    budget = ("--set", "disk_budget=1MB")
    (place / "mounts").write_text("scratch:/ / lustre rw 0 0\n")
    with monkeypatch.context() as shared:
        shared.setattr("qaudit.host.MOUNTS", place / "mounts")
        done = qaudit("part", "out", "--part", "0/2", *budget)
        refused(done, 4, "network file system (lustre)", "a folder on a disk of this host")
    for number in range(2):
        assert qaudit("part", "out", "--part", f"{number}/2", *budget).code == 0
        assert weights_in(online / "hf") == []
    assert not (OUT / "fetched.json").exists()
    assert qaudit("collect", "out").code == 0
