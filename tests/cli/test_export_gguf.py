"""`qaudit export --format gguf`: one file of what was measured, with the metadata of llama.cpp."""

import json
import shutil
import sys

import gguf
import pytest
import torch

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.engine.kept_weights import sha256_of
from qaudit.formats import gguf as gguf_files
from qaudit.formats.gguf.reading import GgufFile
from qaudit.saved.exports import FILE, read_export
from tests.support import released
from tests.support.cli import TEXT, refused
from tests.support.filled import filled
from tests.support.gguf import write_gguf
from tests.support.models import save_model, save_tokenizer

WHERE = ("series/step200", *TEXT)
GGUF = ("--format", "gguf", "--converter", "template.gguf", "--out", "new", "-q")


@pytest.fixture
def template(place):
    """Return a file of the same model, with other weights than are exported."""
    write_gguf(place / "series/step10", place / "template.gguf", metadata={"x.note": "kept"})
    return place / "template.gguf"


def export(qaudit, scheme):
    return qaudit("export", *WHERE, "--scheme", scheme, *GGUF)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        ("gguf-q4_0", "Q4_0"),
        ("gguf-q3_k_m", None),
        ("gguf-q4_k:importance=true", "Q5_0"),
        ("rtn-8bit:group=-1", "Q8_0"),
        ("gptq-4bit:group=32", "Q4_0"),
    ],
)
@pytest.mark.usefixtures("template")
def test_the_file_holds_what_was_measured(qaudit, place, scheme, kind):
    done = export(qaudit, scheme)
    assert (done.code, done.out) == (0, "new\n"), done.err
    record, source = read_export(place / "new"), WeightFolder(place / "series/step200")
    weights = GgufFile(place / "new" / "model.gguf", base=source.names())
    for name, sha256 in filled(record.dense.items()):
        assert sha256_of(weights.read(f"{name}.weight")) == sha256, name
    for name in filled(record.rest):
        assert torch.equal(weights.read(name), source.read(name).float()), name
    assert {name.removesuffix(".weight") for name in weights.linears} == set(record.dense)
    read = gguf.GGUFReader(place / "new" / "model.gguf")
    blocks = [t for t in read.tensors if t.name.startswith("blk.") and len(t.shape) == 2]
    if kind:
        assert {t.tensor_type.name for t in blocks} == {kind}
    stored = 8 * sum(int(t.n_bytes) for t in blocks) / sum(int(t.n_elements) for t in blocks)
    assert record.bits_per_weight == pytest.approx(stored)
    assert read.fields["x.note"].contents() == "kept"
    tokens = gguf.GGUFReader(place / "template.gguf").fields["tokenizer.ggml.tokens"].contents()
    assert read.fields["tokenizer.ggml.tokens"].contents() == tokens
    names = {path.name for path in (place / "new").iterdir()}
    assert names == {"model.gguf", "README.md", "qaudit", FILE}
    verified = qaudit("verify", "new")
    assert verified.code == 3, verified.err  # no audit was named


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tied"), [("llama", False), ("olmo2", True), ("gemma", True), ("qwen3_moe", False)]
)
def test_rows_and_heads_are_llama_cpp_s(qaudit, place, family, tied):
    changes = {"num_attention_heads": 4, "tie_word_embeddings": tied}
    if family == "gemma":
        changes |= {"head_dim": 16}
    if family == "qwen3_moe":
        changes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                    "norm_topk_prob": True, "head_dim": 16}  # fmt: skip
    folder = save_model(place / "own", 3, family, **changes)
    save_tokenizer(folder)
    meant = write_gguf(folder, place / "meant.gguf", lambda n: "Q4_0" if "_proj" in n else "F32")
    write_gguf(folder, place / "template.gguf")
    qaudit("export", "own", *TEXT, "--scheme", "gguf-q4_0", *GGUF, code=0)
    ours, theirs = (
        {one.name: one for one in gguf.GGUFReader(place / path).tensors}
        for path in ("new/model.gguf", "meant.gguf")
    )
    assert (set(ours), "output.weight" in ours) == (set(theirs), not tied or family == "olmo2")
    for name, one in ours.items():
        assert one.tensor_type == theirs[name].tensor_type, name
        assert (one.data == theirs[name].data).all(), name
    assert len(meant) >= len(ours) - 1


@pytest.mark.slow
def test_the_converter_is_run_and_what_it_says_is_passed_on(qaudit, place):
    script = place / "convert_hf_to_gguf.py"
    script.write_text(
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from pathlib import Path\nfrom tests.support.gguf import write_gguf\n"
        "assert sys.argv[2] == '--outfile' and sys.argv[4:] == ['--outtype', 'auto']\n"
        "write_gguf(Path(sys.argv[1]), Path(sys.argv[3]))\n"
    )
    command = ("export", *WHERE, "--scheme", "gguf-q8_0", "--format", "gguf", "-q")
    qaudit(*command, "--converter", script, "--out", "new", code=0)
    assert qaudit("verify", "new").code == 3
    assert not (place / ".new.begun").exists()
    script.write_text("raise SystemExit('BPE pre-tokenizer was not recognized')")
    done = qaudit(*command, "--converter", script, "--out", "other")
    refused(done, 4, "BPE pre-tokenizer was not recognized", "run it by hand")
    assert not (place / "other").exists()


@pytest.mark.slow
def test_an_interrupted_export_goes_on(qaudit, place, template, monkeypatch):
    assert export(qaudit, "gptq-4bit:group=32").code == 0
    whole = (place / "new" / "model.gguf").read_bytes()
    shutil.rmtree(place / "new")

    def cut_off(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(gguf_files, "write_file", cut_off)
        assert export(qaudit, "gptq-4bit:group=32").code == 130
    assert not (place / "new").exists()
    assert list((place / ".new.begun/evidence/kept").rglob("*.safetensors"))
    assert export(qaudit, "gptq-4bit:group=32").code == 0
    assert (place / "new" / "model.gguf").read_bytes() == whole


@pytest.mark.slow
def test_a_template_of_another_model_is_refused(qaudit, place, template):
    path = place / "series/step200/config.json"
    config = json.loads(path.read_text())
    other = save_model(place / "other", 1, config["model_type"], num_hidden_layers=3)
    template.unlink()
    write_gguf(other, template)
    refused(
        export(qaudit, "gguf-q4_0"), 2, "block_count` is 3 where the base needs", "was made from"
    )


def test_a_wrapper_is_exported_in_another_format(qaudit, place):
    """Its text alone would be a file of GGUF, and what was judged is all of it."""
    wrapper = released.save(place / "wrapper", "gemma3", **released.FOR_LLAMA_CPP)
    save_tokenizer(wrapper)
    text = released.text_of_wrapper(wrapper, place / "text")
    save_tokenizer(text)
    write_gguf(text, place / "template.gguf")
    options = ("--scheme", "gguf-q8_0", "--set", "context=32", *GGUF)
    done = qaudit("export", "wrapper", *TEXT, *options)
    hint = "a scheme of integers and `--format compressed-tensors`"
    refused(done, 4, "the text of a wrapper alone", hint)
    assert not (place / "new").exists()
    hinted = ("--scheme", "rtn-8bit:group=32", "--format", "compressed-tensors", "--out", "new")
    done = qaudit("export", "wrapper", *TEXT, "--set", "context=32", *hinted, "-q")
    assert (done.code, done.out) == (0, "new\n"), done.err


@pytest.mark.usefixtures("template")
def test_a_changed_file_is_not_what_was_measured(qaudit, place):
    assert export(qaudit, "gguf-q4_0").code == 0
    path = place / "new" / "model.gguf"
    data = bytearray(path.read_bytes())
    for one in gguf.GGUFReader(path).tensors:
        if one.name == "blk.1.ffn_up.weight":
            data[one.data_offset + 5] ^= 1
    other = "`model.layers.1.mlp.up_proj.weight` holds other weights than were measured"
    for written, sentence in ((data, other), (data[: len(data) // 2], "cut short")):
        path.write_bytes(written)
        done = qaudit("verify", "new")
        assert (done.code, sentence in done.out) == (1, True), done.out
