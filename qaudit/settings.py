"""The one table of settings: name, type, bounds, default, help and panel of each.

`Recipe` holds what decides numbers and choices, `RunOptions` what does not. From these fields
come the options of every command and their environment variables, the keys of a recipe and
their checks, the keyword arguments of the Python API, and docs/options.md. The name of a
field is the key; the option is the name with hyphens, unless `flag` gives another.

Imports nothing of qaudit and nothing heavy: `--help` is made from this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NewType, get_args, get_origin, get_type_hints

Nbytes = NewType("Nbytes", int)
"""A number of bytes, written with its unit: `512MB`, `60GB`, `1.5GiB`."""

DEFAULT_SCHEMES = (
    "rtn-4bit",
    "rtn-3bit",
    "gptq-4bit",
    "gptq-3bit",
    "awq-4bit",
    "awq-3bit",
    "bnb-nf4",
    "bnb-int8",
)

MEASURE, TEXT, COMPUTE, OUTPUT = "What to measure", "Text", "How to compute", "Output"
EXECUTE = "Where to compute"
ONLY_IN_RECIPES = ""
"""The panel of a setting that has a key and an argument, and no option."""


@dataclass(frozen=True)
class Setting:
    """What a setting is for, beyond its name, type and default."""

    help: str
    panel: str
    unset: str = ""  # what applies by default, where the default value does not show it
    flag: str = ""  # the option, where it is not the name with hyphens
    at_least: int | None = None
    at_most: int | None = None


@dataclass(frozen=True)
class Recipe:
    """What to measure: nothing resolved, nothing priced."""

    targets: tuple[str, ...]
    schemes: Annotated[
        tuple[str, ...],
        Setting(
            "Schemes or sets of them (`qaudit list sets`), separated by commas or repeated.",
            MEASURE,
        ),
    ] = DEFAULT_SCHEMES
    checkpoints: Annotated[
        tuple[str, ...],
        Setting(
            "Only these: a name, a glob, or `stage1@100k..900k/50k`; repeatable.",
            MEASURE,
            unset="all; of more than 16, a selection",
        ),
    ] = ()
    bits: Annotated[
        tuple[str, ...],
        Setting("Classes of bits per weight to decide, as 4,3.", MEASURE, "all that are measured"),
    ] = ()
    stages: Annotated[
        tuple[str, ...],
        Setting("Only checkpoints of this stage; repeatable.", MEASURE, "all", "--stage"),
    ] = ()
    every: Annotated[
        int | None,
        Setting(
            "Only checkpoints this many steps apart, counted back from the end.",
            MEASURE,
            unset="all",
            at_least=1,
        ),
    ] = None
    last: Annotated[
        int | None, Setting("Only the latest N checkpoints.", MEASURE, "all", at_least=1)
    ] = None
    limit: Annotated[
        int | None,
        Setting("At most N checkpoints, spread evenly.", MEASURE, "no limit", at_least=1),
    ] = None
    soups: Annotated[
        tuple[str, ...],
        Setting("A soup: `A+B+C`, or a glob; repeatable.", MEASURE, "none", "--soup"),
    ] = ()
    shipped: Annotated[
        tuple[str, ...],
        Setting(
            "A file or repository of the target that is quantized already; repeatable.",
            MEASURE,
            "none",
        ),
    ] = ()
    calibration: Annotated[
        str | None,
        Setting(
            "Calibration text: a file, or hf://datasets/org/name/path.",
            TEXT,
            unset="C4 for Hub models, Python's own text for folders",
        ),
    ] = None
    evaluation: Annotated[
        str | None,
        Setting(
            "Evaluation text: a file, or hf://datasets/org/name/path.",
            TEXT,
            unset="C4 for Hub models, Python's own text for folders",
        ),
    ] = None
    strata: Annotated[
        str | None,
        Setting(
            "Field of the evaluation text, as `source`: shows the errors of each of its values.",
            TEXT,
            "none",
        ),
    ] = None
    choices: Annotated[
        str | None, Setting("Multiple-choice items to score: .jsonl.", TEXT, "none")
    ] = None
    tasks: Annotated[
        tuple[str, ...],
        Setting(
            "Tasks, separated by commas: paper-a, names of lm-eval, a folder of its YAML files.",
            TEXT,
            unset="none",
        ),
    ] = ()
    task_items: Annotated[
        str, Setting("At most N items of each task, drawn at random, or all.", TEXT)
    ] = "500"
    task_shots: Annotated[
        int | None,
        Setting(
            "Examples before each question.",
            TEXT,
            unset="5, or as the task's file says",
            at_least=0,
        ),
    ] = None
    task_data: Annotated[
        str | None,
        Setting("Folder with data sets of tasks, as org/name.", TEXT, unset="from the Hub"),
    ] = None
    context: Annotated[
        int | None,
        Setting("Window length in tokens.", TEXT, "the model's longest, at most 2048", at_least=2),
    ] = None
    stride: Annotated[
        int | None, Setting("Tokens between window starts.", TEXT, "the context", at_least=1)
    ] = None
    bos: Annotated[
        Literal["auto", "always", "never"],
        Setting("Start each window with a BOS token: auto, always or never.", TEXT),
    ] = "auto"
    packed: Annotated[
        bool,
        Setting("Fill windows across documents.", TEXT, flag="--packed/--not-packed"),
    ] = False
    evaluation_documents: Annotated[
        int, Setting("At most N evaluation documents.", TEXT, at_least=2)
    ] = 64
    calibration_documents: Annotated[
        int, Setting("At most N calibration documents.", TEXT, at_least=1)
    ] = 64
    document_tokens: Annotated[
        int | None, Setting("At most N tokens of each document.", TEXT, "all", at_least=2)
    ] = None
    calibration_seed: Annotated[
        int, Setting("Another seed draws other calibration text.", TEXT, at_least=0)
    ] = 0
    repeats: Annotated[
        int | None,
        Setting(
            "Draws of calibration text, each measured: how much depends on the draw.",
            TEXT,
            unset="one of everything, and two more of what decides",
            at_least=1,
            at_most=16,
        ),
    ] = None
    device: Annotated[
        str, Setting("auto (a CUDA GPU, else the CPU), cpu, cuda, cuda:1 or mps.", COMPUTE)
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Setting(
            "auto (bfloat16 on a GPU that supports it, else float32), float32, bfloat16 or "
            "float16.",
            COMPUTE,
        ),
    ] = "auto"
    compare_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Setting(
            "Measure the last checkpoint and soup in this dtype too: how much the dtype moves.",
            COMPUTE,
            unset="none",
        ),
    ] = None
    confidence: Annotated[float, Setting("Confidence level of intervals.", ONLY_IN_RECIPES)] = 0.95
    schedule: Annotated[
        dict[str, Any] | None,
        Setting("Learning-rate schedule of the run.", ONLY_IN_RECIPES, "as the family says"),
    ] = None
    family: Annotated[
        str | None,
        Setting(
            "Family that explains checkpoint names; see `qaudit list families`.",
            MEASURE,
            unset="recognized by the names",
        ),
    ] = None
    diagnostics: Annotated[
        tuple[str, ...],
        Setting(
            "Why it breaks: weights, sensitivity, curvature, plane, or all.",
            MEASURE,
            "none",
            "--diagnose",
        ),
    ] = ()
    policy: Annotated[
        str,
        Setting("Policy that judges findings: explore, release, strict or a file.", OUTPUT),
    ] = "release"


@dataclass(frozen=True)
class RunOptions:
    """How a plan is run: none of these changes a number."""

    stream_memory: Annotated[
        Nbytes | None,
        Setting(
            "Memory for hidden states before they go to disk, as 512MB or 4GB.",
            COMPUTE,
            unset="a quarter of what is free",
        ),
    ] = None
    disk_budget: Annotated[
        Nbytes | None,
        Setting(
            "Disk space for downloads, as 60GB.", COMPUTE, unset="keep everything while it fits"
        ),
    ] = None
    update: Annotated[
        bool, Setting("Ask the Hub again where this plan was made before.", COMPUTE)
    ] = False
    allow_pickle: Annotated[bool, Setting("Read .bin weights too.", COMPUTE)] = False
    trust_remote_code: Annotated[bool, Setting("Run code that a repository contains.", COMPUTE)] = (
        False
    )
    self_check: Annotated[
        bool, Setting("First compare one batch with the whole model.", COMPUTE)
    ] = False
    cross_check: Annotated[
        int,
        Setting(
            "Quantize N modules with GPTQModel too, and note the agreement.",
            COMPUTE,
            at_least=0,
        ),
    ] = 0
    out: Annotated[Path | None, Setting("Output folder.", OUTPUT, "qaudit-out/TARGET")] = None


@dataclass(frozen=True)
class Entry:
    """One row of the table, as everything that is made from it reads it."""

    name: str
    type: Any  # without `None`
    optional: bool
    default: Any
    setting: Setting

    @property
    def flag(self) -> str:
        """The option: `--calibration-documents`."""
        return self.setting.flag or f"--{self.name.replace('_', '-')}"

    @property
    def shown_default(self) -> str:
        """The default as help and docs print it."""
        if self.setting.unset:
            return self.setting.unset
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return ", ".join(self.default) if isinstance(self.default, tuple) else str(self.default)


@cache
def settings_of(group: type[Recipe] | type[RunOptions]) -> dict[str, Entry]:
    """Return the settings of a group by name, in the order of the table."""
    return {entry.name: entry for entry in _entries(group)}


def _entries(group: type[Any]) -> Iterator[Entry]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        if get_origin(hints[field.name]) is not Annotated:  # `targets`
            continue
        annotation, setting = get_args(hints[field.name])
        optional = NoneType in get_args(annotation)
        if optional:
            (annotation,) = (part for part in get_args(annotation) if part is not NoneType)
        default = None if field.default is MISSING else field.default
        yield Entry(field.name, annotation, optional, default, setting)
