"""`qaudit scan --shipped`: files that are quantized already, measured beside their base."""

import json
import re
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

from qaudit.checkpoints.configuration import read_configuration
from tests.support import released
from tests.support.cards import section, table, whole_at
from tests.support.cli import OUT, QUICK, TEXT, audit_of, edited, refused, weights_in
from tests.support.gguf import write_gguf
from tests.support.models import save_tokenizer, swap_words
from tests.support.parts import same_audit
from tests.support.quantized import quantized_copy

BASE = "series/step10"


def rows_of(out=OUT):
    return {row["scheme"]: row for row in audit_of(out)["measurements"]}


def copy(place, name, kind="gptq", **options):
    quantized_copy(place / BASE, place / name, kind, **options)
    return place / name


def test_files_are_measured_beside_their_base(place, scan):
    copy(place, "model-GPTQ")
    copy(place, "model-AWQ", "awq", scale=2.0)
    both = ("--shipped", "model-GPTQ", "--shipped", "model-AWQ")
    scan(BASE, *both, code=0)
    audit, rows = audit_of(), rows_of()
    assert list(rows) == ["fp", "rtn-4bit", "model-GPTQ", "model-AWQ"]
    assert 0 < rows["model-GPTQ"]["kl"] < rows["model-AWQ"]["kl"]
    assert rows["model-GPTQ"]["nbytes"] < rows["fp"]["nbytes"]
    assert [one["label"] for one in audit["plan"]["shipped"]] == ["model-GPTQ", "model-AWQ"]
    card = section(whole_at(OUT), "Shipped files")
    (_, gptq, awq) = table(card)
    assert (gptq[:2], gptq[-1]) == (["`model-GPTQ`", "gptq, 4-bit"], "-")
    assert awq[-1].startswith(("rtn-4bit", "model-GPTQ"))
    assert [(r["scheme"], r["kl"], r["dominated_by"]) for r in audit["diagnostics"]["shipped"]] == [
        ("model-GPTQ", rows["model-GPTQ"]["kl"], []),
        ("model-AWQ", rows["model-AWQ"]["kl"], ["rtn-4bit"]),  # indices of groups take bytes, too
    ]
    (finding,) = [one for one in audit["findings"] if one["rule"] == "QA042"]
    assert finding["scheme"] == "model-AWQ"
    assert {path.name for path in (OUT / "plots").glob("shipped*")} == {
        "shipped.svg", "shipped-dark.svg", "shipped.png"
    }  # fmt: skip
    scan(BASE, *both, "--set", "diagnostics=weights", code=0)
    again = audit_of()
    assert again["measurements"] == audit["measurements"]  # from disk
    weights = again["diagnostics"]["weights"]
    assert {name for row in weights for name in row["perturbation"]} == {"rtn-4bit"}


ALONE = ("scan", *TEXT, "--out", "out", "--schemes", "none", BASE)


def changed(folder, suffix, change):
    """Change every tensor that ends so, or remove it."""
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    made = {n: change(t) if n.endswith(suffix) else t for n, t in tensors.items()}
    kept = {n: t.contiguous() for n, t in made.items() if t is not None}
    safetensors.torch.save_file(kept, path)


def renamed(folder, old, new):
    path = folder / "config.json"
    path.write_text(path.read_text().replace(old, new))


def reordered(folder):
    changed(folder, ".g_idx", lambda t: t.roll(32))
    renamed(folder, '"desc_act": false', '"desc_act": true')


def test_a_changed_file_is_measured_again_and_a_broken_one_skipped(place, scan):
    folder = copy(place, "model-GPTQ")
    assert scan(BASE, "--shipped", "model-GPTQ").code == 0
    before = audit_of()["measurements"][-1]["kl"]
    changed(folder, "model.norm.weight", lambda t: t * 3)
    assert scan(BASE, "--shipped", "model-GPTQ").code == 0
    assert audit_of()["measurements"][-1]["kl"] > before
    changed(folder, "0.mlp.up_proj.scales", lambda t: t * 0)
    done = scan(BASE, "--shipped", "model-GPTQ", "--out", "again", code=3)
    assert list(rows_of(place / "again")) == ["fp", "rtn-4bit"]
    (skipped,) = audit_of(place / "again")["skipped"]
    assert skipped["scheme"] == "model-GPTQ"
    assert "scales of zero" in skipped["reason"]
    assert f"skipped {skipped['subject']} under model-GPTQ: " in done.err


@pytest.mark.parametrize(
    ("bits", "breakage", "sign"),
    [
        (3, lambda f: renamed(f, '"desc_act"', '"checkpoint_format": "gptq_v2", "a"'), "zero"),
        (8, lambda f: renamed(f, '"desc_act"', '"checkpoint_format": "gptq_v2", "a"'), "zero"),
        (4, reordered, "`g_idx` is lost or wrong"),
        (4, lambda f: changed(f, ".qweight", lambda t: t.flip(0)), "codes in another order"),
    ],
    ids=["zeros", "zeros-8bit", "groups", "codes"],
)
def test_a_broken_file_is_named_with_what_was_seen(bits, breakage, sign, place, qaudit):
    copy(place, "whole", bits=bits)
    breakage(copy(place, "broken", bits=bits))
    qaudit(*ALONE, "--shipped", "broken", "--shipped", "whole", code=0)
    audit = audit_of()
    whole, broken = audit["diagnostics"]["shipped"]
    assert (whole["scheme"], whole["looks_broken"]) == ("whole", [])
    assert broken["dominated_by"] == ["whole"]
    (note,) = broken["looks_broken"]
    assert sign in note
    assert [f["scheme"] for f in audit["findings"] if f["rule"] == "QA043"] == ["broken"]
    shown = section(whole_at(OUT), "Shipped files")
    assert "looks broken" in shown
    assert re.search(r"\d+ of \d+ linears are far", shown)


def test_a_base_may_be_quantized_itself_and_measured_in_parts(place, qaudit):
    copy(place, "model-GPTQ")
    asked = (*TEXT, "model-GPTQ", "--schemes", "none", "--out")
    qaudit("scan", *asked, "alone", code=0)
    audit = audit_of(place / "alone")
    (row,) = audit["measurements"]
    assert (row["subject"], row["scheme"]) == ("model-GPTQ", "model-GPTQ")
    assert row["kl"] is row["relative_error"] is row["absolute_change"] is None
    (note,) = row["notes"]
    assert note.startswith("audited without a reference: `model-GPTQ` is quantized already (gptq")
    assert note in whole_at(place / "alone")
    assert qaudit(*ALONE, "--shipped", "model-GPTQ").code == 0
    beside = audit_of()["measurements"][-1]
    assert beside["ce"] == pytest.approx(row["ce"], rel=1e-6)  # the same text, in other batches
    assert beside["nbytes"] == row["nbytes"]
    again = qaudit("scan", *asked, "alone")
    assert audit_of(place / "alone")["measurements"] == [row], again.err
    qaudit("plan", *asked, "parts", code=0)
    refused(qaudit("collect", "parts"), 3, "round 1 has 1 subject, and 1 is not measured", "part")
    qaudit("part", "parts", "--part", "0/1", code=0)
    qaudit("collect", "parts", code=0)
    same_audit(place / "alone", place / "parts")
    copy(place, "model-AWQ", "awq", scale=2.0)
    rtn = ("--schemes", "rtn-4bit", "--shipped", "model-AWQ", "--out", "both")
    qaudit("scan", "model-GPTQ", *TEXT, *rtn, code=0)
    rows = rows_of(place / "both")
    assert (list(rows), rows["model-AWQ"]["kl"] > 0) == (["fp", "rtn-4bit", "model-AWQ"], True)


def gguf_copy(place, name="model-Q4_0.gguf", kind="Q4_0"):
    write_gguf(place / BASE, place / name, lambda n: kind if n.endswith("_proj.weight") else "F32")
    return place / name


def test_a_gguf_file_is_its_scheme_in_the_class_that_it_claims(place, qaudit, scan):
    gguf_copy(place)
    scan(BASE, "--schemes", "gguf-q4_0", "--shipped", "model-Q4_0.gguf", code=0)
    own, file = (
        [rows_of()[name][key] for key in ("ce", "kl", "bits_per_weight")]
        for name in ("gguf-q4_0", "model-Q4_0")
    )
    assert file == own == [*own[:2], 4.5]
    assert audit_of()["plan"]["shipped"][0]["files"][0]["name"] == "model-Q4_0.gguf"
    gguf_copy(place, "model-Q4_K_M.gguf", "Q5_0")  # as rows of small models fall back
    done = qaudit(*ALONE, "--shipped", "model-Q4_K_M.gguf", "--out", "claims", code=0)
    audit = audit_of(place / "claims")
    (decision,) = audit["verdict"]["classes"]
    assert (decision["bit_class"], decision["status"]) == ("4", "undecided")
    assert rows_of(place / "claims")["model-Q4_K_M"]["bits_per_weight"] == 5.5
    step = audit["verdict"]["next_step"]["command"]
    assert "--shipped model-Q4_K_M.gguf" in step and "--schemes none" in step
    assert "5.50" in done.out


def test_files_are_picked_gated_and_compared_as_schemes_are(place, qaudit):
    copy(place, "model-GPTQ", bits=8)
    copy(place, "model-3bit", bits=3)
    files = ("--shipped", "model-GPTQ", "--shipped", "model-3bit")
    assert qaudit(*ALONE, *files).code == 0
    picked = json.loads(qaudit("pick", "out", "--bits", "8", "--json", "-q").out)["pick"]
    assert (picked["subject"], picked["scheme"]) == ("step10", "model-GPTQ")
    rule = "{name: a, metric: kl, margin: %s nats, subjects: '@all', bits: 3}"
    for margin, code in (("10", 0), ("0", 1)):
        (place / "own.yaml").write_text(f"minimum_documents: 10\nrules: [{rule % margin}]")
        qaudit("gate", "out", "--policy", "own.yaml", code=code)
    changed(place / "model-3bit", "model.norm.weight", lambda t: t * 3)
    qaudit(*ALONE, *files, "--out", "other", code=0)
    done = qaudit("diff", "out", "other", "--format", "json")
    compared = {row["scheme"]: row for row in json.loads(done.out)["deltas"]}
    assert compared["model-GPTQ"]["loss"] == compared["model-GPTQ"]["kl"] == 0
    assert compared["model-3bit"]["kl"] > 0


# ------------------------------------------------------------------------------- refusals


def with_key(**values):
    return lambda: edited(Path("model-GPTQ/config.json"), **values)


def of_gguf(change):
    path = Path("model-Q4_0.gguf")
    return lambda: path.write_bytes(change(path.read_bytes()))


GPTQ, GGUF = f"{BASE} --shipped model-GPTQ", f"{BASE} --shipped model-Q4_0.gguf"
MADE_FROM = "the model that the file was made"


@pytest.mark.parametrize(
    "case",
    [
        (lambda: None, f"{BASE} --schemes none", 2, "no scheme is named", "rtn-4bit"),
        (with_key(vocab_size=77), GPTQ, 2, "its `vocab_size` is 77", MADE_FROM),
        (with_key(num_hidden_layers=99), GPTQ, 2, "`num_hidden_layers` is 99", MADE_FROM),
        (with_key(model_type="qwen2"), GPTQ, 2, "its `model_type` is qwen2", MADE_FROM),
        (lambda: swap_words(Path("model-GPTQ")), GPTQ, 2, "has another vocab", "was made from"),
        (lambda: changed(Path("model-GPTQ"), ".scales", lambda t: None), GPTQ, 4,
         "has no `scales`", "download"),
        (lambda: None, f"{BASE} --shipped series/step200", 4, "no quantization config", "target"),
        (lambda: None, f"{BASE} --shipped nowhere", 2, "`nowhere` does not exist", "org/name"),
        (lambda: None, "model-GPTQ --shipped model-GPTQ", 2, "is the base itself", "leave out"),
        (lambda: quantized_copy(Path("series/step200"), Path("b"), "gptq"),
         "model-GPTQ b --soup b+model-GPTQ", 2, "is quantized already", "before they are quant"),
        (lambda: None, "series --shipped model-GPTQ", 2, "3 are measured", "--checkpoints"),
        (lambda: None, f"{BASE} --shipped model-Q5_0.gguf", 2, "does not exist", ".gguf"),
        (of_gguf(lambda data: data[: len(data) // 2]), GGUF, 4, "cut short", "download the file"),
        (of_gguf(lambda data: data.replace(b"general.architecture", b"general.architectura")), GGUF,
         4, "architecture ``", "olmo2"),
        (lambda: swap_words(Path(BASE)), GGUF, 2, "another vocabulary", "was made from"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_beside_its_base_is_refused(place, qaudit, case):
    copy(place, "model-GPTQ")
    gguf_copy(place)
    edit, words, code, sentence, hint = case
    edit()
    usual = TEXT if "--schemes" in words else QUICK[:-2]
    refused(qaudit("scan", *usual, "--out", "out", *words.split()), code, sentence, hint)
    assert not (OUT / "audit.json").exists()


def repacked(blocks, scales):
    """Order codes as ggml does: behind the scale of 32 columns, column j beside column j + 16."""
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
    both = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate([scales[..., None], both], -1).reshape(*blocks.shape[:2], -1)


OF_CONFIG = """
    block_count=num_hidden_layers context_length=max_position_embeddings
    embedding_length=hidden_size feed_forward_length=intermediate_size
    expert_feed_forward_length=intermediate_size head_count=num_attention_heads
    head_count_kv=num_key_value_heads key_length=head_dim value_length=head_dim
    layer_norm_rms_eps=rms_norm_eps expert_count=num_local_experts
    expert_used_count=num_experts_per_tok sliding_window
"""


def write_gpt_oss(folder, path):
    config, tensors = read_configuration(folder), load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(path, "gpt-oss")
    for words in OF_CONFIG.split():
        key, _, name = words.partition("=")
        getattr(writer, f"add_{key}")(config[name or key])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, config["num_hidden_layers"])
    for name, values in tensors.items():
        stem, _, kind = name.rpartition("_")
        layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        if kind == "scales":
            packed = repacked(tensors[f"{stem}_blocks"], values)
            down = stem.endswith("down_proj")
            parts = {"down": packed} if down else {"gate": packed[:, ::2], "up": packed[:, 1::2]}
            for role, part in parts.items():
                own, raw = f"{layer}.ffn_{role}_exps.weight", gguf.GGMLQuantizationType.MXFP4
                writer.add_tensor(own, np.ascontiguousarray(part), raw_dtype=raw)
        elif name.endswith("gate_up_proj_bias"):
            for k, role in enumerate(("gate", "up")):
                own = f"{layer}.ffn_{role}_exps.bias"
                writer.add_tensor(own, np.ascontiguousarray(values[:, k::2]))
        elif name.endswith("down_proj_bias"):
            writer.add_tensor(f"{layer}.ffn_down_exps.bias", values)
        elif name.endswith("sinks"):
            writer.add_tensor(f"{layer}.attn_sinks.weight", values)
        elif kind != "blocks":
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_codes_of_a_release_are_those_of_its_gguf_file(place, qaudit):
    ships, _ = released.write_quantized(place, "gpt-oss", place / BASE)
    write_gpt_oss(ships, place / "gpt-oss.gguf")
    options = ("--schemes", "none", "--shipped", "gpt-oss.gguf", "--out", "out")
    qaudit("scan", ships, *TEXT, *options, code=0)
    rows = rows_of()
    assert rows["gpt-oss"]["ce"] == rows["fp"]["ce"]
    assert rows["gpt-oss"]["kl"] == pytest.approx(0, abs=1e-9)
    assert not any("broken" in note for note in rows["gpt-oss"]["notes"])


def test_a_gguf_file_of_a_wrapper_s_text_is_measured(place, qaudit):
    wrapper = released.save(place / "wrapper", "gemma3", **released.FOR_LLAMA_CPP)
    save_tokenizer(wrapper)
    text = released.text_of_wrapper(wrapper, place / "text")
    save_tokenizer(text)
    kind = "Q8_0"
    meant = write_gguf(text, place / "text.gguf", lambda n: kind if "_proj" in n else "F32")
    options = ("--set", "context=32", "--schemes", "none", "--out", "out")
    qaudit("scan", wrapper, "--shipped", "text.gguf", *TEXT, *options, code=0)
    rows = rows_of()
    assert rows["fp"]["ce"] == pytest.approx(released.plain_loss(wrapper, "gemma3"), abs=1e-5)
    save_file(meant, text / "model.safetensors", metadata={"format": "pt"})
    assert rows["text"]["ce"] == pytest.approx(released.plain_loss(text, "gemma3_text"), abs=1e-5)
    assert rows["text"]["kl"] > 0 and rows["text"]["ce"] != rows["fp"]["ce"]


@pytest.mark.slow
def test_an_exported_file_is_measured_beside_its_wrapper(place, qaudit):
    save_tokenizer(released.save(place / "wrapper", "gemma3"))
    scheme = "gptq-4bit:group=32"
    options = (*TEXT, "--set", "context=32", "-q")
    assert qaudit("scan", "wrapper", *options, "--schemes", scheme, "--out", "out").code == 0
    named = ("--subject", "wrapper", "--scheme", scheme, "--out", "new", "-q")
    assert qaudit("export", "out", *named).code == 0
    shipped = ("--shipped", "new", "--schemes", "none", "--out", "again")
    assert qaudit("scan", "wrapper", *options, *shipped).code == 0
    first, again = (audit_of(place / name)["measurements"][1] for name in ("out", "again"))
    assert again["scheme"] == "new" and again["ce"] == first["ce"] and again["kl"] == first["kl"]


# ---------------------------------------------------------------- bases that ship quantized


MEASURED = ("ce", "kl", "relative_error", "bits_per_weight")


@pytest.mark.parametrize("layout", released.LAYOUTS)
def test_a_quantized_base_is_what_it_means(layout, place, qaudit):
    ships, means = released.write_quantized(place, layout, place / BASE)
    for folder in (ships, means):
        done = qaudit("scan", *TEXT, "--schemes", "rtn-4bit", "--out", f"out-{folder.name}", folder)
        assert done.code == 0, done.err
    ours, dense = rows_of(place / f"out-{ships.name}"), rows_of(place / f"out-{means.name}")
    for scheme in ("fp", "rtn-4bit"):
        for key in MEASURED if scheme != "fp" else ("ce",):
            assert ours[scheme][key] == dense[scheme][key]
    assert ours["fp"]["nbytes"] < dense["fp"]["nbytes"]
    assert ours["rtn-4bit"]["nbytes"] == dense["rtn-4bit"]["nbytes"]
    (note,) = [n for n in ours["fp"]["notes"] if "ships quantized" in n]
    assert note in whole_at(place / f"out-{ships.name}")
    assert note in audit_of(place / f"out-{ships.name}")["plan"]["notes"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["deepseek", "kimi"])
def test_a_quantized_base_is_diagnosed_and_exported_as_it_means(layout, place, qaudit):
    ships, means = released.write_quantized(place, layout, place / BASE)
    scheme = "gptq-4bit:group=-1"
    setting = f"--schemes {scheme} --set dtype=bfloat16 --set diagnostics=weights -q"
    options = (*TEXT, *setting.split())
    rows = []
    for folder in (ships, means):
        assert qaudit("scan", folder, *options, "--out", f"out-{folder.name}").code == 0
        diagnosed = audit_of(place / f"out-{folder.name}")["diagnostics"]["weights"]
        rows.append([{**row, "subject": "", "details": ""} for row in diagnosed])
    assert rows[0] == rows[1] and rows[0]
    named = ("--subject", layout, "--scheme", scheme, "--out", "new", "-q")
    assert qaudit("export", f"out-{layout}", *named).code == 0
    done = qaudit("verify", "new", "--audit", f"out-{layout}", "--json", "-q")
    run = json.loads(done.out[done.out.index("{") :])["run"]
    assert run["agrees"] and run["difference"] == 0


def test_a_base_of_the_hub_is_priced_as_what_it_means(place, scan, online, serve_root):
    ships, means = released.write_quantized(place, "gpt-oss", place / BASE)
    for folder, name in ((ships, "oss"), (means, "dense")):
        shutil.copytree(folder, online / "root" / "lab" / name / "v1")
    serve_root()
    priced = [
        json.loads(scan(f"lab/{name}@v1", "--dry-run", "--json").out)["parameters"]
        for name in ("oss", "dense")
    ]
    assert priced[0] == priced[1]
    assert not weights_in(online / "hub")
