"""Releases with experts, towers and joined tensors, from the Hub to the card and an export."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.support import released
from tests.support.cards import whole_at
from tests.support.cli import QUICK, Run, audit_of
from tests.support.hub import Serve
from tests.support.models import save_tokenizer

SCHEMES = "rtn-4bit:group=32,gptq-4bit:group=32"
SLOW = ["apertus", "falcon_h1", "gpt_oss", "mixtral", "olmo_hybrid", "qwen2_moe", "qwen3_moe"]
FAMILIES = ["gemma3", "olmoe", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


def serve_model(root: Path, family: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = released.save(root / "root" / "org" / "model" / "main", family)
    save_tokenizer(folder)
    hub = serve(root / "root")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_CACHE", str(root / "cache"))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_release_is_audited_from_the_hub(
    family: str,
    place: Path,
    qaudit: Run,
    serve: Serve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = serve_model(tmp_path, family, serve, monkeypatch)
    done = qaudit("scan", "org/model", *QUICK, "--set", "context=32", "--schemes", SCHEMES)
    assert done.code == 0, done.err
    rows: Any = audit_of(place / "out")["measurements"]
    full, rtn, gptq = (next(r for r in rows if r["scheme"].startswith(s)) for s in ("fp", "r", "g"))
    assert full["ce"] == pytest.approx(released.plain_loss(folder, family), abs=1e-5)
    assert math.isfinite(rtn["ce"]) and math.isfinite(gptq["ce"]) and rtn["ce"] != full["ce"]
    card = whole_at(place / "out")
    if family == "gemma3":
        assert "text never enters them" in card
    if family in ("olmoe", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"):
        assert "routers and small gates" in card
        assert 0 < gptq["routing_agreement"] <= 1 and full["routing_agreement"] is None
        assert 0 < gptq["routing_moved"] < 1 and "<summary>Routing</summary>" in card
    if family in ("gpt_oss", "gemma3"):
        return
    named = ("--subject", "model", "--scheme", "gptq-4bit:group=32", "--out", "exported")
    done = qaudit("export", "out", *named)
    assert done.code == 0, done.err


def test_a_model_that_cannot_be_opened_is_refused_before_its_weights_come(
    place: Path, qaudit: Run, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "root" / "org" / "model" / "main"
    released.save(folder, "jetmoe")
    save_tokenizer(folder)
    hub = serve(tmp_path / "root")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    done = qaudit("series", "org/model", "--check")
    assert done.code == 0 and "cannot be audited: 93% of block 0" in done.out
    done = qaudit("plan", "org/model", *QUICK[:-2])
    assert done.code != 0 and "would not be quantized" in done.err
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
