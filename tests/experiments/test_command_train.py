"""`python -m experiments train` from the command line: a run, its fork, and what is refused."""

import json

import pytest

from tests.support.cli import refused
from tests.support.models import write_documents

CONFIG = """
model: {hidden: 16, ffn: 32, layers: 1, heads: 2, kv_heads: 1, vocabulary: 300, context: 16}
batch: 4
text: text.jsonl
"""


@pytest.fixture
def train(tmp_path, monkeypatch, experiments):
    """Return a function that trains a small model with `--set` of its arguments."""
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path / "text.jsonl", range(40))
    (tmp_path / "small.yaml").write_text(CONFIG, encoding="utf-8")

    def run(*settings, out="out", config="small.yaml", options=()):
        given = [part for setting in settings for part in ("--set", setting)]
        files = [config] if config else []
        return experiments("train", *files, "--out", out, *given, *options)

    return run


def test_a_run_and_its_fork_are_a_series_with_learning_rates(train, qaudit):
    done = train(
        "steps=20", "save_every=10", "schedule=constant", "lawa=[2, 5]", "keep_states=[10]"
    )
    assert done.code == 0, done.err
    assert done.out.strip() == "out"
    assert "held out" in done.err
    assert "constant-step10: loss" in done.err
    done = train(
        "fork=out/constant-step10", "schedule=linear", "steps=10", "save_at=[5, 10]",
        "text=text.jsonl", config=None,
    )  # fmt: skip
    assert done.code == 0, done.err
    series = json.loads(qaudit("series", "out", "--json").out)["checkpoints"]
    rates = {c["label"]: c["learning_rate"] for c in series}
    assert rates["constant-lawa-step20"] == 3e-3
    assert (rates["linear-step5"], rates["linear-step10"]) == (pytest.approx(1.5e-3), 0)


def test_a_fork_into_another_folder_uses_its_parents_tokens(train, tmp_path):
    assert train("steps=4", out="one").code == 0
    fork = ("steps=4", "text=text.jsonl", "fork=one/wsd-step4", "schedule=linear")
    done = train(*fork, out="two", config=None)
    assert done.code == 0, done.err
    a, b = (tmp_path / name / "text/tokens.bin" for name in ("one", "two"))
    assert a.read_bytes() == b.read_bytes()
    assert train(*fork, out="two", config=None).code == 0


def test_a_run_is_trained_with_as_many_threads_as_configured(train, tmp_path):
    assert train("steps=2", "threads=1").code == 0
    record = json.loads((tmp_path / "out/states/wsd.json").read_text(encoding="utf-8"))
    assert record["environment"]["threads"] == 1


@pytest.mark.parametrize(
    ("settings", "how", "sentence", "hint"),
    [
        (["model.layer=2"], {}, "there is no key `model.layer`", "did you mean `layers`?"),
        (["model={}", "tokenizer=none"], {}, "no `tokenizer.json` in `none`", "give the folder"),
        (["text=nowhere.txt"], {}, "there is no text file", ""),
        ([], {"options": ("--device", "tpu")}, "there is no device `tpu`", "auto, cpu"),
        ([], {"config": "none.yaml"}, "`none.yaml` cannot be read", "write it as YAML"),
    ],
)
def test_bad_input_is_refused_in_words(train, settings, how, sentence, hint):
    refused(train(*settings, **how), 2, sentence, hint)


def test_an_interruption_says_how_to_resume(train, monkeypatch):
    def stop(*args, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.train.advance", stop)
    refused(train("steps=4"), 130, "run `wsd` was interrupted", "the same command again")
