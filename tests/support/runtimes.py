"""Exports in the programs that load them, of a tiny model and of one with 135M parameters."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.cli import TEXT, Run
from tests.support.gguf import write_gguf
from tests.support.models import save_model, save_tokenizer, write_documents

REAL = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "initializer_range": 0.03,  # a divergence in 4 bits as of trained models
}
"""The shape of a real model of 135M parameters, SmolLM's."""


def place_with(folder: Path, **shape: object) -> Path:
    """Write a model, its tokenizer and text; return the folder to work in."""
    save_tokenizer(save_model(folder / "model", 0, **shape))
    path = folder / "model" / "tokenizer_config.json"
    words = json.loads((path.parent / "tokenizer.json").read_text())["model"]["vocab"]
    # GPTQModel loads no model whose tokenizer has neither padding nor an end.
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": min(words)}))
    write_documents(folder / "calibration.jsonl", range(100, 104))
    write_documents(folder / "evaluation.jsonl", range(200, 212))
    return folder


def verified(qaudit: Run, form: str, scheme: str, dtype: str = "float32") -> dict:
    """Scan, export and verify in the folder at hand; return what `verify` says of the run."""
    options = (*TEXT, "--schemes", scheme, "--set", f"dtype={dtype}", "--out", "out", "-q")
    scanned = qaudit("scan", "model", *options)
    assert scanned.code == 0, scanned.err
    named = ("--subject", "model", "--scheme", scheme)  # 12 documents are too few to ship it
    if form == "gguf":
        write_gguf(Path("model"), Path("template.gguf"))
        named += ("--converter", "template.gguf")
    made = qaudit("export", "out", *named, "--format", form, "--out", "new", "-q")
    assert made.code == 0, made.err
    done = qaudit("verify", "new", "--audit", "out", "--json")
    assert "{" in done.out, done.err
    answer = json.loads(done.out[done.out.index("{") :])
    assert answer["verified"], done.out
    return answer["run"]
