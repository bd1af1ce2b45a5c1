"""`qaudit export`: the files hold what was measured, and a run that is cut off goes on."""

import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from qaudit.core.linears import Linears
from qaudit.core.registry import parse_scheme
from qaudit.core.schemes.gptq import Gptq
from qaudit.core.schemes.nearest import RoundToNearest
from qaudit.engine.kept_weights import sha256_of
from qaudit.formats.weights import QuantizedFolder
from qaudit.report.format import spread
from qaudit.saved.exports import read_export
from qaudit.saved.parts import one_writer
from qaudit.types import Interval
from tests.support import released
from tests.support.cli import ROUNDED, TEXT, audit_of, cells, flipped, refused
from tests.support.filled import filled
from tests.support.models import save_model, save_tokenizer

WHERE = ("series/step200", *TEXT)
GPTQ = "gptq-4bit:group=32"
V_BIAS = "self_attn.v_proj.bias"
CELL = ("export", "out", "--subject", "step200", "--scheme", ROUNDED, "--out", "again")


def tensors_of(folder):
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def holds(folder, source):
    """Assert that a folder is recorded to hold what the scheme makes of a checkpoint."""
    record, scheme = read_export(folder), parse_scheme(ROUNDED)
    for name, sha256 in filled(record.dense.items()):
        linears = Linears({"w": source[f"{name}.weight"]})
        assert sha256_of(scheme.quantize(linears).weights["w"]) == sha256, name
    written = tensors_of(folder)
    for name, sha256 in filled(record.rest.items()):
        assert torch.equal(written[name], source[name])
        assert sha256_of(source[name]) == sha256
    assert {*record.rest, *(f"{name}.weight" for name in record.dense)} == set(source)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "scheme"),
    [
        ("compressed-tensors", "rtn-3bit:group=-1"),
        ("compressed-tensors", "rtn-8bit:group=32"),
        ("compressed-tensors", GPTQ),
        ("compressed-tensors", "fp8:scale_dtype=bf16"),
        ("compressed-tensors", "int8"),
        ("gptq", "rtn-3bit:group=32"),
        ("gptq", "rtn-4bit:group=-1:sym=false"),
        ("awq", "rtn-4bit:group=32:sym=false"),
        ("mlx", "rtn-3bit:group=32:sym=false"),
        ("awq", "awq-4bit:group=32:exact_fold=true"),
        ("bnb", "bnb-fp4:blocksize=32:double_quant=true"),
    ],
)
def test_files_are_read_as_shipped_ones(qaudit, place, form, scheme):
    qaudit("export", *WHERE, "--scheme", scheme, "--format", form, "--out", "new", code=0)
    record, read = read_export(place / "new"), QuantizedFolder(place / "new")
    assert set(read.linears) == {f"{name}.weight" for name in record.dense}
    for name, sha256 in filled(record.dense.items()):
        assert sha256_of(read.read(f"{name}.weight").float()) == sha256, name


def test_an_export_holds_what_the_scheme_makes_and_says_so(qaudit, exported):
    holds(exported, tensors_of(Path("series/step200")))
    done = qaudit(*CELL)
    assert (done.code, done.out) == (0, "again\n")
    said = done.err.splitlines()[-2:]
    assert said[0].startswith(f"wrote again: step200 at {ROUNDED}, compressed-tensors, 4.5")
    assert said[0].endswith(" in all")
    assert said[1] == "compare it with what was measured: qaudit verify again --audit out"
    assert "once more" not in done.err
    assert Path("again/qaudit/audit.json").read_bytes() == Path("out/audit.json").read_bytes()


def test_a_soup_is_written_exported_and_measured_as_virtual(qaudit, exported):
    written = qaudit("soup", "series", "--soup", "late=last:2", "--out", "soup")
    assert (written.code, written.out) == (0, "soup\n")
    assert "late: lawa:k=2:every=0 of 0.5 of step200 and 0.5 of step1000" in written.err
    what = ("--subject", "late", "--scheme", ROUNDED, "--out", "soup-4bit")
    qaudit("export", "out", *what, code=0)
    assert "| 2 | `step1000` | 0.5 |" in Path("soup-4bit/README.md").read_text()
    holds(Path("soup-4bit"), tensors_of(Path("soup")))
    schemes = ("fp", ROUNDED, "rtn-3bit:group=32")
    qaudit("scan", "soup", *TEXT, "--schemes", ",".join(schemes[1:]), "--out", "of-soup", code=0)
    ours, virtual = cells(Path("of-soup")), cells()
    for scheme in schemes:
        assert ours["soup", scheme]["ce"] == virtual["late", scheme]["ce"]
    # Checkpoints that are targets make their mean.
    done = qaudit("soup", "series/step10", "series/step200", "--out", "both", "-q")
    assert (done.code, done.err) == (0, "")
    assert Path("both/model.safetensors").is_file()


def test_scales_are_folded_into_norms_biases_and_earlier_linears(qaudit, place):
    folder = save_model(place / "biased", 3, "qwen2", num_key_value_heads=1)
    shutil.copy(place / "series" / "step200" / "tokenizer.json", folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("bias") or "norm" in name:
            torch.manual_seed(len(name))
            tensor.uniform_(-3, 3).exp2_()
        if "v_proj" in name:
            tensor[::2] *= 16  # columns that differ by more than a power of two
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    scheme = "awq-4bit:group=32:zero_point=false:exact_fold=true"
    assert qaudit("scan", "biased", *TEXT, "--schemes", scheme, "--out", "out", "-q").code == 0
    qaudit("export", "out", "--subject", "biased", "--scheme", scheme, "--out", "new", code=0)
    # The one proof that needs no knowledge of folds: transformers runs the file with the loss
    # that was measured on a model whose norms were never touched.
    done = qaudit("verify", "new", "--audit", "out")
    assert ("This is what was audited." in done.out, done.code) == (True, 0), done.out
    written = tensors_of(place / "new")
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight", V_BIAS):
        ratio = (tensors[f"model.layers.0.{name}"] / written[f"model.layers.0.{name}"]).log2()
        assert ratio.any(), name
        assert torch.equal(ratio, ratio.round()), name


@pytest.mark.slow
def test_shards_have_an_index(qaudit, place, monkeypatch):
    what = ("export", *WHERE, "--scheme", "rtn-3bit:group=32:sym=false", "--out")
    qaudit(*what, "one", code=0)
    monkeypatch.setattr("qaudit.export.folder.SHARD_NBYTES", 20_000)
    qaudit(*what, "many", code=0)
    one, many = tensors_of(place / "one"), tensors_of(place / "many")
    assert len(list((place / "many").glob("*.safetensors"))) > 1
    index = json.loads((place / "many" / "model.safetensors.index.json").read_text())
    assert set(one) == set(many) == set(index["weight_map"])
    assert all(torch.equal(one[name], many[name]) for name in filled(one))


def test_what_ships_by_an_audit_goes_with_it(qaudit, place, exported):
    shutil.rmtree(exported)
    refused(qaudit("export", "out", "--out", "new"), 2, "decides 2 classes", "`--bits 4`")
    done = qaudit("export", "out", "--bits", "4", "--out", "new")
    refused(done, 3, "nothing of 4 bits ships: the verdict is UNDECIDED, ", "--subject step")
    path = place / "out" / "audit.json"
    path.write_text(path.read_text().replace('"undecided"', '"ship"'))
    ships = {one["bit_class"]: one for one in audit_of()["verdict"]["classes"]}["4"]
    other = next(f"step{n}" for n in (10, 200) if f"step{n}" != ships["subject"])
    of_three = "rtn-3bit:group=32"
    for named, code, sentence, hint in (
        (("--bits", "4", "--subject", other), 3, "not what ships of 4 bits", f"`--subject {other}"),
        (("--scheme", of_three, "--subject", other, "--bits", "4"), 2, "class `3`", "`--bits 3`"),
        (("--scheme", of_three, "--bits", "4"), 2, "class `3`", ships["scheme"]),
        (("--scheme", of_three, "--bits", "8"), 2, "class `3`", "has nothing"),
    ):
        refused(qaudit("export", "out", *named, "--out", "new"), code, sentence, hint)
        assert not (place / "new").exists()
    cell = ("--subject", other, "--scheme", ships["scheme"])
    assert qaudit("export", "out", *cell, "--out", "other", "-q").code == 0
    assert "verdict is about other weights" in (place / "other" / "README.md").read_text()
    what = ("--scheme", ships["scheme"])  # of one class: the verdict's subject
    assert qaudit("export", "out", *what, "--out", "new", "-q").code == 0
    record = read_export(place / "new")
    assert (record.subject, record.scheme) == (ships["subject"], ships["scheme"])
    raw = (place / "out" / "audit.json").read_bytes()
    assert record.audit_sha256 == hashlib.sha256(raw).hexdigest()
    assert (place / "new" / "qaudit" / "audit.json").read_bytes() == raw
    card = (place / "new" / "README.md").read_text()
    assert "KL divergence" in card
    assert " % [" in card.split("added loss")[1].split("|")[1]
    assert record.audit_sha256 in card
    kl = Interval(*(ships[f"kl{end}"] for end in ("", "_low", "_high")))
    assert f"| {spread(kl)} |" in card  # and no other interval of that number
    exact = re.findall(r"to full precision is (\S+) nats per token \[(\S+), (\S+)\]", card)
    assert exact
    assert {spread(Interval(*map(float, numbers))) for numbers in exact} == {spread(kl)}
    assert ships["status"] in card and "the policy requires 30 documents" in card
    assert "plots/" in (place / "out" / "card.md").read_text()
    card = (place / "new" / "qaudit" / "card.md").read_text()
    assert ("## " in card, "plots/" in card) == (True, False)  # which are not in the folder


KILLED = """
import os, signal
from qaudit.engine import block_pass
from qaudit.cli import main

keep, block_pass.EVERY_SECONDS = block_pass.KeptPass.keep, 0

def killed(self, block, *rest):
    keep(self, block, *rest)
    if block == 1 and self._keeps:  # not while the format is tried
        os.kill(os.getpid(), signal.SIGKILL)

block_pass.KeptPass.keep = killed
main()
"""


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_from_the_blocks_that_it_kept(qaudit, place, monkeypatch):
    what = ("export", *WHERE, "--scheme", GPTQ, "-q", "--out")
    assert qaudit(*what, "whole").code == 0
    command = [sys.executable, "-c", KILLED, *what, "new"]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not (place / "new").exists()
    assert len(list(place.glob(".new.begun/evidence/passes/*.kept"))) == 1
    blocks, quantize = [], Gptq.quantize

    def seen(self, linears):
        blocks.append((linears.block, "linear" in linears.weights))
        return quantize(self, linears)

    monkeypatch.setattr(Gptq, "quantize", seen)
    assert qaudit(*what, "new").code == 0
    assert {block for block, tried in blocks if not tried} == {1}
    for name in ("model.safetensors", "config.json", "qaudit-export.json"):
        assert (place / "new" / name).read_bytes() == (place / "whole" / name).read_bytes()
    assert not list(place.glob(".new*"))


def test_folders_that_cannot_be_written_leave_nothing(qaudit, exported, monkeypatch):
    full = Mock(side_effect=OSError(28, "No space left on device"))
    with one_writer(Path(".again.begun")):
        refused(qaudit(*CELL), 4, "is being written by another process", "wait until it ends")
    with monkeypatch.context() as patched:
        patched.setattr("safetensors.torch.save_file", full)
        refused(qaudit(*CELL), 4, "no space left on device", "free some space")
    with monkeypatch.context() as patched:
        free = SimpleNamespace(free=1000)
        patched.setattr("qaudit.export.folder.shutil.disk_usage", lambda _: free)
        refused(qaudit(*CELL), 4, "1 kB are free", "another disk")
    # Weights and text must be the audit's.
    flipped(Path("series/step200/model.safetensors"), -5)
    refused(qaudit(*CELL), 4, "have changed since", "again")
    lines = Path("evaluation.jsonl").read_text().splitlines(keepends=True)
    Path("evaluation.jsonl").write_text("".join(lines[1:]))
    refused(qaudit(*CELL), 4, "text that was measured on", "scan again")
    assert not Path("again").exists()


def losses_of(out):
    rows = cells(out).items()
    return {scheme: row["ce"] for (subject, scheme), row in rows if subject == "step200"}


def test_weights_unlike_the_audits_are_judged_alone(qaudit, exported, monkeypatch):
    quantize = RoundToNearest.quantize

    def rounds_otherwise(self, linears):
        moved = {name: 1.01 * weight_RC for name, weight_RC in linears.weights.items()}
        return quantize(self, replace(linears, weights=moved))

    monkeypatch.setattr(RoundToNearest, "quantize", rounds_otherwise)
    done = qaudit(*CELL, code=0)
    assert "rounds otherwise than that of the audit: quantized once more" in done.err
    assert "14 of 14 linears are not those of the audit: the file is judged alone" in done.err
    alone, audited = losses_of(Path("again/qaudit")), losses_of(Path("out"))
    assert alone.keys() == {"fp", ROUNDED}
    assert alone[ROUNDED] != audited[ROUNDED]
    done = qaudit("verify", "again", "--audit", "again/qaudit")
    assert ("This is what was audited." in done.out, done.code) == (True, 0), done.out
    refused(qaudit("verify", "again", "--audit", "out"), 2, "is not the audit that was export", "")
    # An audit without hashes is measured again while it is exported.
    monkeypatch.setattr(RoundToNearest, "quantize", quantize)
    monkeypatch.setattr("qaudit.export.folder.measured_of", lambda _: None)
    done = qaudit(*CELL, "--out", "once-more", code=0)
    assert "no hashes of linears: the file is measured while it is written" in done.err
    alone = losses_of(Path("once-more/qaudit"))
    assert alone.keys() == {"fp", ROUNDED}
    assert alone.items() <= audited.items()


def test_an_index_beside_a_single_file_is_named_and_not_read(qaudit, place):
    source = place / "series" / "step200"
    single, other = tensors_of(source), "part.safetensors"
    shutil.copy(place / "series" / "step1000" / "model.safetensors", source / other)
    index = {"metadata": {}, "weight_map": dict.fromkeys(single, other)}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    done = qaudit("export", *WHERE, "--scheme", ROUNDED, "--out", "new")
    assert (done.code, done.out) == (0, "new\n")
    holds(place / "new", single)
    named = "`part.safetensors`, which `model.safetensors.index.json` names, is not"
    assert named in done.err
    done = qaudit("soup", "series/step200", "series/step1000", "--out", "soup")
    assert done.err.count(named) == 1


MIX = "gptq-mix:budget=4.25:group=32"
SLOW = [pytest.param(family, GPTQ, marks=pytest.mark.slow) for family in ("mixtral", "qwen3_moe")]


def released_model(place, family):
    fewer = {"num_local_experts": 4} if family == "llama4_text" else {}
    folder = released.save(place / "model", family, **fewer)
    save_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "scheme"), [("gemma3", GPTQ), ("llama4_text", GPTQ), ("olmoe", MIX), *SLOW]
)
def test_transformers_runs_what_was_audited(family, scheme, place, qaudit):
    (released_model(place, family) / "preprocessor_config.json").write_text('{"size": 28}')
    options = f"--set context=32 --schemes {scheme} --set dtype=bfloat16 --out out -q".split()
    assert qaudit("scan", "model", *TEXT, *options).code == 0
    if scheme == MIX:  # all experts of a layer share a row
        row = cells()["model", MIX]
        experts = {f"mlp.experts.*.{part}_proj" for part in ("gate", "up", "down")}
        of_experts = {name: b for name, b in row["mixture"].items() if "experts" in name}
        assert of_experts.keys() == experts
        assert len(set("".join(of_experts.values()))) == 1, "transformers decodes all by one width"
        assert 4 < row["bits_per_weight"] <= 4.25
        assert row["notes"][0].startswith("bits differ by linear: of ")
        assert MIX in (place / "out" / "card.md").read_text()
    named = ("--subject", "model", "--scheme", scheme, "--out", "new", "-q")
    qaudit("export", "out", *named, code=0)
    tensors = load_file(place / "new" / "model.safetensors")
    assert (place / "new" / "preprocessor_config.json").read_text() == '{"size": 28}'
    if family == "llama4_text":  # stored as one tensor for all experts
        assert "model.layers.1.feed_forward.experts.3.up_proj.weight_packed" in tensors
    done = qaudit("verify", "new", "--audit", "out", "--json", "-q")
    answer = json.loads(done.out[done.out.index("{") :])
    assert answer["verified"], done.out
    assert answer["run"]["ce_running"] == pytest.approx(answer["run"]["ce_audited"], abs=1e-7)


def test_experts_no_runtime_names_are_refused_at_once(place, qaudit, serve, tmp_path, monkeypatch):
    shutil.copytree(released_model(place, "gpt_oss"), tmp_path / "root/org/model/main")
    for name, value in {"ENDPOINT": serve(tmp_path / "root").url, "HUB_OFFLINE": "0",
                        "HUB_CACHE": str(tmp_path / "cache")}.items():  # fmt: skip
        monkeypatch.setenv(f"HF_{name}", value)
    options = ("--set", "context=32", "--scheme", GPTQ, "--out", "new")
    done = qaudit("export", "org/model", *TEXT, *options)
    refused(done, 4, "no runtime has names for the quantized linears", "the scan's numbers stand")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    # Nor in a format whose runtimes load no experts.
    shutil.rmtree(place / "model")
    released_model(place, "olmoe")
    options = "--set context=32 --scheme bnb-nf4:blocksize=32 --format bnb --out new"
    done = qaudit("export", "model", *TEXT, *options.split())
    refused(done, 2, "loads quantized experts from `bnb` files", "`compressed-tensors` or `gptq`")
