"""A GGUF file of a wrapper's text, beside the wrapper."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.support import released
from tests.support.cli import TEXT, Run, audit_of
from tests.support.gguf import write_gguf
from tests.support.models import save_tokenizer


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
