"""Runs of a few thousand parameters on a text of a few tokens."""

import json
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM

from experiments.folder import LOG
from experiments.run import TrainingRun
from experiments.shapes import ModelShape
from qaudit.core.schedules import Constant, Linear

SHAPE = ModelShape(hidden=16, ffn=32, layers=1, heads=2, kv_heads=1, vocabulary=64, context=8)
HOW = {"shape": SHAPE, "schedule": Constant(peak=1e-2, warmup=2), "batch": 4}
HELD = TrainingRun(name="stage1", steps=20, save_at=(10, 20), seed=1, **HOW)
END = {"schedule": Linear(peak=1e-2, end=10), "steps": 10, "save_at": (10,), "fork_at": 20}
DECAY = replace(HELD, name="stage2-ingredient1", seed=2, parent=HELD, **END)


def weights(folder):
    """Return the weights of a checkpoint."""
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def state(path):
    """Return a state as it lies on disk."""
    return torch.load(path, weights_only=True)


def equal(a, b):
    """Say whether two models are the same to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def read_log(out):
    """Return the lines of a folder's training log."""
    return [json.loads(line) for line in (out / LOG).read_text(encoding="utf-8").splitlines()]
