"""A few words -> a run with everything said."""

from dataclasses import replace
from pathlib import Path

import pytest

from qaudit.core.schedules import Linear, WarmupStableDecay, spell
from qaudit.errors import UsageError
from qaudit.lab.asked import SCHEDULES, Asked, run_asked
from qaudit.lab.records import write_record
from tests.support.training import HELD


def asked(**options):
    return run_asked(Asked(**{"steps": 1000, **options}), "cpu")


def test_a_run_decays_over_its_last_fifth_unless_it_is_said_otherwise():
    run = asked()
    assert run.schedule == WarmupStableDecay(
        peak=3e-3, warmup=10, decay_start=800, decay_length=200
    )
    assert run.name == "wsd"
    assert run.save_at == tuple(range(100, 1001, 100))
    half = asked(decay_share=0.5, rates={"peak": 1e-2, "warmup": 0, "shape": "sqrt"})
    assert half.schedule == WarmupStableDecay(
        peak=1e-2, decay_start=500, decay_length=500, shape="sqrt"
    )


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_can_be_asked_for(kind):
    more = {"period": 100.0} if kind in ("sgdr", "oli") else {}
    run = asked(schedule=kind, rates=more)
    assert spell(run.schedule)["kind"] == kind
    assert 0 <= run.schedule.at(1000) <= run.schedule.peak == 3e-3


def test_steps_to_save_are_those_given_and_the_last():
    assert asked(save_at=(700, 50)).save_at == (50, 700, 1000)
    assert asked(save_every=400).save_at == (400, 800, 1000)


def test_a_batch_is_computed_in_parts_that_fit_the_device():
    assert asked().accumulation == 4  # 32 windows of 256 tokens, 8 at a time
    assert asked(sizes={"context": 4096}).accumulation == 32
    assert run_asked(Asked(steps=10), "cuda").accumulation == 1
    assert asked(training={"accumulation": 2}).accumulation == 2


def test_attention_is_of_whole_matrices_on_a_cpu_while_they_are_small():
    assert asked().attention == "eager"
    assert asked(sizes={"context": 1024}).attention == "sdpa"
    assert run_asked(Asked(steps=10), "cuda").attention == "sdpa"
    assert asked(attention="sdpa").attention == "sdpa"


def test_a_fork_is_trained_like_its_parent_from_the_rate_where_it_left(tmp_path):
    parent = replace(HELD, weight_decay=0.3, batch=6)
    write_record(tmp_path, parent, "t", {})
    run = asked(schedule="cosine", steps=50, fork=tmp_path / "stage1-step1")
    assert (run.parent, run.fork_at) == (parent, 1)
    assert (run.shape, run.batch, run.weight_decay) == (parent.shape, 6, 0.3)
    assert run.schedule.peak == parent.schedule.at(1) == 5e-3  # half way up its warm-up
    assert run.schedule.warmup == 0
    other = asked(fork=tmp_path / "stage1-step20", training={"batch": 2, "seed": 5})
    assert (other.batch, other.seed) == (2, 5)


def test_the_fork_of_a_run_that_decayed_to_nothing_starts_from_its_peak(tmp_path):
    write_record(tmp_path, replace(HELD, schedule=Linear(peak=2e-3, end=20)), "t", {})
    assert asked(fork=tmp_path / "stage1-step20").schedule.peak == 2e-3


@pytest.mark.parametrize(
    ("options", "words", "hint"),
    [
        ({"schedule": "cosin"}, "there is no schedule `cosin`", "did you mean `cosine`?"),
        ({"rates": {"period": 5.0}}, "schedule `wsd` has no ['period']", ""),
        ({"schedule": "sgdr"}, "schedule `sgdr` does not say its ['period']", ""),
        ({"schedule": "cosine", "decay_share": 0.1}, "`cosine` has no `decay_share`", "`wsd`"),
        ({"decay_share": 1.5}, "`decay_share` is 1.5", "above 0, and at most 1"),
        ({"rates": {"warmup": 1000.0}}, "`warmup` is 1000", "below the 1000 steps"),
        ({"rates": {"shape": "round"}}, "unknown decay shape `round`", ""),
        ({"save_at": (5,), "save_every": 5}, "both `save_at` and `save_every`", ""),
        ({"shape": "olmo"}, "there is no shape `olmo`", "`olmo2-"),
        ({"fork": Path("none/at-all")}, "does not name a checkpoint to fork from", "step500"),
        ({"fork": Path("none/run-step5")}, "there is no run `run` in `none`", "train one"),
    ],
)
def test_what_cannot_be_is_named_with_what_is_allowed(options, words, hint):
    with pytest.raises(UsageError) as refusal:
        asked(**options)
    assert words in str(refusal.value)
    assert hint in refusal.value.hint
