"""Families of ours, once through the command from the Hub, with the tensors of their releases.

What is stored is as it was published: shards, pickles, dtypes, heads that are stored although they
are tied, masks that old checkpoints keep. `open-sci` and `crystal` are code of their repositories.
"""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import released, tiny
from tests.support.cards import whole_at
from tests.support.cli import OUT, QUICK, audit_of
from tests.support.models import VOCABULARY, save_tokenizer


def release_of(repo, model_type, rates, **stored):
    """Return a repository, learning rates of its revisions, and how its weights are stored."""
    usual = {"shards": False, "dtype": torch.bfloat16, "pickled": False, "changes": {}}
    return SimpleNamespace(repo=repo, model_type=model_type, rates=rates, **usual | stored)


TIED, CLIPPED = {"tie_word_embeddings": True}, {"clip_qkv": 8.0}
FP32, FP16 = torch.float32, torch.float16
RELEASES = {
    "apertus-8b": release_of("swiss-ai/Apertus-8B-2509", "apertus",
        {"step50000-tokens210B": 0.00011, "step2627139-tokens15T": 1.10001e-05}, shards=True),
    "olmoe": release_of("allenai/OLMoE-1B-7B-0125", "olmoe",
        {"step1200000-tokens5033B": 4e-05, "stage2-ingredient1-step10000-tokens41B": 2.32229e-05},
        shards=True),
    "pythia": release_of("EleutherAI/pythia-160m", "gpt_neox",
        {"step512": 0.0002148252, "step143000": 6e-05}, dtype=FP16),
    "olmo-hybrid": release_of("allenai/Olmo-Hybrid-7B", "olmo_hybrid",
        {"stage1-step100000": 0.000296804, "stage3-step1000": 0.000200115}, shards=True),
    "olmo-1b-0724": release_of("allenai/OLMo-1B-0724-hf", "olmo",
        {"step1000-tokens2B": None, "step1454000-tokens3048B": None},
        shards=True, dtype=FP32, changes=TIED | CLIPPED),
    "olmo-7b": release_of("allenai/OLMo-7B-hf", "olmo",
        {"step452000-tokens2000B": 3.00678e-05, "main": 0.0}, shards=True, dtype=FP32),
    "smollm3": release_of("HuggingFaceTB/SmolLM3-3B-checkpoints", "smollm3",
        {"stage3-step-4480000": 9.195441e-05, "lc-4k-to-32k-step-4000": 1.879474e-05},
        shards=True, changes=TIED),
    "amber": release_of("LLM360/Amber", "llama",
        {"ckpt_100": 0.0002525878, "ckpt_358": 3.000522e-05}, dtype=FP32, pickled=True),
}  # fmt: skip
FAST = ("apertus-8b", "olmoe", "pythia")
EACH = [f if f in FAST else pytest.param(f, marks=pytest.mark.slow) for f in RELEASES]


def write(folder, release, seed, tokenizer):
    """Save a tiny model as the release's checkpoints are stored."""
    kind, changes = release.model_type, {**release.changes, "vocab_size": VOCABULARY}
    if kind in released.RELEASED:
        released.save(folder, kind, seed, **release.changes)
    else:
        tiny.make(folder, kind, **changes)
    tensors = {n: t.to(release.dtype) for n, t in load_file(folder / "model.safetensors").items()}
    if kind == "gpt_neox":  # which transformers stored until 4.26
        for block in range(3):
            at = f"gpt_neox.layers.{block}.attention"
            tensors[f"{at}.bias"] = torch.ones(1, 1, 128, 128).tril().to(torch.uint8)
            tensors[f"{at}.masked_bias"] = torch.tensor(-1e9)
            tensors[f"{at}.rotary_emb.inv_freq"] = torch.ones(2)
    if "OLMo-1B-0724" in release.repo:  # stored although it is tied
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    parts = halves if release.shards or release.pickled else (names,)
    stem, ending = ("pytorch_model", "bin") if release.pickled else ("model", "safetensors")
    placed = {}
    for number, part in enumerate(parts, 1):
        several = f"{stem}-{number:05}-of-{len(parts):05}.{ending}"
        file = several if len(parts) > 1 else f"{stem}.{ending}"
        chosen = {name: tensors[name] for name in part}
        if release.pickled:
            torch.save(chosen, folder / file)
        else:
            save_file(chosen, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(part, file)
    if len(parts) > 1:
        index = json.dumps({"metadata": {}, "weight_map": placed})
        (folder / f"{stem}.{ending}.index.json").write_text(index)
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, folder)


@pytest.mark.parametrize("family", EACH)
def test_a_family_is_audited_along_its_schedule(family, place, qaudit, online, serve_root):
    release, root = RELEASES[family], online / "root"
    for seed, revision in enumerate(release.rates):
        write(root / release.repo / revision, release, seed, place / "series/step10")
    serve_root()
    targets = [f"{release.repo}@{revision}" for revision in release.rates]
    options = ["--set", "context=32", *(["--allow-pickle"] if release.pickled else [])]
    qaudit("scan", *targets, *QUICK, *options, code=0)
    audit = audit_of()
    label = audit["subjects"][0]["label"]
    first = [row for row in audit["measurements"] if row["subject"] == label]
    cells = [(row["scheme"], row["kl"] is None) for row in first]
    assert cells == [("fp", True), ("rtn-4bit", False)]
    plain = released.plain_loss(root / release.repo / next(iter(release.rates)), release.model_type)
    assert first[0]["ce"] == pytest.approx(plain, abs=1e-5)
    for subject, rate in zip(audit["subjects"], release.rates.values(), strict=True):
        assert subject["learning_rate"] == (rate and pytest.approx(rate, rel=1e-3, abs=1e-9))


SCHEMES = "rtn-4bit:group=32,gptq-4bit:group=32"
SLOW = ["apertus", "falcon_h1", "gpt_oss", "mixtral", "olmo_hybrid", "qwen2_moe", "qwen3_moe"]
LAYOUTS = ["gemma3", "olmoe", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.mark.parametrize("family", LAYOUTS)
def test_a_release_is_audited_from_the_hub_and_exported(family, place, qaudit, online, serve_root):
    folder = released.save(online / "root" / "org" / "model" / "main", family)
    save_tokenizer(folder)
    serve_root()
    qaudit("scan", "org/model", *QUICK, "--set", "context=32", "--schemes", SCHEMES, code=0)
    rows = audit_of()["measurements"]
    full, rtn, gptq = (next(r for r in rows if r["scheme"].startswith(s)) for s in ("fp", "r", "g"))
    assert full["ce"] == pytest.approx(released.plain_loss(folder, family), abs=1e-5)
    assert math.isfinite(rtn["ce"]) and math.isfinite(gptq["ce"]) and rtn["ce"] != full["ce"]
    card = whole_at(OUT)
    if family == "gemma3":
        assert "text never enters them" in card
    if family in ("olmoe", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"):
        assert "routers and small gates" in card
        assert 0 < gptq["routing_agreement"] <= 1 and full["routing_agreement"] is None
        assert 0 < gptq["routing_moved"] < 1 and "<summary>Routing</summary>" in card
    if family in ("gpt_oss", "gemma3"):
        return
    named = ("--subject", "model", "--scheme", "gptq-4bit:group=32", "--out", "exported")
    qaudit("export", "out", *named, code=0)


def test_what_cannot_be_opened_is_refused_before_weights_come(qaudit, place, online, serve_root):
    save_tokenizer(released.save(online / "root" / "org" / "model" / "main", "jetmoe"))
    serve_root()
    done = qaudit("series", "org/model", "--check", code=0)
    assert "cannot be audited: 93% of block 0" in done.out
    done = qaudit("plan", "org/model", *QUICK[:-2])
    assert done.code != 0 and "would not be quantized" in done.err
    assert not list(online.glob("hf/**/*.safetensors"))
