"""Tasks from their names to a card: data of the Hub, failures of one task, resume, bad names."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from qaudit.hub.publish import read_for_publishing
from qaudit.items import harness
from qaudit.saved.evidence import read_saved
from tests.support import toys
from tests.support.cards import whole_at
from tests.support.cli import OUT, TEXT, audit_of, edited, must_be_close, refused
from tests.support.models import save_model, write_documents
from tests.support.parts import same_audit
from tests.support.pretended_device import pretended
from tests.support.quantized import quantized_copy

pytestmark = pytest.mark.filterwarnings("default")  # lm-eval's own

TASKS = "piqa,arc_easy,pubmedqa"


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """Return a folder with a model of long positions, text, and data sets as org/name."""
    root = tmp_path_factory.mktemp("tasks")
    save_model(root / "model", 1, max_position_embeddings=1024)
    toys.tokenizer(adds_bos=False).save_pretrained(root / "model")
    write_documents(root / "calibration.jsonl", range(100, 104))
    write_documents(root / "evaluation.jsonl", range(200, 212))
    toys.write(root / "data", ("anatomy",), documents=6)
    return root


@pytest.fixture
def place(shipped, online, monkeypatch):
    shutil.copytree(shipped, online / "place")
    monkeypatch.chdir(online / "place")
    return online / "place"


@pytest.fixture
def hub(place, online, serve_root):
    """Serve the data sets, and nothing else."""
    for folder in (place / "data").glob("*/*"):
        inside = folder.relative_to(place / "data")
        shutil.copytree(folder, online / "root" / "datasets" / inside / "main")
    return serve_root()


@pytest.fixture
def scan(place, qaudit, without_pictures):
    return partial(qaudit, "scan", "model", *TEXT, "--schemes", "rtn-3bit", "--out", "out")


def rows(folder=OUT):
    return {(row["scheme"], row["task"]): row for row in audit_of(folder)["tasks"]}


def fetched(hub):
    return [entry["path"] for entry in hub.log if "/resolve/" in entry["path"]]


@pytest.mark.slow
def test_only_splits_that_are_read_are_fetched_and_once(hub, scan, qaudit, online, monkeypatch):
    scan("--tasks", TASKS, code=0)
    paths = {path.partition("/resolve/")[2].partition("/")[2] for path in fetched(hub)}
    wanted = {"data/train-", "data/validation-", "ARC-Easy/train-", "ARC-Easy/test-"}
    assert {path.partition("00000")[0] for path in paths} == {*wanted, "README.md", "pqal.zip"}
    found = rows()
    assert {task for _, task in found} == {"piqa", "arc_easy", "pubmedqa", "mean"}
    assert found["rtn-3bit", "piqa"]["items"] == 6
    assert found["rtn-3bit", "mean"]["drop_low"] <= found["rtn-3bit", "mean"]["drop"]
    lock = json.loads(Path("out/plan.json").read_text())["resolved"]
    assert {len(text["commit"]) for text in lock["texts"]} == {40}
    asked = ("model", *TEXT, "--schemes", "rtn-3bit", "--tasks", TASKS, "--out", "parts")
    assert qaudit("plan", *asked).code == 0
    monkeypatch.setenv("HF_HOME", str(online / "node"))  # not where the plan was made
    assert qaudit("fetch", "parts").code == 0
    hub.log.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert scan("--tasks", TASKS).code == 0
    assert rows() == found
    done = qaudit("part", "parts", "--part", "0/1")
    assert (done.code, fetched(hub)) == (0, []), done.err
    assert qaudit("collect", "parts").code == 0
    same_audit(Path("out"), Path("parts"))


@pytest.mark.slow
def test_tasks_have_the_cpus_numbers_on_a_pretended_gpu(hub, scan):
    chosen = ("--tasks", "piqa,arc_easy", "--set", "dtype=float32", "--out")
    assert scan(*chosen, "cpu", "--device", "cpu").code == 0
    with pretended():
        done = scan(*chosen, "gpu", "--device", "cuda")
    assert done.code == 0, done.err
    # The head takes other numbers of rows at once on a GPU, which rounds otherwise.
    must_be_close(audit_of(Path("gpu"))["tasks"], audit_of(Path("cpu"))["tasks"], 1e-5)


def skipped(folder=OUT):
    return {row["subject"]: row["reason"] for row in audit_of(folder)["skipped"]}


def written():
    return {path: path.stat().st_mtime_ns for path in Path("out/evidence").rglob("*.npz")}


def test_tasks_whose_data_fail_are_skipped_and_cost_no_others(hub, scan):
    hub.faults.append({"match": r"piqa/resolve/.*validation", "status": 404})
    hub.faults.append({"match": r"pqal.zip", "reset": 0})
    scan("--tasks", TASKS, code=3)
    assert skipped().keys() == {"task piqa", "task pubmedqa"}
    assert "data cannot be had" in skipped()["task piqa"]
    assert {task for _, task in rows()} == {"arc_easy"}
    before = written()
    hub.faults.clear()
    hub.log.clear()
    assert scan("--tasks", TASKS).code == 0
    assert not [path for path in fetched(hub) if "ai2_arc" in path]
    after = written()
    assert before.items() <= after.items()  # nothing was measured again
    assert {path.parent.name for path in after.keys() - before.keys()} == {"piqa", "pubmedqa"}


@pytest.mark.slow
def test_shipped_files_answer_the_same_items(place, scan, qaudit):
    quantized_copy(place / "model", place / "model-GPTQ", "gptq", bits=2)
    data = ("--tasks", "arc_easy,mmlu_anatomy", "--set", "task_data=data", "--set", "task_items=4")
    scan(*data, "--shipped", "model-GPTQ", code=0)
    found = rows()
    assert {scheme for scheme, _ in found} == {"fp", "rtn-3bit", "model-GPTQ"}
    for task, items in (("arc_easy", 4), ("mmlu_anatomy", 4), ("mean", 8)):
        own = found["model-GPTQ", task]
        assert own["items"] == found["fp", task]["items"] == items
        assert None not in (own["drop"], own["flips"])
    assert "`arc_easy`" in whole_at(Path("out"))
    alone = ("scan", "model-GPTQ", "--schemes", "none", "--out", "alone")
    qaudit(*alone, *TEXT, *data, code=0)
    by_itself = rows(Path("alone"))["model-GPTQ", "arc_easy"]
    assert by_itself["accuracy"] == found["model-GPTQ", "arc_easy"]["accuracy"]
    assert by_itself["drop"] is None


@pytest.fixture
def few_files(monkeypatch):
    """Let lm-eval read the files of four tasks: all 14,000 of its files take seven seconds."""
    from lm_eval.tasks._index import TaskIndex

    every = TaskIndex._iter_yaml_files
    few = ("gsm8k", "wikitext", "truthfulqa", "blimp")

    def chosen(root):
        for name in few if root.name == "tasks" else ("",):
            yield from every(root / name)

    monkeypatch.setattr(TaskIndex, "_iter_yaml_files", chosen)
    harness._manager.cache_clear()
    yield
    harness._manager.cache_clear()


@pytest.mark.slow
def test_every_task_of_lm_eval_is_listed_and_found(qaudit, scan):
    names = qaudit("list", "lm-eval", "-q").out.split()
    assert len(names) > 10_000
    assert {"gsm8k", "arc_easy", "mmlu"} <= set(names)
    done = scan("--tasks", "gsm8k", "--set", "task_data=data")
    refused(done, 2, "`gsm8k` generates text", "mmlu")


@pytest.mark.usefixtures("few_files")
def test_what_cannot_be_scored_is_refused_or_needs_bos_or_eos(scan, place, qaudit):
    for tasks, sentence, hint in (
        ("piqa --set task_items=some", "`some` is no number", ""),
        ("piqa --set task_data=nowhere", "there is no folder `nowhere`", "org/name"),
        ("arc_eazy", "no task `arc_eazy`", "did you mean `arc_easy`?"),
        ("data", "no task `data`", "`--set choices=FILE` scores items of your own"),
        ("gsm8k", "`gsm8k` generates text", "mmlu"),
        ("wikitext", "`wikitext` measures perplexity", "--evaluation"),
        ("truthfulqa_mc2", "marks answers by code of its own", "mmlu"),
    ):
        refused(scan("--set", "task_data=data", "--tasks", *tasks.split()), 2, sentence, hint)
    # Items without a context need BOS or EOS.
    options = [{"sentence_good": f"{w} is", "sentence_bad": f"is {w}"} for w in toys.WORDS[:4]]
    toys.write_data(place / "data/nyu-mll/blimp", "adjunct_island", {"train": options})
    blimp, own = ("--set", "task_data=data", "--tasks", "blimp_adjunct_island"), Path("own")
    for left_out in ("bos_token", "eos_token"):
        whole = edited(place / "model/tokenizer_config.json", **{left_out: None})
        scan(*blimp, "--out", left_out, code=0)
        assert rows(Path(left_out))["fp", blimp[-1]]["items"] == 4
        (place / "model/tokenizer_config.json").write_text(whole)
    edited(place / "model/tokenizer_config.json", bos_token=None, eos_token=None)
    scan(*blimp, "--tasks", "piqa", "--out", own, code=3)
    assert {task for _, task in rows(own)} == {"piqa"}
    assert "has neither BOS nor EOS" in skipped(own)[f"task {blimp[-1]}"]
    # Tasks are listed with what they cost.
    listed = qaudit("list", "tasks", code=0)
    assert "paper-a" in listed.out and "14,042 items of 4 options" in listed.out


@pytest.fixture
def wrong(place):
    """Leave a split out of one data set, and a script of another."""
    readme = place / "data/baber/piqa/README.md"
    split = {"split": "validation", "path": "data/validation-00000-of-00001.parquet"}
    readme.write_text(readme.read_text().replace(f", {json.dumps(split)}", ""))
    shutil.rmtree(place / "data/allenai/sciq")
    (place / "data/allenai/sciq").mkdir()
    (place / "data/allenai/sciq/sciq.py").write_text("raise RuntimeError")


def test_a_missing_split_and_a_script_leave_the_other_tasks(wrong, hub, scan):
    no_split, no_script = "has no split `validation`: it has train", "needs a script, which is not"
    refused(scan("--tasks", "piqa"), 4, no_split, "leave")
    refused(scan("--tasks", "sciq"), 4, no_script, "task_data=")
    assert not Path("out/audit.json").exists()
    scan("--tasks", "piqa,sciq,arc_easy", code=3)
    assert {task for _, task in rows()} == {"arc_easy"}
    assert no_split in skipped()["task piqa"]
    assert no_script in skipped()["task sciq"]
    plan = audit_of()["plan"]
    assert "task `piqa` is left out" in " ".join(plan["notes"])


def test_items_are_published_and_their_lost_beginnings_counted(scan, tmp_path):
    options = ("--set", "task_data=data", "--set", "context=64")
    scan("--tasks", "arc_easy,piqa", *options, code=0)
    plan = audit_of()["plan"]
    notes = " ".join(plan["protocol"]["notes"])
    assert "piqa: 12 of 12 options lost the beginning of their context" in notes
    files = read_for_publishing(Path("out")).files
    for path, data in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    assert len([path for path in files if "evidence/tasks/" in path]) == 4
    measured = read_saved(tmp_path / "qaudit").measurements
    assert {len(measurement.evidence.tasks) for measurement in measured} == {2}
