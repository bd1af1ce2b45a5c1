"""Exports in the programs that load them, of a tiny model and of one with 135M parameters."""

import json
from pathlib import Path

from tests.support.cli import TEXT
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


def place_with(folder, **shape):
    """Write a model, its tokenizer and text; return the folder to work in."""
    save_tokenizer(save_model(folder / "model", 0, **shape))
    path = folder / "model" / "tokenizer_config.json"
    words = json.loads((path.parent / "tokenizer.json").read_text())["model"]["vocab"]
    # GPTQModel loads no model whose tokenizer has neither padding nor an end.
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": min(words)}))
    write_documents(folder / "calibration.jsonl", range(100, 104))
    write_documents(folder / "evaluation.jsonl", range(200, 212))
    return folder


def snippet_of_export(qaudit, form, scheme):
    """Export `model` as `new` in the folder at hand; return the code that its card loads it by."""
    named = ("--scheme", scheme, "--format", form, "--out", "new", "-q")
    if form == "gguf":
        from tests.support.gguf import write_gguf  # which other runtimes' environments lack

        words = json.loads(Path("model/tokenizer.json").read_text())["model"]
        tokenizer = {
            "model": "gpt2",
            "pre": "default",
            "tokens": [*sorted(words["vocab"], key=words["vocab"].__getitem__), "<more>"],
            "token_type": [1] * len(words["vocab"]) + [3],
            "merges": [" ".join(pair) for pair in words["merges"]],
            "eos_token_id": len(words["vocab"]),
        }
        metadata = {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
        write_gguf(Path("model"), Path("template.gguf"), metadata=metadata)
        named += ("--converter", "template.gguf")
    done = qaudit("export", "model", *TEXT, *named)
    assert done.code == 0, done.err
    _, _, code = Path("new/README.md").read_text().partition("```")
    return code.partition("\n")[2].partition("```")[0]


def verified(qaudit, form, scheme, dtype="float32"):
    """Scan, export and verify in the folder at hand; return what `verify` says of the run."""
    options = (*TEXT, "--schemes", scheme, "--set", f"dtype={dtype}", "--out", "out", "-q")
    scanned = qaudit("scan", "model", *options)
    assert scanned.code == 0, scanned.err
    named = ("--subject", "model", "--scheme", scheme)  # 12 documents are too few to ship it
    if form == "gguf":
        from tests.support.gguf import write_gguf  # which other runtimes' environments lack

        write_gguf(Path("model"), Path("template.gguf"))
        named += ("--converter", "template.gguf")
    made = qaudit("export", "out", *named, "--format", form, "--out", "new", "-q")
    assert made.code == 0, made.err
    done = qaudit("verify", "new", "--audit", "out", "--json")
    assert "{" in done.out, done.err
    answer = json.loads(done.out[done.out.index("{") :])
    assert answer["verified"], done.out
    return answer["run"]
