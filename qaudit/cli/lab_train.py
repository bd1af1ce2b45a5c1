"""`qaudit lab train`: train one run on local text."""

from __future__ import annotations

import sys

from qaudit.cli import lab_options as o
from qaudit.cli.options import Quiet


def train(
    out: o.Out,
    steps: o.Steps = 2000,
    schedule: o.Kind = "wsd",
    name: o.Name = None,
    shape: o.Shape = None,
    hidden: o.Hidden = None,
    ffn: o.Ffn = None,
    layers: o.Layers = None,
    heads: o.Heads = None,
    kv_heads: o.KvHeads = None,
    tied: o.Tied = None,
    fork: o.Fork = None,
    peak: o.Peak = None,
    warmup: o.Warmup = None,
    floor_ratio: o.FloorRatio = None,
    decay_share: o.DecayShare = None,
    decay_shape: o.DecayShape = None,
    period: o.Period = None,
    multiplier: o.Multiplier = None,
    peak_decay: o.PeakDecay = None,
    amplitude: o.Amplitude = None,
    cool_share: o.CoolShare = None,
    batch: o.Batch = None,
    accumulation: o.Accumulation = None,
    seed: o.Seed = None,
    order: o.Order = None,
    weight_decay: o.WeightDecay = None,
    betas: o.Betas = None,
    clip: o.Clip = None,
    sam_rho: o.SamRho = None,
    texts: o.Texts = None,
    tokenizer: o.Tokenizer = None,
    vocabulary: o.Vocabulary = None,
    context: o.Window = None,
    save_every: o.SaveEvery = None,
    save_at: o.SaveAt = None,
    keep_states: o.KeepStates = None,
    ema_decay: o.EmaDecay = None,
    lawa: o.Lawa = None,
    device: o.Device = "auto",
    precision: o.Precision = None,
    attention: o.Attention = "auto",
    threads: o.Threads = None,
    compiled: o.Compiled = False,
    state_every: o.StateEvery = 250,
    quiet: Quiet = False,
) -> None:
    """Train a small model on local text and leave checkpoints that `qaudit scan` reads.

    Their learning rates stand in a family file beside them. The same command again goes on from
    where it stopped.

    Example: qaudit lab train runs/wsd --schedule wsd --steps 2000 --compile
    """
    given = locals()  # first, so that it holds the options and nothing else
    from qaudit.cli.training import carry_out

    sys.exit(carry_out(given))
