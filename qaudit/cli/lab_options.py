"""The options of `qaudit lab train`, one annotated type each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_MODEL, _RATE, _STEP = "The model", "The learning rate", "A step"
_TEXT, _KEPT, _HOW = "Text", "What is kept", "How to compute"


def _option(panel: str, text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the checkpoints.")]
Name = Annotated[
    str | None,
    _option(
        _MODEL, "What the run is called; default: its schedule.", "--name", envvar="QAUDIT_NAME"
    ),
]
Shape = Annotated[
    str | None,
    _option(
        _MODEL,
        "olmo2-1m, llama-12m, neox-160m, ...; also 4m, 30m and 70m.",
        "--shape",
        envvar="QAUDIT_SHAPE",
    ),
]
Hidden = Annotated[
    int | None,
    _option(_MODEL, "Width, instead of the shape's.", "--hidden", envvar="QAUDIT_HIDDEN", min=2),
]
Ffn = Annotated[
    int | None,
    _option(_MODEL, "Width of the feed-forward layer.", "--ffn", envvar="QAUDIT_FFN", min=1),
]
Layers = Annotated[
    int | None, _option(_MODEL, "Transformer blocks.", "--layers", envvar="QAUDIT_LAYERS", min=1)
]
Heads = Annotated[
    int | None, _option(_MODEL, "Attention heads.", "--heads", envvar="QAUDIT_HEADS", min=1)
]
KvHeads = Annotated[
    int | None,
    _option(_MODEL, "Heads of keys and values.", "--kv-heads", envvar="QAUDIT_KV_HEADS", min=1),
]
Tied = Annotated[
    bool | None,
    _option(_MODEL, "Share the embeddings with the head.", "--tied/--untied", envvar="QAUDIT_TIED"),
]
Fork = Annotated[
    Path | None,
    _option(
        _MODEL,
        "Start from this checkpoint of a run, with its optimizer's state.",
        "--fork",
        envvar="QAUDIT_FORK",
    ),
]
Kind = Annotated[
    str,
    _option(
        _RATE, "constant, wsd, cosine, linear, sgdr or oli.", "--schedule", envvar="QAUDIT_SCHEDULE"
    ),
]
Steps = Annotated[int, _option(_RATE, "Steps of the run.", "--steps", envvar="QAUDIT_STEPS", min=1)]
Peak = Annotated[
    float | None,
    _option(
        _RATE,
        "Highest learning rate; default: 3e-3, or where a fork left.",
        "--peak",
        envvar="QAUDIT_PEAK",
    ),
]
Warmup = Annotated[
    float | None,
    _option(
        _RATE,
        "Steps of warm-up; default: a hundredth, none for a fork.",
        "--warmup",
        envvar="QAUDIT_WARMUP",
        min=0,
    ),
]
FloorRatio = Annotated[
    float | None,
    _option(
        _RATE,
        "Lowest rate as a part of the peak: cosine, linear, sgdr, oli.",
        "--floor-ratio",
        envvar="QAUDIT_FLOOR_RATIO",
        min=0,
        max=1,
    ),
]
DecayShare = Annotated[
    float | None,
    _option(
        _RATE, "Part of the run that decays: wsd.", "--decay-share", envvar="QAUDIT_DECAY_SHARE"
    ),
]
DecayShape = Annotated[
    str | None,
    _option(
        _RATE,
        "linear, sqrt (1 - sqrt) or cosine: wsd.",
        "--decay-shape",
        envvar="QAUDIT_DECAY_SHAPE",
    ),
]
Period = Annotated[
    float | None, _option(_RATE, "Steps of a cycle: sgdr, oli.", "--period", envvar="QAUDIT_PERIOD")
]
Multiplier = Annotated[
    float | None,
    _option(
        _RATE,
        "Each cycle is so many times as long: sgdr.",
        "--multiplier",
        envvar="QAUDIT_MULTIPLIER",
    ),
]
PeakDecay = Annotated[
    float | None,
    _option(
        _RATE,
        "Each restart is so many times as high: sgdr.",
        "--peak-decay",
        envvar="QAUDIT_PEAK_DECAY",
    ),
]
Amplitude = Annotated[
    float | None,
    _option(
        _RATE,
        "Height of a bump, as a part of the way to the peak: oli.",
        "--amplitude",
        envvar="QAUDIT_AMPLITUDE",
    ),
]
CoolShare = Annotated[
    float | None,
    _option(_RATE, "Settled part of a period: oli.", "--cool-share", envvar="QAUDIT_COOL_SHARE"),
]
Batch = Annotated[
    int | None,
    _option(_STEP, "Windows of a step; default: 32.", "--batch", envvar="QAUDIT_BATCH", min=1),
]
Accumulation = Annotated[
    int | None,
    _option(
        _STEP,
        "Parts that a batch is computed in; default: what fits a cache.",
        "--accumulation",
        envvar="QAUDIT_ACCUMULATION",
        min=1,
    ),
]
Seed = Annotated[
    int | None,
    _option(
        _STEP,
        "Of the first weights, and of the order of the data.",
        "--seed",
        envvar="QAUDIT_SEED",
        min=0,
    ),
]
Order = Annotated[
    int | None,
    _option(
        _STEP, "Another order of the data than the seed's.", "--order", envvar="QAUDIT_ORDER", min=0
    ),
]
WeightDecay = Annotated[
    float | None,
    _option(
        _STEP,
        "Decoupled weight decay of matrices; default: 0.1.",
        "--weight-decay",
        envvar="QAUDIT_WEIGHT_DECAY",
    ),
]
Betas = Annotated[
    str | None, _option(_STEP, "Of AdamW; default: 0.9,0.95.", "--betas", envvar="QAUDIT_BETAS")
]
Clip = Annotated[
    float | None,
    _option(
        _STEP, "Norm that gradients are cut down to; default: 1.", "--clip", envvar="QAUDIT_CLIP"
    ),
]
SamRho = Annotated[
    float | None,
    _option(_STEP, "Radius of sharpness-aware minimization.", "--sam-rho", envvar="QAUDIT_SAM_RHO"),
]
Texts = Annotated[
    list[str] | None,
    _option(
        _TEXT,
        "A file or folder to train on; repeatable; default: Python's own.",
        "--text",
        envvar="QAUDIT_TEXT",
    ),
]
Tokenizer = Annotated[
    Path | None,
    _option(
        _TEXT,
        "The folder of a tokenizer; default: one is trained.",
        "--tokenizer",
        envvar="QAUDIT_TOKENIZER",
    ),
]
Vocabulary = Annotated[
    int | None,
    _option(
        _TEXT,
        "Entries of the tokenizer and the model.",
        "--vocabulary",
        envvar="QAUDIT_VOCABULARY",
        min=257,
    ),
]
Window = Annotated[
    int | None,
    _option(_TEXT, "Window length in tokens.", "--context", envvar="QAUDIT_CONTEXT", min=2),
]
SaveEvery = Annotated[
    int | None,
    _option(
        _KEPT,
        "Steps between checkpoints; default: a tenth of the run.",
        "--save-every",
        envvar="QAUDIT_SAVE_EVERY",
        min=1,
    ),
]
SaveAt = Annotated[
    str | None,
    _option(
        _KEPT, "Steps to write checkpoints at: 100,500,2000.", "--save-at", envvar="QAUDIT_SAVE_AT"
    ),
]
KeepStates = Annotated[
    str | None,
    _option(
        _KEPT,
        "Steps to fork from later; the last one always.",
        "--keep-states",
        envvar="QAUDIT_KEEP_STATES",
    ),
]
EmaDecay = Annotated[
    float | None,
    _option(
        _KEPT,
        "Average from step to step, saved as RUN-ema-stepN.",
        "--ema-decay",
        envvar="QAUDIT_EMA_DECAY",
    ),
]
Lawa = Annotated[
    str | None,
    _option(
        _KEPT, "Window of weights and steps between them, as 5:500.", "--lawa", envvar="QAUDIT_LAWA"
    ),
]
Device = Annotated[
    str, _option(_HOW, "auto, cpu, cuda or mps.", "--device", envvar="QAUDIT_DEVICE")
]
Precision = Annotated[
    str | None,
    _option(
        _HOW, "bf16 or fp32; weights are held in fp32.", "--precision", envvar="QAUDIT_PRECISION"
    ),
]
Attention = Annotated[
    str, _option(_HOW, "auto, sdpa or eager.", "--attention", envvar="QAUDIT_ATTENTION")
]
Threads = Annotated[
    int | None,
    _option(
        _HOW,
        "Threads on a CPU; results differ in the last bits.",
        "--threads",
        envvar="QAUDIT_THREADS",
        min=1,
    ),
]
Compiled = Annotated[
    bool,
    _option(_HOW, "Use torch.compile; needs a C++ compiler.", "--compile", envvar="QAUDIT_COMPILE"),
]
StateEvery = Annotated[
    int,
    _option(
        _HOW,
        "Steps between states, from which a killed run goes on.",
        "--state-every",
        envvar="QAUDIT_STATE_EVERY",
        min=1,
    ),
]
