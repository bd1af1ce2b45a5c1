"""The options of `qaudit scan`, one annotated type each: help, bounds, environment variable."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_WHAT, _TEXT, _HOW, _OUT = "What to measure", "Text", "How to compute", "Output"


def _option(panel: str, text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


Targets = Annotated[
    list[str],
    typer.Argument(
        metavar="TARGET...", help="A Hub repo (`org/name`), a folder, a recipe, or `demo`."
    ),
]
Schemes = Annotated[
    list[str] | None,
    _option(_WHAT, "Schemes, separated by commas or repeated.", envvar="QAUDIT_SCHEMES"),
]
Checkpoints = Annotated[
    list[str] | None,
    _option(
        _WHAT,
        "Only these: a name, a glob, or `stage1@100k..900k/50k`; repeatable.",
        envvar="QAUDIT_CHECKPOINTS",
    ),
]
Stage = Annotated[
    list[str] | None,
    _option(_WHAT, "Only checkpoints of this stage; repeatable.", envvar="QAUDIT_STAGE"),
]
Every = Annotated[
    int | None,
    _option(
        _WHAT,
        "Only checkpoints so many steps apart, back from the end.",
        envvar="QAUDIT_EVERY",
        min=1,
    ),
]
Last = Annotated[
    int | None,
    _option(_WHAT, "Only so many of the latest.", envvar="QAUDIT_LAST", min=1),
]
Limit = Annotated[
    int | None,
    _option(_WHAT, "Checkpoints at most, spread evenly.", envvar="QAUDIT_LIMIT", min=1),
]
Family = Annotated[
    str | None,
    _option(_WHAT, "What the names mean; see `qaudit list families`.", envvar="QAUDIT_FAMILY"),
]
Soup = Annotated[
    list[str] | None,
    _option(_WHAT, "A soup: `A+B+C`, or a glob; repeatable.", envvar="QAUDIT_SOUP"),
]
Diagnose = Annotated[
    list[str] | None,
    _option(
        _WHAT,
        "Why it breaks: weights, sensitivity, curvature, plane, or all.",
        envvar="QAUDIT_DIAGNOSE",
    ),
]
Calibration = Annotated[
    str | None,
    _option(
        _TEXT,
        "Calibration text: a file, or hf://datasets/org/name/path.",
        envvar="QAUDIT_CALIBRATION",
    ),
]
Evaluation = Annotated[
    str | None,
    _option(
        _TEXT,
        "Evaluation text: a file, or hf://datasets/org/name/path.",
        envvar="QAUDIT_EVALUATION",
    ),
]
Choices = Annotated[
    str | None, _option(_TEXT, "Multiple-choice items to score: .jsonl.", envvar="QAUDIT_CHOICES")
]
Context = Annotated[
    int | None, _option(_TEXT, "Window length in tokens.", envvar="QAUDIT_CONTEXT", min=2)
]
Stride = Annotated[
    int | None,
    _option(_TEXT, "Step between windows; default: their length.", envvar="QAUDIT_STRIDE", min=1),
]
Bos = Annotated[str | None, _option(_TEXT, "auto, always or never.", envvar="QAUDIT_BOS")]
Packed = Annotated[
    bool | None,
    _option(
        _TEXT, "Fill windows across documents.", "--packed/--not-packed", envvar="QAUDIT_PACKED"
    ),
]
EvaluationDocuments = Annotated[
    int | None,
    _option(_TEXT, "Evaluation documents at most.", envvar="QAUDIT_EVALUATION_DOCUMENTS", min=2),
]
CalibrationDocuments = Annotated[
    int | None,
    _option(_TEXT, "Calibration documents at most.", envvar="QAUDIT_CALIBRATION_DOCUMENTS", min=1),
]
DocumentTokens = Annotated[
    int | None,
    _option(_TEXT, "Tokens of each document at most.", envvar="QAUDIT_DOCUMENT_TOKENS", min=2),
]
CalibrationSeed = Annotated[
    int | None,
    _option(_TEXT, "Another seed draws other calibration text.", envvar="QAUDIT_CALIBRATION_SEED"),
]
Repeats = Annotated[
    int | None,
    _option(
        _TEXT,
        "Draws of calibration text, each measured: how much is the luck of the draw.",
        envvar="QAUDIT_REPEATS",
        min=1,
        max=16,
    ),
]
Device = Annotated[str | None, _option(_HOW, "auto, cpu, cuda or mps.", envvar="QAUDIT_DEVICE")]
Dtype = Annotated[
    str | None, _option(_HOW, "auto, float32, bfloat16 or float16.", envvar="QAUDIT_DTYPE")
]
StreamMemory = Annotated[
    str | None,
    _option(
        _HOW,
        "Memory for hidden states before they go to disk, as 512MB or 4GB.",
        envvar="QAUDIT_STREAM_MEMORY",
    ),
]
DiskBudget = Annotated[
    str | None,
    _option(
        _HOW,
        "Disk for what is fetched, as 60GB; default: keep it while it fits.",
        envvar="QAUDIT_DISK_BUDGET",
    ),
]
Update = Annotated[
    bool,
    _option(
        _HOW,
        "Ask the Hub again where this plan was made before.",
        "--update",
        envvar="QAUDIT_UPDATE",
    ),
]
TrustRemoteCode = Annotated[
    bool,
    _option(
        _HOW,
        "Run code that a repository brings along.",
        "--trust-remote-code",
        envvar="QAUDIT_TRUST_REMOTE_CODE",
    ),
]
AllowPickle = Annotated[
    bool,
    _option(_HOW, "Read .bin weights too.", "--allow-pickle", envvar="QAUDIT_ALLOW_PICKLE"),
]
SelfCheck = Annotated[
    bool,
    _option(
        _HOW,
        "First compare one batch with the whole model.",
        "--self-check",
        envvar="QAUDIT_SELF_CHECK",
    ),
]
CrossCheck = Annotated[
    int,
    _option(
        _HOW,
        "Quantize so many modules with GPTQModel too, and note the agreement.",
        envvar="QAUDIT_CROSS_CHECK",
        min=0,
    ),
]
Policy = Annotated[
    str | None,
    _option(
        _OUT,
        "What findings are judged by: explore, release (default), strict or a file.",
        envvar="QAUDIT_POLICY",
    ),
]
Out = Annotated[
    Path | None, _option(_OUT, "Output folder; default: qaudit-out/TARGET.", envvar="QAUDIT_OUT")
]
DryRun = Annotated[
    bool,
    _option(
        _OUT,
        "Print the plan and its price; measure nothing.",
        "--dry-run",
        envvar="QAUDIT_DRY_RUN",
    ),
]
AsJson = Annotated[
    bool,
    _option(_OUT, "Print the audit (or the plan) as JSON.", "--json", envvar="QAUDIT_JSON"),
]
Quiet = Annotated[bool, _option(_OUT, "No talk, no bars.", "--quiet", "-q", envvar="QAUDIT_QUIET")]
