"""Exported GPTQ and AWQ files in GPTQModel: the weights that were measured, and their losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli import TEXT, Run
from tests.support.models import save_model, save_tokenizer, write_documents

pytestmark = pytest.mark.peers


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_tokenizer(save_model(tmp_path / "model", 0))
    path = tmp_path / "model" / "tokenizer_config.json"
    words = json.loads((path.parent / "tokenizer.json").read_text())["model"]["vocab"]
    # GPTQModel loads no model whose tokenizer has neither padding nor an end.
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": min(words)}))
    write_documents(tmp_path / "calibration.jsonl", range(100, 104))
    write_documents(tmp_path / "evaluation.jsonl", range(200, 212))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("form", "scheme"),
    [
        ("gptq", "rtn-4bit:group=32"),
        ("gptq", "rtn-3bit:group=32"),
        ("gptq", "rtn-8bit:group=32"),
        ("gptq", "rtn-4bit:group=32:sym=false"),
        ("gptq", "gptq-mix:budget=3.9:group=32:members=348"),
        ("awq", "rtn-4bit:group=32:sym=false"),
    ],
)
def test_files_run_as_audited(qaudit: Run, place: Path, form: str, scheme: str) -> None:
    options = (*TEXT, "--schemes", scheme, "--set", "dtype=bfloat16", "--out", "out", "-q")
    assert qaudit("scan", "model", *options).code == 0
    named = ("--subject", "model", "--scheme", scheme)  # 12 documents are too few to ship it
    assert qaudit("export", "out", *named, "--format", form, "--out", "new", "-q").code == 0
    done = qaudit("verify", "new", "--audit", "out", "--json")
    assert "{" in done.out, done.err
    answer = json.loads(done.out[done.out.index("{") :])
    assert answer["verified"], done.out
    assert answer["run"]["runtime"].startswith("gptqmodel 7.")
    # The same products in bfloat16, of the same weights, in batches of another shape.
    assert abs(answer["run"]["difference"]) < 5e-4
    assert answer["run"]["kl_running"] == pytest.approx(answer["run"]["kl_audited"], rel=0.1)
