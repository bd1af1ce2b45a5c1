"""A scan as its user sees it: what is printed where, what is written, and what it exits with."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from qaudit.planning.prepare import LONGEST_NAME, default_folder, folder_name
from tests.support.cli import OUT, QUICK, STEPS, audit_of, must_be_close
from tests.support.models import write_documents
from tests.support.parts import ended, start
from tests.support.pretended_device import pretended
from tests.support.quantized import quantized_copy

LABELS = [f"step{step}" for step in STEPS]


def labels(audit):
    return [subject["label"] for subject in audit["subjects"]]


@pytest.mark.usefixtures("pictures")
def test_a_scan_measures_everything_and_exits_with_zero(scan):
    done = scan("series")
    audit = audit_of()
    measured = [(row["subject"], row["scheme"]) for row in audit["measurements"]]
    assert measured == [(label, scheme) for label in LABELS for scheme in ("fp", "rtn-4bit")]
    assert audit["skipped"] == []
    assert "series: 3 checkpoints, 1 scheme, 12 documents (276 tokens)" in done.out
    assert all(label in done.err for label in LABELS)
    assert "3 checkpoints, 1 scheme and full precision" in done.err
    written = {path.relative_to(OUT).parts[0] for path in (OUT).rglob("*")}
    assert written - {".qaudit.lock"} == {
        "audit.json", "card.md", "report.html", "evidence", "plots", "plan.json", "parts",
    }  # fmt: skip
    assert ({path.suffix for path in (OUT / "plots").iterdir()}, done.code) == ({".png", ".svg"}, 0)


def test_json_alone_goes_to_stdout_when_asked_for(scan):
    done = scan("series", "--checkpoints", "step*0?", "--json")
    assert json.loads(done.out) == audit_of()
    assert done.out == (OUT / "audit.json").read_text(encoding="utf-8")
    assert labels(json.loads(done.out)) == ["step200", "step1000"]  # as the glob chooses
    assert "plan " in done.err
    assert done.code == 0
    # Folders are one series in order, and a quiet scan says nothing on stderr.
    done = scan("series/step1000", "series/step10", "-q", "--out", "quiet")
    assert labels(audit_of(Path("quiet"))) == ["step10", "step1000"]
    assert (done.code, done.err, "step1000" in done.out) == (0, "", True)


def test_options_come_from_recipes_and_the_environment_too_and_win(place, qaudit, monkeypatch):
    (place / "audit.yaml").write_text(
        "targets: [series]\nschemes: [rtn-4bit, rtn-3bit]\ncheckpoints: step10\n"
        "calibration: calibration.jsonl\nevaluation: evaluation.jsonl\ncontext: 32\n",
        encoding="utf-8",
    )
    audit = json.loads(qaudit("scan", "audit.yaml", "--schemes", "rtn-8bit", "--json").out)
    assert [row["scheme"] for row in audit["measurements"]] == ["fp", "rtn-8bit"]
    assert audit["plan"]["context"] == 32
    assert (place / "qaudit-out" / "audit" / "card.md").is_file()
    values = "CALIBRATION=calibration.jsonl EVALUATION=evaluation.jsonl CHECKPOINTS=step10 "
    values += "SCHEMES=rtn-4bit,rtn-3bit CONTEXT=16 BOS=never PACKED=1 OUT=elsewhere JSON=1 QUIET=1"
    for value in values.split():
        monkeypatch.setenv(*f"QAUDIT_{value}".split("="))
    done = qaudit("scan", "series", "--schemes", "rtn-8bit")
    audit = json.loads(done.out)
    assert [row["scheme"] for row in audit["measurements"]] == ["fp", "rtn-8bit"]  # options win
    assert labels(audit) == ["step10"]
    protocol = audit["plan"]["protocol"]
    assert (protocol["context"], protocol["bos"], protocol["packed"]) == (16, "never", True)
    assert (audit_of(place / "elsewhere"), done.err) == (audit, "")


def test_a_missing_tokenizer_and_trusted_pickles_change_no_number(place, scan, scanned):
    for file in (place / "series" / "step10").glob("token*"):
        file.unlink()  # it is read with that of the others
    folder = place / "series" / "step200"
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert scan("series", "--allow-pickle").code == 0
    rows, meant = (audit_of(where / "out")["measurements"] for where in (place, scanned))
    assert [row["ce"] for row in rows] == [row["ce"] for row in meant]


def test_a_dry_run_writes_nothing_and_few_documents_are_named(place, scan):
    done, as_json = scan("series", "--dry-run"), scan("series", "--dry-run", "--json")
    assert "3 checkpoints" in done.out
    assert labels(json.loads(as_json.out)) == LABELS
    assert [(one.code, one.err) for one in (done, as_json)] == [(0, "")] * 2
    assert not OUT.exists()
    write_documents(place / "two.jsonl", range(300, 302))
    assert "evaluate on at least" in scan("series/step10", "--evaluation", "two.jsonl", code=0).out
    # A folder of plain texts is as many documents.
    (place / "books").mkdir()
    for k in range(3):
        (place / "books" / f"{k}.txt").write_text(f"{k} the fox jumps", encoding="utf-8")
    done = scan("series/step10", "--evaluation", "books", "--json", "--out", "of-books")
    assert json.loads(done.out)["measurements"][0]["documents"] == 3


def test_every_scheme_has_its_divergence_from_what_was_measured_before(scan):
    scan("series/step10", code=0)
    scan("series/step10", "--schemes", "rtn-2bit", code=0)  # beside rtn-4bit
    full, four, two = audit_of()["measurements"]
    assert (full["scheme"], four["scheme"], two["scheme"]) == ("fp", "rtn-4bit", "rtn-2bit")
    assert full["kl"] is None
    assert 0 < four["kl_low"] <= four["kl"] <= four["kl_high"]
    assert four["kl"] < two["kl"] <= two["kl_max"]
    assert two["kl_p50"] <= two["kl_p90"] <= two["kl_p99"] <= two["kl_max"] * 1.1
    assert 0 < two["top1_agreement"] <= 1
    assert 0 < two["rms_dp"] < 1


@pytest.mark.slow
def test_a_local_scan_never_loads_the_client_of_the_hub(place):
    code = """
import sys
from qaudit.cli import main
try:
    main()
finally:
    heavy = {"qaudit.hub.api", "qaudit.hub.fetch"}
    if "--dry-run" in sys.argv:  # an audit itself loads transformers, which loads the rest
        heavy |= {"huggingface_hub", "httpx2", "torch", "transformers"}
    print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
    for how in ("-q", "--dry-run"):
        words = ("scan", "series/step10", *QUICK, how)
        said = ended(start(place, *words, main=code, HF_ENDPOINT="http://127.0.0.1:9"))
        assert said.splitlines()[-1] == "[]"


BASE = "series/step10"


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [
        "--shipped model-GPTQ --shipped model-AWQ",
        "--set diagnostics=weights --set diagnostics=sensitivity:layers=1:scheme=rtn-3bit",
    ],
    ids=["files", "diagnostics"],
)
def test_a_pretended_gpu_has_the_cpus_numbers(chosen, place, scan):
    quantized_copy(place / BASE, place / "model-GPTQ", "gptq")
    quantized_copy(place / BASE, place / "model-AWQ", "awq", scale=2.0)
    words = (BASE, *chosen.split(), "--schemes", "gptq-3bit", "--set", "dtype=float32")
    assert scan(*words, "--device", "cpu", "--out", "cpu").code == 0
    with pretended() as device:
        done = scan(*words, "--device", "cuda", "--out", "gpu")
    assert done.code == 0, done.err
    cpu, gpu = audit_of(place / "cpu"), audit_of(place / "gpu")
    assert device.tried > 1000
    assert gpu["environment"]["device"] == "pretended"
    for part in ("measurements", "comparisons", "diagnostics"):
        must_be_close(gpu[part], cpu[part], 1e-5)  # the head takes other numbers of rows at once


WORDS = st.text("abcxyz", min_size=1, max_size=20)
TARGETS = st.builds("{}/{}".format, WORDS, WORDS)


def test_the_folder_is_named_after_all_targets(place):
    names = {
        "org/name": "org-name",
        "hf://org/name": "org-name",
        "org/name@stage1-step1000": "org-name-stage1-step1000",
        "org/name-*": "org-name--",
        "models/step10": "models-step10",
        "recipes/olmo2-7b.yaml": "olmo2-7b",
        "demo": "demo",
        "a b": "a+b",
        "out/mine/plan.json": "mine",
        "series/step10 series/step200": "step10+step200",  # folders on this machine
        ".": "place",
    }
    assert {targets: folder_name(targets.split()) for targets in names} == names
    # What quick measures has a folder of its own.
    assert default_folder(["demo"], {"quick": True}).name == "demo-quick"
    assert default_folder(["demo"], {"quick": None}).name == "demo"


@given(st.lists(TARGETS, min_size=1, max_size=9))
def test_other_targets_have_another_folder_and_no_name_is_too_long(targets):
    name = folder_name(targets)
    assert 0 < len(name) <= LONGEST_NAME
    assert "/" not in name
    assert folder_name([*targets, "org/more"]) != name
    assert folder_name(["org/more", *targets]) != name


CONFIG, WEIGHTS = "config.json", "model.safetensors"
IN_PLACE = [
    *(("named", f"{BASE} --set {key}=named", (2,)) for key in ("policy", "evaluation", "choices")),
    ("recipe.yaml", "recipe.yaml", (2,)),
    *((f"{BASE}/{name}", BASE, (4,)) for name in (CONFIG, WEIGHTS)),
    *(
        (f"{BASE}/{name}", BASE, (0,))
        for name in (f"{WEIGHTS}.index.json", "trainer_state.json", "qaudit-family.yaml")
    ),
    *(
        (f"files/{name}", f"{BASE} --shipped files", (0, 2, 4))
        for name in (CONFIG, WEIGHTS, "tokenizer.json", "quantize_config.json")
    ),
    (f"{BASE}/tokenizer.json", BASE, (2, 4)),
]


def test_a_fifo_in_place_of_a_file_is_not_waited_for(place, scan):
    quantized_copy(place / BASE, place / "files", "gptq", bits=4)
    for name, words, codes in IN_PLACE:
        path = place / name
        whole = path.read_bytes() if path.exists() else b""
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        how = ("--out", f"out-{path.parent.name}") if "tokenizer" in name else ("--dry-run",)
        done = scan(*words.split(), *how)
        assert done.code in codes, (name, done.err)
        assert "bug of qaudit" not in done.err and "did you mean `named`" not in done.err
        path.unlink()
        if whole:
            path.write_bytes(whole)
    # Links to regular files are read.
    for name in (CONFIG, WEIGHTS):
        (place / BASE / name).rename(place / name)
        (place / BASE / name).symlink_to(place / name)
    scan(BASE, "--dry-run", code=0)
