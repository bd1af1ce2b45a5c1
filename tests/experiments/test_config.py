"""The configuration of a training run, shapes of models, and both from the command line."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from transformers import GPTNeoXForCausalLM, LlamaForCausalLM, Olmo2ForCausalLM

from experiments.config import SCHEDULES, Config, read_config, run_of
from experiments.folder import write_record
from experiments.run import spell
from experiments.shapes import KINDS, PRESETS, ModelShape, preset
from experiments.train import train as train_run
from qaudit.core.schedules import Linear, WarmupStableDecay
from qaudit.errors import UsageError
from tests.support.cli import refused
from tests.support.models import write_documents
from tests.support.training import HELD, equal


def run(*settings, file=None, device="cpu"):
    path = None if file is None else Path("mine.yaml")
    if path is not None:
        path.write_text(file or "", encoding="utf-8")
    return run_of(*read_config(path, ("steps=1000", *settings)), device)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_what_is_not_set_follows_from_steps_and_device():
    found = run()
    assert found.schedule == WarmupStableDecay(
        peak=3e-3, warmup=10, decay_start=800, decay_length=200
    )
    assert (found.name, found.save_at) == ("wsd", tuple(range(100, 1001, 100)))
    half = run(
        "schedule={kind: wsd, peak: 1.0e-2, warmup: 0, shape: sqrt}", "schedule.decay_share=0.5"
    )
    assert half.schedule == WarmupStableDecay(
        peak=1e-2, decay_start=500, decay_length=500, shape="sqrt"
    )
    for kind in SCHEDULES:
        more = ["schedule.period=100"] if kind in ("sgdr", "oli") else []
        schedule = run(f"schedule.kind={kind}", *more).schedule
        assert spell(schedule)["kind"] == kind
        assert 0 <= schedule.at(1000) <= schedule.peak == 3e-3
    own = run("model.layers=2", "batch=8", file="batch: 16\nmodel: {preset: llama-1m}\n")
    assert (own.shape.kind, own.shape.layers, own.batch) == ("llama", 2, 8)
    assert run("save_at=[700, 50]").save_at == (50, 700, 1000)
    assert run("save_every=400").save_at == (400, 800, 1000)
    assert found.accumulation == 4  # 32 windows of 256 tokens, 8 at a time
    assert run("model.context=4096").accumulation == 32
    assert run("accumulation=2").accumulation == 2
    assert found.attention == "eager"  # whole matrices, while they are small
    assert run("model.context=1024").attention == run("attention=sdpa").attention == "sdpa"
    there = run(device="cuda")
    assert (there.accumulation, there.attention) == (1, "sdpa")


def test_a_fork_is_trained_like_its_parent_from_the_rate_where_it_left():
    parent = replace(HELD, weight_decay=0.3, batch=6)
    write_record(Path(), parent, "t", {})
    found = run("schedule=cosine", "steps=50", "fork=stage1-step1")
    assert (found.parent, found.fork_at) == (parent, 1)
    assert (found.shape, found.batch, found.weight_decay) == (parent.shape, 6, 0.3)
    assert found.schedule.peak == parent.schedule.at(1) == 5e-3  # half way up its warm-up
    assert found.schedule.warmup == 0
    other = run("fork=stage1-step20", "batch=2", "seed=5")
    assert (other.batch, other.seed) == (2, 5)
    write_record(Path(), replace(HELD, schedule=Linear(peak=2e-3, end=20)), "t", {})
    assert run("fork=stage1-step20").schedule.peak == 2e-3  # it had decayed to zero


def test_a_wrong_setting_is_refused_by_its_name_or_its_line():
    for settings, words, hint in (
        (["schedule=cosin"], "`--set schedule=cosin`: there is no schedule `cosin`", "`cosine`?"),
        (["schedule.period=5"], "schedule `wsd` has no ['period']", "fix it"),
        (["schedule=sgdr"], "needs ['period']", ""),
        (["schedule=cosine", "schedule.decay_share=0.1"], "only tables have keys", ""),
        (["schedule={kind: cosine, decay_share: 0.1}"], "has no ['decay_share']", ""),
        (["schedule.decay_share=1.5"], "`decay_share` is 1.5", "fix it"),
        (["schedule.warmup=1000"], "`warmup` is 1000 of 1000 steps", ""),
        (["schedule.shape=round"], "unknown decay shape `round`", ""),
        (["save_at=[5]", "save_every=5"], "`--set save_every=5`: `save_at` and", "leave one out"),
        (["model.preset=olmo"], "there is no model `olmo`", "`olmo2-"),
        (["model.layerz=2"], "there is no key `model.layerz`", "did you mean `layers`?"),
        (["btch=2"], "`--set btch=2`: there is no key `btch`", "did you mean `batch`?"),
        (["clip=0"], "`clip` is `0`", "greater than 0"),
        (["lawa=5"], "`lawa` is `5`", "a list"),
        (["model.layers=two"], "`model.layers` is `two`", "a whole number"),
        (["betas=[0.9, 0.95, 1]"], "`betas`", ""),
        (["batch"], "`--set batch` sets nothing", "model.layers=2"),
        (["model={"], "`--set model={`: did not find", "as YAML"),
        (["fork=none/at-all"], "which names no checkpoint of a run", "step500"),
        (["fork=none/run-step5"], "there is no run `run` in `none`", "train one"),
    ):
        with pytest.raises(UsageError) as refusal:
            run(*settings)
        assert words in refusal.value.message + (refusal.value.hint if "keys" in words else "")
        assert hint in refusal.value.hint
    for text, words in (
        ("batch: 4\nseeed: 3\n", "line 2: .*there is no key `seeed`"),
        ("batch: 4\nmodel:\n  preset: llama-1m\n  heads: 3\n", "line 2: .*`hidden` is 128"),
        ("batch: 4\nmodel:\n  layers: 0\n", "line 3: .*`model.layers` is `0`"),
        ("schedule:\n  kind: cosin\n", "line 2: .*there is no schedule `cosin`"),
        ("steps: 4\nsteps: 5\n", "line 2: .*`steps` is there twice"),
        ("- 3\n", "is not a training configuration"),
    ):
        with pytest.raises(UsageError, match=f"`mine.yaml`.*{words}"):
            run(file=text)


PAGE = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text(encoding="utf-8")


def test_the_page_lists_every_key_and_presets_have_their_sizes():
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)
    assert run(file=text).schedule.at(1000) >= 0
    listed = re.findall(r"^\| (`.*?) \|", PAGE, re.M)
    keys = {key for cell in listed for key in re.findall(r"`(\w+)`", cell)}
    assert {field.name for field in fields(Config)} <= keys
    for name, shape in PRESETS.items():
        said = float(name.rpartition("-")[2].removesuffix("m")) * 1e6
        assert shape.parameters() == pytest.approx(said, rel=0.13)
        assert shape.hidden % 128 == shape.ffn % 128 == 0
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    a, b = HELD.shape.build(1).state_dict(), HELD.shape.build(1).state_dict()
    assert equal(a, b)
    assert not equal(a, HELD.shape.build(2).state_dict())
    assert torch.equal(torch.random.get_rng_state(), before)


# --------------------------------------------------------------------- shapes of models


MODELS = {"olmo2": Olmo2ForCausalLM, "llama": LlamaForCausalLM, "neox": GPTNeoXForCausalLM}


@pytest.mark.parametrize(("kind", "tied"), [*zip(KINDS, (True, False, True), strict=True)])
def test_every_kind_trains_and_loads_as_what_it_is(tmp_path, text, kind, tied):
    shape = ModelShape(
        kind=kind, hidden=16, ffn=32, layers=2, heads=2, kv_heads=2, vocabulary=64, context=8,
        tied=tied,
    )  # fmt: skip
    run = replace(HELD, shape=shape, steps=2, save_at=(1, 2))
    train_run(run, text, tmp_path)
    first, second = (MODELS[kind].from_pretrained(tmp_path / run.label(n)) for n in (1, 2))
    assert first.config.tie_word_embeddings is tied
    assert sum(p.numel() for p in second.parameters()) == shape.parameters()
    assert not equal(first.state_dict(), second.state_dict())
    read, write = second.get_input_embeddings(), second.get_output_embeddings()
    assert torch.equal(read.weight, write.weight) is tied


def test_a_shape_that_cannot_be_is_refused_with_what_is_allowed():
    for changed, words in (
        ({"hidden": 0}, "greater than or equal to 2"),
        ({"hidden": 130}, "`hidden` is 130; it must be a multiple of twice the 4 heads"),
        ({"kv_heads": 3}, "`kv_heads` is 3; it must divide the 4 heads"),
        ({"kind": "bert"}, "'olmo2', 'llama' or 'neox'"),
        ({"kind": "neox", "kv_heads": 2}, "neox has one for each of its 4 heads"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            replace(PRESETS["olmo2-1m"], **changed)
    with pytest.raises(ValueError, match=r"there is no model `lama-1m`; did you mean `llama-1m`?"):
        preset("lama-1m")


# ------------------------------------------------------------------ `python -m experiments train`


CONFIG = """
model: {hidden: 16, ffn: 32, layers: 1, heads: 2, kv_heads: 1, vocabulary: 300, context: 16}
batch: 4
text: text.jsonl
"""


@pytest.fixture
def train(tmp_path, monkeypatch, experiments):
    """Return a function that trains a small model with `--set` of its arguments."""
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
    assert (done.code, done.out.strip()) == (0, "out"), done.err
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
    assert train("steps=4", "threads=1", out="one").code == 0
    record = json.loads((tmp_path / "one/states/wsd.json").read_text(encoding="utf-8"))
    assert record["environment"]["threads"] == 1
    fork = ("steps=4", "text=text.jsonl", "fork=one/wsd-step4", "schedule=linear")
    for _ in range(2):
        done = train(*fork, out="two", config=None)
        assert done.code == 0, done.err
    a, b = (tmp_path / name / "text/tokens.bin" for name in ("one", "two"))
    assert a.read_bytes() == b.read_bytes()


def test_bad_input_is_refused_and_an_interruption_says_how_to_resume(train, monkeypatch):
    for settings, how, sentence, hint in (
        (["model={}", "tokenizer=none"], {}, "no `tokenizer.json` in `none`", "give the folder"),
        (["text=nowhere.txt"], {}, "there is no text file", ""),
        ([], {"options": ("--device", "tpu")}, "there is no device `tpu`", "auto, cpu"),
        ([], {"config": "none.yaml"}, "`none.yaml` cannot be read", "write it as YAML"),
    ):
        refused(train(*settings, **how), 2, sentence, hint)

    def stop(*args, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.train.advance", stop)
    refused(train("steps=4"), 130, "run `wsd` was interrupted", "the same command again")
