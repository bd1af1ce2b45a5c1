"""Exports of experts and of text in wrappers: each linear under the name that runtimes load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support import released
from tests.support.cli import TEXT, Run, audit_of, refused
from tests.support.hub import Serve
from tests.support.models import save_tokenizer

SCHEME = "gptq-4bit:group=32"
MIX = "gptq-mix:budget=4.25:group=32"
SLOW = [
    pytest.param(family, SCHEME, marks=pytest.mark.slow)
    for family in ("mixtral", "olmoe", "qwen3_moe")
]


def save(place: Path, family: str) -> Path:
    folder = released.save(place / "model", family)
    save_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "scheme"), [("gemma3", SCHEME), ("llama4_text", SCHEME), ("olmoe", MIX), *SLOW]
)
def test_transformers_runs_what_was_audited(
    family: str, scheme: str, place: Path, qaudit: Run
) -> None:
    folder = save(place, family)
    (folder / "preprocessor_config.json").write_text('{"size": 28}')
    options = f"--set context=32 --schemes {scheme} --set dtype=bfloat16 --out out -q".split()
    assert qaudit("scan", "model", *TEXT, *options).code == 0
    if scheme == MIX:  # all experts of a layer share a row
        (row,) = (r for r in audit_of(place / "out")["measurements"] if r["scheme"] == MIX)
        experts = {f"mlp.experts.*.{part}_proj" for part in ("gate", "up", "down")}
        assert {name for name in row["mixture"] if "experts" in name} == experts
        assert 4 < row["bits_per_weight"] <= 4.25
        assert row["notes"][0].startswith("bits differ by linear: of ")
        assert MIX in (place / "out" / "card.md").read_text()
    named = ("--subject", "model", "--scheme", scheme, "--out", "new", "-q")
    done = qaudit("export", "out", *named)
    assert done.code == 0, done.err
    tensors = load_file(place / "new" / "model.safetensors")
    assert (place / "new" / "preprocessor_config.json").read_text() == '{"size": 28}'
    if family == "llama4_text":  # stored as one tensor for all experts
        assert "model.layers.1.feed_forward.experts.7.up_proj.weight_packed" in tensors
    done = qaudit("verify", "new", "--audit", "out", "--json", "-q")
    answer = json.loads(done.out[done.out.index("{") :])
    assert answer["verified"], done.out
    assert answer["run"]["ce_running"] == pytest.approx(answer["run"]["ce_audited"], abs=1e-7)


def test_experts_that_no_runtime_names_are_refused_before_they_are_downloaded(
    place: Path, qaudit: Run, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(place, "gpt_oss")
    shutil.copytree(folder, tmp_path / "root" / "org" / "model" / "main")
    hub = serve(tmp_path / "root")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    done = qaudit(
        "export", "org/model", *TEXT, "--set", "context=32", "--scheme", SCHEME, "--out", "new"
    )
    refused(done, 4, "no runtime has names for the quantized linears", "the scan's numbers stand")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_experts_are_refused_in_a_format_whose_runtimes_load_none(place: Path, qaudit: Run) -> None:
    save(place, "olmoe")
    options = "--set context=32 --scheme bnb-nf4:blocksize=32 --format bnb --out new"
    done = qaudit("export", "model", *TEXT, *options.split())
    refused(done, 2, "loads quantized experts from `bnb` files", "`compressed-tensors` or `gptq`")
