"""`qaudit verify`: a folder that was exported holds and runs as audited; an edited one does not."""

import json
import os
import shutil
import sys
import warnings
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from qaudit.engine.kept_weights import sha256_of
from qaudit.export import runs
from qaudit.export.contents import hashes_in
from qaudit.export.folder import measured_of
from qaudit.export.runs import AsItRuns
from qaudit.formats.weights import QuantizedFolder
from qaudit.saved.exports import read_export
from qaudit.types import Interval, Tolerances
from tests.support.cli import ROUNDED, TEXT, cells, edited, refused

FORMATS = [
    ("compressed-tensors", "rtn-3bit:group=32:sym=false"),
    ("compressed-tensors", "fp8"),
    ("compressed-tensors", "nvfp4"),
    ("compressed-tensors", "mxfp4"),
    ("compressed-tensors", "awq-4bit:group=32:zero_point=false:exact_fold=true"),
    ("compressed-tensors", "smoothquant:exact_fold=true"),
    ("bnb", "bnb-nf4:blocksize=32"),
    ("bnb", "bnb-int8"),
]


def of(scheme):
    """Return options that name what is exported: these documents decide nothing."""
    return ("--subject", "step200", "--scheme", scheme)


@pytest.fixture(scope="module")
def formats(after):
    """Return an audit of every scheme of `FORMATS`."""
    schemes = ("--schemes", ",".join(scheme for _, scheme in FORMATS))
    return after(("scan", "series/step200", *TEXT, *schemes, "--out", "out", "-q")) / "out"


def run_card(folder, capsys):
    """Run what the card of a folder shows, which writes some text."""
    card = (folder / "README.md").read_text()
    with warnings.catch_warnings(action="ignore"):  # of libraries
        exec(card.split("```python\n")[1].split("```")[0], {})
    assert "quick brown fox" in capsys.readouterr().out


def changed(folder, name, change):
    """Change one tensor of a folder in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors, name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_an_export_is_what_was_audited_and_runs_so(qaudit, exported, monkeypatch, capsys):
    def whole(*_, **__):
        raise AssertionError("the original was loaded as a whole")

    run_card(exported, capsys)
    for module in ("qaudit.engine.block_pass", "qaudit.model.skeleton"):
        monkeypatch.setattr(f"{module}.load_whole", whole)
    done = qaudit("verify", "new", "--audit", "out")
    assert "as it runs: loss" in done.out and "This is what was audited." in done.out
    assert "KL -" not in done.out
    assert (done.code, done.err) == (0, "")  # no bars of the libraries that load it
    done = qaudit("verify", "new", "--audit", "out", "--json", "-q")
    answer = json.loads(done.out)
    assert answer["verified"] is True
    run = answer["run"]
    # transformers computes with torch's own products, in batches of the same shape: what is left
    # is the order of additions of the streamed attention, below 1e-6 nats.
    assert abs(run["ce_running"] - run["ce_audited"]) <= 1e-6
    assert run["kl_running"] == pytest.approx(run["kl_audited"], rel=1e-3)
    row = cells()["step200", ROUNDED]
    assert run["ce_audited"] == pytest.approx(row["ce"], rel=1e-12)
    assert run["kl_audited"] == pytest.approx(row["kl"], rel=1e-12)


@pytest.mark.parametrize(("form", "scheme"), FORMATS)
def test_other_formats_run_as_audited(qaudit, formats, place, form, scheme, capsys):
    shutil.copytree(formats, "o")
    assert qaudit("export", "o", *of(scheme), "--format", form, "--out", "new").code == 0
    config = json.loads(Path("new/config.json").read_text())["quantization_config"]
    assert config.get("bnb_4bit_compute_dtype", "float32") == "float32"  # as it was audited
    if "nf4" in scheme or "sym=false" in scheme:  # whose cards show more
        run_card(Path("new"), capsys)
    done = qaudit("verify", "new", "--audit", "o")
    assert "all 14 quantized linears" in done.out
    if scheme.startswith("bnb-nf4"):
        assert "allows 0.005" in done.out
    assert ("This is what was audited." in done.out, done.code) == (True, 0), done.out


def test_without_its_runtime_files_are_compared_all_the_same(qaudit, exported):
    for form, package in (("gptq", "gptqmodel"), ("awq", "gptqmodel"), ("mlx", "mlx-lm")):
        runtime = package.partition("-")[0]
        qaudit("export", "out", *of(ROUNDED), "--format", form, "--out", form, code=0)
        bits = [read_export(folder).bits_per_weight for folder in (Path(form), exported)]
        assert bits[0] > 4.6 > bits[1]  # with zero points or biases
        for folder, each in zip((Path(form), exported), bits, strict=True):
            read = QuantizedFolder(folder)
            weights = sum(layout.shape[0] * layout.shape[1] for layout in read.linears.values())
            assert each == pytest.approx(8 * sum(map(read.nbytes_of, read.linears)) / weights)
            assert f"{each:.3f} bits per quantized weight" in (folder / "README.md").read_text()
        done = qaudit("verify", form, "--audit", "out", code=0)
        assert f"not run: {package} is not installed" in done.out
        assert f"to run it: pip install 'qaudit-llm[{runtime}]'" in done.out
        assert "those that were audited; the model was not run." in done.out
        named = qaudit("verify", form, "--audit", "out", "--runtime", runtime)
        refused(named, 4, f"{package} is not installed", f"qaudit-llm[{runtime}]")


def test_a_policy_says_how_far_losses_may_differ(qaudit, exported, monkeypatch):
    (one,) = (one for one in runs.RUNTIMES if one.name == "transformers")

    def load(folder, dtype):
        loaded = one.load(folder, dtype)
        return replace(loaded, predicted=lambda tokens_BT: loaded.predicted(tokens_BT) * 1.01)

    rest = [other for other in runs.RUNTIMES if other is not one]
    monkeypatch.setattr(runs, "RUNTIMES", (replace(one, load=load), *rest))
    done = qaudit("verify", "new", "--audit", "out")
    assert (done.code, "`release` allows 1e-06" in done.out) == (1, True), done.out
    assert "the runtime computes something else with them." in " ".join(done.out.split())
    path = Path("own.yaml")
    path.write_text("extends: release\nverify: {plain: 0.1 nats}\n")
    done = qaudit("verify", "new", "--audit", "out", "--policy", "own.yaml")
    assert (done.code, "`own` allows 0.1" in done.out) == (0, True), done.out
    for line, sentence, hint in (
        ("plain: 0.1", "line 3: `verify.plain`: `0.1` has no unit", "0.01 nats"),
        ("plan: 0.1 nats", "`verify.plan`", "plain"),
    ):
        path.write_text(f"extends: release\nverify:\n  {line}\n")
        refused(qaudit("verify", "new", "--policy", "own.yaml"), 2, sentence, hint)


class _Engine:
    """vLLM's interface over transformers: log-probabilities of prompts, no logits."""

    def __init__(self, model, dtype, **_):
        assert dtype == "bfloat16"
        (one,) = (one for one in runs.RUNTIMES if one.name == "transformers")
        self._loaded = one.load(Path(model), torch.float32)

    def generate(self, prompts, *_, **__):
        rows = [prompt["prompt_token_ids"] for prompt in prompts]
        logits_BTV = self._loaded.predicted(torch.tensor(rows)).log_softmax(-1)
        return [
            SimpleNamespace(prompt_logprobs=[None, *(
                {token: SimpleNamespace(logprob=float(logits_V[token]))}
                for token, logits_V in zip(row[1:], logits_TV, strict=True)
            )])
            for row, logits_TV in zip(rows, logits_BTV, strict=True)
        ]  # fmt: skip


def test_vllm_tells_losses_and_no_divergence(qaudit, exported, monkeypatch):
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = _Engine, SimpleNamespace
    module.__spec__ = ModuleSpec("vllm", None)
    monkeypatch.setitem(sys.modules, "vllm", module)
    done = qaudit("verify", "new", "--audit", "out", "--runtime", "vllm", "--json", "-q")
    run = json.loads(done.out)["run"]
    assert run["ce_running"] == pytest.approx(run["ce_audited"], abs=1e-6)
    assert run["kl_running"] is run["kl_difference"] is None
    assert (run["tolerance"], done.code) == (5e-3, 0)  # in bfloat16, of an audit in float32


def _flip(tensors, name):
    tensors[name].view(torch.uint8).view(-1)[0] ^= 1


def _cut(tensors, name):
    tensors[name] = tensors[name][:, :-1].contiguous()


def test_what_was_changed_is_named(qaudit, exported):
    linear, norm = "model.layers.1.mlp.up_proj", "model.norm.weight"
    for name, edit, sentence in (
        (f"{linear}.weight_packed", _flip, f"`{linear}.weight` holds other weights"),
        (f"{linear}.weight_scale", _flip, f"`{linear}.weight` holds other weights"),
        (norm, _flip, f"`{norm}` is not what it was"),
        (norm, dict.pop, f"`{norm}` is missing"),
        (f"{linear}.weight_scale", dict.pop, f"`{linear}.weight` has no `weight_scale`"),
        (f"{linear}.weight_packed", _cut, f"`{linear}.weight` has 3 words for 32 columns"),
        ("more", lambda found, name: found.update(more=torch.zeros(3)), "`more` was not exported"),
    ):
        shutil.copytree(exported, "changed")
        changed(Path("changed"), name, edit)
        done = qaudit("verify", "changed")
        assert (sentence in done.out, done.code) == (True, 1), name
        assert "This is not what was exported." in done.out
        shutil.rmtree("changed")

    def widen(config):
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 8

    edited(exported / "config.json", widen)
    done = qaudit("verify", "new", code=1)
    assert "`quantization_config` of `config.json` is not that of" in done.out


def _keys(name, **values):
    return lambda folder: edited(folder / name, **values)


def _added(name, text="x"):
    return lambda folder: (folder / name).write_text(text)


def _index_of_others(folder):
    tensors = load_file(folder / "model.safetensors")
    others = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    save_file(others, folder / "part.safetensors", metadata={"format": "pt"})
    index = {"weight_map": dict.fromkeys(tensors, "part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _fifo(folder):
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


EDITS = {
    "tokenizer": (_added("tokenizer.json"), "`tokenizer.json`"),
    "template": (_added("chat_template.jinja"), "`chat_template.jinja`"),
    "end of text": (_keys("config.json", eos_token_id=7), "`eos_token_id`"),
    "code": (_keys("config.json", auto_map={"AutoModel": "x.M"}), "`auto_map`"),
    "heads": (_keys("config.json", num_attention_heads=1), "`num_attention_heads`"),
    "rotations": (_keys("config.json", rope_theta=5.0), "`rope_theta`"),
    "words": (_added("added_tokens.json", "{}"), "`added_tokens.json`"),
}
FURTHER = {
    "generation": (_added("generation_config.json", "{}"), "`generation_config.json`"),
    "weights": (_added("consolidated.safetensors"), "`consolidated.safetensors` was not exported"),
    "audit": (_keys("qaudit/audit.json", schema="9"), "`qaudit/audit.json` is not what was"),
    "module": (_added("modeling.py"), "`modeling.py` was not exported"),
    "index": (_index_of_others, "`part.safetensors` was not exported"),
    "link": (
        lambda folder: (folder / "additional_chat_templates").symlink_to(folder / "qaudit"),
        "`additional_chat_templates` was not exported",
    ),
    "fifo": (_fifo, "`config.json` is not a regular file"),
}


def test_every_file_that_a_runtime_reads_is_compared(qaudit, exported):
    folder, path = Path("changed"), Path("changed/qaudit-export.json")
    for name, (edit, sentence) in {**EDITS, **FURTHER}.items():
        shutil.copytree(exported, folder, symlinks=True)
        edit(folder)
        whole = name in FURTHER or "." in sentence
        file = sentence if whole else "`config.json` is not what was exported"
        done = qaudit("verify", "changed", *(("--audit", "out") if name in EDITS else ()))
        assert (file in done.out, done.code) == (True, 1), (name, done)
        assert "holds other weights" not in done.out  # an index of others is not read
        if name in EDITS:  # with the record, of which the audit knows nothing
            edited(path, files=hashes_in(folder))
            done = qaudit("verify", "changed")
            assert ("This is not" in done.out, done.code) == (False, 3), (name, done)
            done = qaudit("verify", "changed", "--audit", "out")
            assert (f"{sentence} " in done.out, done.code) == (True, 1), (name, done)
        shutil.rmtree(folder)


def test_without_an_audit_the_folder_agrees_with_itself_alone(qaudit, exported):
    for name in ("README.md", "LICENSE", ".gitattributes"):
        (exported / name).write_text("# Mine")
    done = qaudit("verify", "new", code=3)
    assert "The weights match the export's own record." in done.out and "`--audit`" in done.out
    # What cannot be compared is refused.
    for evidence in Path("out/evidence").glob("*.npz"):
        evidence.write_bytes(evidence.read_bytes() + b"x")
    refused(qaudit("verify", "new", "--audit", "out"), 4, "is not the evidence that", "scan again")
    audit = Path("out/audit.json")
    audit.write_text(audit.read_text() + "\n")
    refused(qaudit("verify", "new", "--audit", "out"), 2, "not the audit that was exported", "that")
    weights = exported / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    done = qaudit("verify", "new")
    assert ("is cut short" in done.out, done.code) == (True, 1)
    (exported / "qaudit-export.json").write_text("{")
    refused(qaudit("verify", "new"), 2, "cannot be read", "export it again")


def test_a_difference_is_judged_by_its_interval():
    limit = runs.Limit(2e-3, 2e-3, "")
    for low, high, agrees in ((-1e-3, 1e-3, True), (1e-3, 3e-3, None), (3e-3, 4e-3, False)):
        middle = Interval((low + high) / 2, low, high)
        assert AsItRuns("a", "b", limit, 9, middle, middle, middle, None, None).agrees is agrees


_GROUP, _WITH_ZEROS = ({"group_0": {"weights": {"symmetric": s}}} for s in (True, False))
_PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


@pytest.mark.parametrize(
    ("runtime", "config", "dtype", "experts", "allowed", "why"),
    [
        ("llama.cpp", {}, "float32", False, 2e-2, "rounds activations to 8 bits"),
        ("gptqmodel", {"quant_method": "gptq"}, "float32", False, 5e-3, "the whole model"),
        ("gptqmodel", {"quant_method": "gptq"}, "bfloat16", False, 2e-3, "of its own"),
        ("vllm", _PACKED, "float32", False, 5e-3, "the whole model"),
        ("mlx", {"bits": 4}, "float32", False, 5e-3, "types of the file"),
        ("transformers", {"load_in_4bit": True}, "float32", False, 5e-3, "multiplies 4-bit"),
        ("transformers", {"load_in_4bit": True}, "bfloat16", False, 2e-3, "of its own"),
        ("transformers", {"load_in_8bit": True}, "float32", False, 2e-3, "of its own"),
        ("transformers", {**_PACKED, "format": "mxfp4-pack-quantized"}, "float32", False, 5e-3,
         "4-bit floats"),
        ("transformers", _PACKED, "float32", True, 5e-3, "experts"),
        ("transformers", _PACKED, "float32", False, 1e-6, "torch multiplies"),
        ("transformers", {**_PACKED, "config_groups": _WITH_ZEROS}, "float32", False, 2e-3,
         "of its own"),
    ],
)  # fmt: skip
def test_arithmetic_limits_the_difference(runtime, config, dtype, experts, allowed, why, tmp_path):
    whole = {"quantization_config": {"config_groups": _GROUP, **config}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    (one,) = (one for one in runs.RUNTIMES if one.name == runtime)
    found = runs.limit_of(one, Tolerances(), tmp_path, dtype, has_experts=experts)
    assert (found.loss, found.kl) == (allowed, allowed)
    assert why in found.why


def test_tensors_edited_with_their_record_are_not_the_audits(qaudit, exported, monkeypatch):
    linear, norm = "model.layers.0.self_attn.q_proj", "model.norm.weight"
    folder, path = Path("changed"), Path("changed/qaudit-export.json")
    for name, stored, read, part, sentence in (
        (norm, norm, norm, "rest", "embeddings, norms or head are not those"),
        (linear, f"{linear}.weight_packed", f"{linear}.weight", "dense",
         f"`{linear}.weight` is not what the audit measured"),
    ):  # fmt: skip
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(exported, folder)
        changed(folder, stored, _flip)
        own = {name: sha256_of(QuantizedFolder(folder).read(read).float())}
        edited(path, lambda r, part=part, own=own: r[part].update(own), files=hashes_in(folder))
        assert qaudit("verify", "changed").code == 3  # they agree with each other
        done = qaudit("verify", "changed", "--audit", "out")
        assert (sentence in done.out, done.code) == (True, 1), done.out
    without = lambda choice: replace(measured_of(choice), linears_sha256={})  # noqa: E731
    monkeypatch.setattr("qaudit.export.verify.measured_of", without)
    assert "the audit has no hashes of linears" in qaudit("verify", "changed", "--audit", "out").out
