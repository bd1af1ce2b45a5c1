import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from qaudit.core.schedules import Constant, Linear
from qaudit.errors import TrainingError
from qaudit.lab.log import read_log
from qaudit.lab.run import Run
from qaudit.lab.shapes import Shape
from qaudit.lab.train import train

SHAPE = Shape(hidden=16, ffn=32, layers=1, heads=2, kv_heads=1, vocabulary=64, context=8)
HELD = Run(
    name="stage1",
    shape=SHAPE,
    schedule=Constant(peak=1e-2, warmup=2),
    steps=20,
    save_at=(10, 20),
    batch=4,
    seed=1,
)
DECAY = dataclasses.replace(
    HELD,
    name="stage2-ingredient1",
    schedule=Linear(peak=1e-2, end=10),
    steps=10,
    save_at=(10,),
    seed=2,
    parent=HELD,
    fork_at=20,
)


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_leaves_checkpoints_that_transformers_reads(tmp_path, text):
    train(HELD, text, tmp_path)
    folders = sorted(p.parent.name for p in tmp_path.glob("*/config.json"))
    assert folders == ["stage1-step10", "stage1-step20"]
    assert all(w.dtype is torch.bfloat16 for w in weights(tmp_path / "stage1-step20").values())
    assert not equal(weights(tmp_path / "stage1-step10"), weights(tmp_path / "stage1-step20"))


def test_training_learns(tmp_path, text):
    train(dataclasses.replace(HELD, steps=60), text, tmp_path)
    losses = [line["loss"] for line in read_log(tmp_path)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_run_that_was_stopped_goes_on_to_the_same_weights(tmp_path, text):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    train(HELD, text, whole)

    def stop(step, loss, rate):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(HELD, text, parts, state_every=5, progress=stop)
    train(HELD, text, parts)
    assert equal(weights(whole / "stage1-step20"), weights(parts / "stage1-step20"))


def test_a_fork_starts_from_the_held_weights_and_leaves_them_alone(tmp_path, text):
    state = train(HELD, text, tmp_path)
    held = state.read_bytes()
    train(DECAY, text, tmp_path, fork=state)
    assert state.read_bytes() == held
    other = dataclasses.replace(DECAY, name="stage2-ingredient2", seed=3)
    train(other, text, tmp_path, fork=state)
    a, b = (weights(tmp_path / f"stage2-ingredient{k}-step10") for k in (1, 2))
    assert not equal(a, b)


def test_the_log_holds_the_schedule(tmp_path, text):
    state = train(HELD, text, tmp_path)
    train(DECAY, text, tmp_path, fork=state)
    rates = {(line["run"], line["step"]): line["learning_rate"] for line in read_log(tmp_path)}
    assert rates[("stage1", 20)] == 1e-2
    assert rates[("stage2-ingredient1", 10)] == 0.0


def test_a_loss_that_is_not_finite_stops_training(tmp_path, text):
    wild = dataclasses.replace(HELD, schedule=Constant(peak=1e30))
    with pytest.raises(TrainingError, match="stage1"):
        train(wild, text, tmp_path)
