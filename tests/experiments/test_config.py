"""The configuration of a training run: defaults, forks, `--set`, and what is refused where."""

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from experiments.config import SCHEDULES, Config, read_config, run_of
from experiments.folder import write_record
from experiments.run import TrainingRun, spell
from qaudit.core.schedules import Linear, WarmupStableDecay
from qaudit.errors import UsageError
from tests.support.training import HELD


def run(*settings: str, file: str | None = None, device: str = "cpu") -> TrainingRun:
    path = None if file is None else Path("mine.yaml")
    if path is not None:
        path.write_text(file or "", encoding="utf-8")
    return run_of(*read_config(path, ("steps=1000", *settings)), device)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_decays_over_its_last_fifth_by_default() -> None:
    found = run()
    assert found.schedule == WarmupStableDecay(
        peak=3e-3, warmup=10, decay_start=800, decay_length=200
    )
    assert found.name == "wsd"
    assert found.save_at == tuple(range(100, 1001, 100))
    half = run(
        "schedule={kind: wsd, peak: 1.0e-2, warmup: 0, shape: sqrt}", "schedule.decay_share=0.5"
    )
    assert half.schedule == WarmupStableDecay(
        peak=1e-2, decay_start=500, decay_length=500, shape="sqrt"
    )


def test_a_file_and_settings_over_it_give_the_run() -> None:
    found = run("model.layers=2", "batch=8", file="batch: 16\nmodel: {preset: llama-1m}\n")
    assert (found.shape.kind, found.shape.layers, found.batch) == ("llama", 2, 8)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_can_be_configured(kind: str) -> None:
    more = ["schedule.period=100"] if kind in ("sgdr", "oli") else []
    found = run(f"schedule.kind={kind}", *more)
    assert spell(found.schedule)["kind"] == kind
    assert 0 <= found.schedule.at(1000) <= found.schedule.peak == 3e-3


def test_saved_steps_are_those_given_and_the_last() -> None:
    assert run("save_at=[700, 50]").save_at == (50, 700, 1000)
    assert run("save_every=400").save_at == (400, 800, 1000)


def test_a_batch_is_computed_in_parts_that_fit_the_device() -> None:
    assert run().accumulation == 4  # 32 windows of 256 tokens, 8 at a time
    assert run("model.context=4096").accumulation == 32
    assert run(device="cuda").accumulation == 1
    assert run("accumulation=2").accumulation == 2


def test_attention_uses_whole_matrices_on_a_cpu_while_they_are_small() -> None:
    assert run().attention == "eager"
    assert run("model.context=1024").attention == "sdpa"
    assert run(device="cuda").attention == "sdpa"
    assert run("attention=sdpa").attention == "sdpa"


def test_a_fork_is_trained_like_its_parent_from_the_rate_where_it_left() -> None:
    parent = replace(HELD, weight_decay=0.3, batch=6)
    write_record(Path(), parent, "t", {})
    found = run("schedule=cosine", "steps=50", "fork=stage1-step1")
    assert (found.parent, found.fork_at) == (parent, 1)
    assert (found.shape, found.batch, found.weight_decay) == (parent.shape, 6, 0.3)
    assert found.schedule.peak == parent.schedule.at(1) == 5e-3  # half way up its warm-up
    assert found.schedule.warmup == 0
    other = run("fork=stage1-step20", "batch=2", "seed=5")
    assert (other.batch, other.seed) == (2, 5)


def test_the_fork_of_a_run_that_decayed_to_zero_starts_from_its_peak() -> None:
    write_record(Path(), replace(HELD, schedule=Linear(peak=2e-3, end=20)), "t", {})
    assert run("fork=stage1-step20").schedule.peak == 2e-3


@pytest.mark.parametrize(
    ("settings", "words", "hint"),
    [
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
        (["model.layers=two"], "`model.layers` is `two`", "a whole number"),
        (["btch=2"], "`--set btch=2`: there is no key `btch`", "did you mean `batch`?"),
        (["batch=0"], "`--set batch=0`: `batch` is `0`", "greater than or equal to 1"),
        (["clip=0"], "`clip` is `0`", "greater than 0"),
        (["precision=fp8"], "`precision` is `fp8`", "'bf16' or 'fp32'"),
        (["lawa=5"], "`lawa` is `5`", "a list"),
        (["betas=[0.9, 0.95, 1]"], "`betas`", ""),
        (["save_at=ten"], "`save_at` is `ten`", "a list"),
        (["batch"], "`--set batch` sets nothing", "model.layers=2"),
        (["model={"], "`--set model={`: did not find", "as YAML"),
        (["fork=none/at-all"], "which names no checkpoint of a run", "step500"),
        (["fork=none/run-step5"], "there is no run `run` in `none`", "train one"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(settings: list[str], words: str, hint: str) -> None:
    with pytest.raises(UsageError) as refusal:
        run(*settings)
    told = refusal.value.message + refusal.value.hint if "keys" in words else refusal.value.message
    assert words in told
    assert hint in refusal.value.hint


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("batch: 4\nseeed: 3\n", 2, "there is no key `seeed`"),
        ("batch: 4\nmodel:\n  preset: llama-1m\n  heads: 3\n", 2, "`hidden` is 128"),
        ("batch: 4\nmodel:\n  layers: 0\n", 3, "`model.layers` is `0`"),
        ("schedule:\n  kind: cosin\n", 2, "there is no schedule `cosin`"),
        ("steps: 4\nsteps: 5\n", 2, "`steps` is there twice"),
    ],
)
def test_a_wrong_key_of_a_file_is_refused_by_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        run(file=text)
    assert "`mine.yaml`" in refusal.value.message
    assert f"line {line}: " in refusal.value.message
    assert words in refusal.value.message


def test_a_file_that_is_no_table_is_refused() -> None:
    with pytest.raises(UsageError, match=r"`mine\.yaml` is not a training configuration"):
        run(file="- 3\n")


PAGE = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text(encoding="utf-8")


def test_the_file_in_the_page_is_a_configuration() -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)
    assert run(file=text).schedule.at(1000) >= 0


def test_the_page_lists_every_key() -> None:
    listed = re.findall(r"^\| (`.*?) \|", PAGE, re.M)
    keys = {key for cell in listed for key in re.findall(r"`(\w+)`", cell)}
    assert {field.name for field in fields(Config)} <= keys
