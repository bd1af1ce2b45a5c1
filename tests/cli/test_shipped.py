"""`qaudit scan --shipped`: files that are quantized already, measured beside their base."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import Tensor

from qaudit.checkpoints.configuration import read_configuration
from tests.support import quantized_bases, released
from tests.support.cards import section, table, whole_at
from tests.support.cli import QUICK, TEXT, Run, audit_of, refused
from tests.support.gguf import write_gguf
from tests.support.models import save_tokenizer
from tests.support.parts import same_audit
from tests.support.quantized import quantized_copy
from tests.support.torchao import INSTALLED

BASE = "series/step10"


def copy(place: Path, name: str, kind: str = "gptq", **options: object) -> Path:
    quantized_copy(place / BASE, place / name, kind, **options)
    return place / name


def test_files_are_measured_beside_their_base(place: Path, scan: Run) -> None:
    copy(place, "model-GPTQ")
    copy(place, "model-AWQ", "awq", scale=2.0)
    done = scan(BASE, "--shipped", "model-GPTQ", "--shipped", "model-AWQ")
    assert done.code == 0, done.err
    audit = audit_of(place / "out")
    rows = {row["scheme"]: row for row in audit["measurements"]}
    assert list(rows) == ["fp", "rtn-4bit", "model-GPTQ", "model-AWQ"]
    assert 0 < rows["model-GPTQ"]["kl"] < rows["model-AWQ"]["kl"]
    assert rows["model-GPTQ"]["nbytes"] < rows["fp"]["nbytes"]
    assert [one["label"] for one in audit["plan"]["shipped"]] == ["model-GPTQ", "model-AWQ"]
    card = section(whole_at(place / "out"), "Shipped files")
    (_, gptq, awq) = table(card)
    assert gptq[:2] == ["`model-GPTQ`", "gptq, 4-bit"]
    assert gptq[-1] == "-"
    assert awq[-1].startswith(("rtn-4bit", "model-GPTQ"))
    first, second = audit["diagnostics"]["shipped"]
    assert [first["scheme"], first["dominated_by"]] == ["model-GPTQ", []]
    assert [second["scheme"], second["kl"]] == ["model-AWQ", rows["model-AWQ"]["kl"]]
    assert second["dominated_by"] == ["rtn-4bit"]  # indices of groups take bytes, too
    (finding,) = [one for one in audit["findings"] if one["rule"] == "QA042"]
    assert finding["scheme"] == "model-AWQ"
    assert {path.name for path in (place / "out" / "plots").glob("shipped*")} == {
        "shipped.svg", "shipped-dark.svg", "shipped.png"
    }  # fmt: skip
    again = scan(BASE, "--shipped", "model-GPTQ", "--shipped", "model-AWQ")
    assert again.code == 0
    assert audit_of(place / "out")["measurements"] == audit["measurements"]  # from disk


def test_weights_are_diagnosed_beside_shipped_files(place: Path, scan: Run) -> None:
    copy(place, "model-GPTQ")
    assert scan(BASE, "--shipped", "model-GPTQ", "--set", "diagnostics=weights").code == 0
    rows = audit_of(place / "out")["diagnostics"]["weights"]
    assert {name for row in rows for name in row["perturbation"]} == {"rtn-4bit"}


@pytest.mark.skipif(not INSTALLED, reason="qaudit-torchao is not installed")
def test_the_same_codes_diverge_alike_in_any_format(place: Path, qaudit: Run) -> None:
    copy(place, "model-GPTQ")
    copy(place, "model-torchao", "torchao")
    done = qaudit(*ALONE, "--shipped", "model-GPTQ", "--shipped", "model-torchao")
    assert done.code == 0, done.err
    rows = {row["scheme"]: row for row in audit_of(place / "out")["measurements"]}
    assert rows["model-torchao"]["kl"] == rows["model-GPTQ"]["kl"] > 0


ALONE = ("scan", *TEXT, "--out", "out", "--schemes", "none", BASE)


def test_a_changed_file_is_measured_again(place: Path, scan: Run) -> None:
    folder = copy(place, "model-GPTQ")
    assert scan(BASE, "--shipped", "model-GPTQ").code == 0
    before = audit_of(place / "out")["measurements"][-1]["kl"]
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["model.norm.weight"] *= 3
    safetensors.torch.save_file(tensors, path)
    assert scan(BASE, "--shipped", "model-GPTQ").code == 0
    assert audit_of(place / "out")["measurements"][-1]["kl"] > before


def test_a_file_that_breaks_while_it_is_read_is_skipped_by_name(place: Path, scan: Run) -> None:
    folder = copy(place, "model-GPTQ")
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    name = next(name for name in tensors if name.endswith(".scales"))
    tensors[name] = tensors[name] * 0
    safetensors.torch.save_file(tensors, path)
    done = scan(BASE, "--shipped", "model-GPTQ")
    assert done.code == 3, done.err
    audit = audit_of(place / "out")
    assert [row["scheme"] for row in audit["measurements"]] == ["fp", "rtn-4bit"]
    (skipped,) = audit["skipped"]
    assert skipped["scheme"] == "model-GPTQ"
    assert "scales of zero" in skipped["reason"]
    assert f"skipped {skipped['subject']} under model-GPTQ: " in done.err


def changed(folder: Path, suffix: str, change: Callable[[Tensor], Tensor | None]) -> None:
    """Change every tensor that ends so, or remove it."""
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    made = {n: change(t) if n.endswith(suffix) else t for n, t in tensors.items()}
    kept = {n: t.contiguous() for n, t in made.items() if t is not None}
    safetensors.torch.save_file(kept, path)


def renamed(folder: Path, old: str, new: str) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace(old, new))


def reordered(folder: Path) -> None:
    changed(folder, ".g_idx", lambda t: t.roll(32))
    renamed(folder, '"desc_act": false', '"desc_act": true')


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
def test_a_broken_file_is_named_with_what_was_seen(
    bits: int, breakage: Callable[[Path], None], sign: str, place: Path, qaudit: Run
) -> None:
    copy(place, "whole", bits=bits)
    breakage(copy(place, "broken", bits=bits))
    done = qaudit(*ALONE, "--shipped", "broken", "--shipped", "whole")
    assert done.code == 0, done.err
    audit = audit_of(place / "out")
    whole, broken = audit["diagnostics"]["shipped"]
    assert (whole["scheme"], whole["looks_broken"]) == ("whole", [])
    assert broken["dominated_by"] == ["whole"]
    (note,) = broken["looks_broken"]
    assert sign in note
    assert [f["scheme"] for f in audit["findings"] if f["rule"] == "QA043"] == ["broken"]
    shown = section(whole_at(place / "out"), "Shipped files")
    assert "looks broken" in shown
    assert re.search(r"\d+ of \d+ linears are far", shown)


@pytest.mark.slow
def test_parts_measure_shipped_files_of_folders(place: Path, qaudit: Run, scan: Run) -> None:
    copy(place, "model-GPTQ")
    asked = (*TEXT, "--schemes", "rtn-4bit", BASE, "--shipped", "model-GPTQ")
    assert qaudit("plan", *asked, "--out", "parts").code == 0
    assert qaudit("part", "parts", "--part", "0/1").code == 0
    assert qaudit("collect", "parts").code == 0
    assert scan(BASE, "--shipped", "model-GPTQ").code == 0
    same_audit(place / "out", place / "parts")


def test_a_base_may_be_quantized_itself(place: Path, qaudit: Run) -> None:
    copy(place, "model-GPTQ")
    done = qaudit("scan", *TEXT, "--out", "alone", "model-GPTQ", "--schemes", "none")
    assert done.code == 0, done.err
    audit = audit_of(place / "alone")
    (row,) = audit["measurements"]
    assert (row["subject"], row["scheme"]) == ("model-GPTQ", "model-GPTQ")
    assert row["kl"] is row["relative_error"] is row["absolute_change"] is None
    (note,) = row["notes"]
    assert note.startswith("audited without a reference: `model-GPTQ` is quantized already (gptq")
    assert note in whole_at(place / "alone")
    assert qaudit(*ALONE, "--shipped", "model-GPTQ").code == 0
    beside = audit_of(place / "out")["measurements"][-1]
    assert beside["ce"] == pytest.approx(row["ce"], rel=1e-6)  # the same text, in other batches
    assert beside["nbytes"] == row["nbytes"]
    again = qaudit("scan", *TEXT, "--out", "alone", "model-GPTQ", "--schemes", "none")
    assert audit_of(place / "alone")["measurements"] == [row], again.err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed-tensors"])
def test_parts_measure_a_base_that_is_quantized_itself(
    kind: str, place: Path, qaudit: Run, without_pictures: None
) -> None:
    copy(place, "model-Q", kind)
    asked = (*TEXT, "--schemes", "none", "model-Q")
    assert qaudit("plan", *asked, "--out", "parts").code == 0
    refused(qaudit("collect", "parts"), 3, "round 1 has 1 subject, and 1 is not measured", "part")
    assert qaudit("part", "parts", "--part", "0/1").code == 0
    assert qaudit("collect", "parts").code == 0
    assert qaudit("scan", *asked, "--out", "whole").code == 0
    same_audit(place / "whole", place / "parts")
    (row,) = audit_of(place / "parts")["measurements"]
    assert (row["subject"], row["scheme"], row["kl"]) == ("model-Q", "model-Q", None)


# ------------------------------------------------------------------------------- GGUF files


def gguf_copy(place: Path, name: str = "model-Q4_0.gguf", kind: str = "Q4_0") -> Path:
    write_gguf(place / BASE, place / name, lambda n: kind if n.endswith("_proj.weight") else "F32")
    return place / name


def test_a_gguf_file_is_measured_as_the_scheme_whose_bytes_it_has(place: Path, scan: Run) -> None:
    gguf_copy(place)
    done = scan(BASE, "--schemes", "gguf-q4_0", "--shipped", "model-Q4_0.gguf")
    assert done.code == 0, done.err
    audit = audit_of(place / "out")
    rows = {row["scheme"]: row for row in audit["measurements"]}
    own, file = rows["gguf-q4_0"], rows["model-Q4_0"]
    assert file["ce"] == own["ce"]
    assert file["kl"] == own["kl"]
    assert file["bits_per_weight"] == own["bits_per_weight"] == 4.5
    assert audit["plan"]["shipped"][0]["files"][0]["name"] == "model-Q4_0.gguf"


def test_a_gguf_file_is_judged_in_the_class_that_it_claims(place: Path, qaudit: Run) -> None:
    gguf_copy(place, "model-Q4_K_M.gguf", "Q5_0")  # as rows of small models fall back
    done = qaudit(*ALONE, "--shipped", "model-Q4_K_M.gguf")
    assert done.code == 0, done.err
    audit = audit_of(place / "out")
    (decision,) = audit["verdict"]["classes"]
    (row,) = (row for row in audit["measurements"] if row["scheme"] == "model-Q4_K_M")
    assert (decision["bit_class"], decision["status"]) == ("4", "undecided")
    assert row["bits_per_weight"] == 5.5
    step = audit["verdict"]["next_step"]["command"]
    assert "--shipped model-Q4_K_M.gguf" in step
    assert "--schemes none" in step
    assert "5.50" in done.out


def test_files_are_picked_gated_and_compared_as_schemes_are(place: Path, qaudit: Run) -> None:
    copy(place, "model-GPTQ", bits=8)
    copy(place, "model-3bit", bits=3)
    files = ("--shipped", "model-GPTQ", "--shipped", "model-3bit")
    assert qaudit(*ALONE, *files).code == 0
    picked = json.loads(qaudit("pick", "out", "--bits", "8", "--json", "-q").out)["pick"]
    assert (picked["subject"], picked["scheme"]) == ("step10", "model-GPTQ")
    policy = place / "own.yaml"
    rule = "rules:\n  - {name: a, metric: kl, margin: %s nats, subjects: '@all', bits: 3}\n"
    codes = []
    for margin in ("10", "0"):
        policy.write_text(f"minimum_documents: 10\n{rule % margin}")
        codes.append(qaudit("gate", "out", "--policy", "own.yaml", "-q").code)
    assert codes == [0, 1]
    other = ["other" if one == "out" else one for one in ALONE]
    changed(place / "model-3bit", "model.norm.weight", lambda t: t * 3)
    assert qaudit(*other, *files).code == 0
    done = qaudit("diff", "out", "other", "--format", "json")
    compared = {row["scheme"]: row for row in json.loads(done.out)["deltas"]}
    assert compared["model-GPTQ"]["loss"] == compared["model-GPTQ"]["kl"] == 0
    assert compared["model-3bit"]["kl"] > 0


# ------------------------------------------------------------------------------- refusals


def other_words(folder: str) -> None:
    """Let two words of a vocabulary change places."""
    path = Path(folder) / "tokenizer.json"
    table = json.loads(path.read_text())
    words = table["model"]["vocab"]
    first, second, *_ = words
    words[first], words[second] = words[second], words[first]
    path.unlink()
    path.write_text(json.dumps(table))


def with_key(key: str, value: object) -> Callable[[], object]:
    path = Path("model-GPTQ/config.json")
    return lambda: path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


def edited(change: Callable[[bytes], bytes]) -> Callable[[], object]:
    path = Path("model-Q4_0.gguf")
    return lambda: path.write_bytes(change(path.read_bytes()))


GPTQ, GGUF = f"{BASE} --shipped model-GPTQ", f"{BASE} --shipped model-Q4_0.gguf"
MADE_FROM = "the model that the file was made"


@pytest.mark.parametrize(
    ("edit", "words", "code", "sentence", "hint"),
    [
        (lambda: None, f"{BASE} --schemes none", 2, "no scheme is named", "rtn-4bit"),
        (with_key("vocab_size", 77), GPTQ, 2, "its `vocab_size` is 77", MADE_FROM),
        (with_key("num_hidden_layers", 99), GPTQ, 2, "`num_hidden_layers` is 99", MADE_FROM),
        (with_key("model_type", "qwen2"), GPTQ, 2, "its `model_type` is qwen2", MADE_FROM),
        (lambda: other_words("model-GPTQ"), GPTQ, 2, "has another vocabulary", "was made from"),
        (lambda: changed(Path("model-GPTQ"), ".scales", lambda t: None), GPTQ, 4,
         "has no `scales`", "download"),
        (lambda: None, f"{BASE} --shipped series/step200", 4, "no quantization config", "target"),
        (lambda: None, f"{BASE} --shipped nowhere", 2, "`nowhere` does not exist", "org/name"),
        (lambda: None, "series --shipped model-GPTQ", 2, "3 are measured", "--checkpoints"),
        (lambda: None, f"{BASE} --shipped model-Q5_0.gguf", 2, "does not exist", ".gguf"),
        (edited(lambda data: data[: len(data) // 2]), GGUF, 4, "cut short", "download the file"),
        (edited(lambda data: data.replace(b"general.architecture", b"general.architectura")), GGUF,
         4, "architecture ``", "olmo2"),
        (lambda: other_words(BASE), GGUF, 2, "another vocabulary", "was made from"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_beside_its_base_is_refused(
    place: Path, qaudit: Run, edit: Callable[[], object], words: str, code: int,
    sentence: str, hint: str,
) -> None:  # fmt: skip
    copy(place, "model-GPTQ")
    gguf_copy(place)
    edit()
    usual = TEXT if "--schemes" in words else QUICK[:-2]
    refused(qaudit("scan", *usual, "--out", "out", *words.split()), code, sentence, hint)
    assert not (place / "out" / "audit.json").exists()


def repacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Order codes as ggml does: behind the scale of 32 columns, column j beside column j + 16."""
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
    both = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate([scales[..., None], both], -1).reshape(*blocks.shape[:2], -1)


def write_gpt_oss(folder: Path, path: Path) -> None:
    config, tensors = read_configuration(folder), load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(path, "gpt-oss")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_sliding_window(config["sliding_window"])
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


def test_the_codes_of_a_release_are_those_of_its_gguf_file(place: Path, qaudit: Run) -> None:
    ships, _ = quantized_bases.write(place, "gpt-oss", place / BASE)
    write_gpt_oss(ships, place / "gpt-oss.gguf")
    options = ("--schemes", "none", "--shipped", "gpt-oss.gguf", "--out", "out")
    done = qaudit("scan", ships, *TEXT, *options)
    assert done.code == 0, done.err
    rows = {row["scheme"]: row for row in audit_of(place / "out")["measurements"]}
    assert rows["gpt-oss"]["ce"] == rows["fp"]["ce"]
    assert rows["gpt-oss"]["kl"] == pytest.approx(0, abs=1e-9)
    assert not any("broken" in note for note in rows["gpt-oss"]["notes"])


def test_a_gguf_file_of_a_wrapper_s_text_is_measured(place: Path, qaudit: Run) -> None:
    wrapper = released.save(place / "wrapper", "gemma3", **released.FOR_LLAMA_CPP)
    save_tokenizer(wrapper)
    text = released.text_of_wrapper(wrapper, place / "text")
    save_tokenizer(text)
    kind = "Q8_0"
    meant = write_gguf(text, place / "text.gguf", lambda n: kind if "_proj" in n else "F32")
    options = ("--set", "context=32", "--schemes", "none", "--out", "out")
    done = qaudit("scan", wrapper, "--shipped", "text.gguf", *TEXT, *options)
    assert done.code == 0, done.err
    rows = {row["scheme"]: row for row in audit_of(place / "out")["measurements"]}
    assert rows["fp"]["ce"] == pytest.approx(released.plain_loss(wrapper, "gemma3"), abs=1e-5)
    save_file(meant, text / "model.safetensors", metadata={"format": "pt"})
    assert rows["text"]["ce"] == pytest.approx(released.plain_loss(text, "gemma3_text"), abs=1e-5)
    assert rows["text"]["kl"] > 0 and rows["text"]["ce"] != rows["fp"]["ce"]


@pytest.mark.slow
def test_an_exported_file_is_measured_beside_its_wrapper(place: Path, qaudit: Run) -> None:
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
