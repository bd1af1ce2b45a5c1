"""The one table of settings: name, type, bounds, default, help and panel of each.

`Recipe` holds what decides numbers and choices, `Presets` names for several of its keys at once,
`RunOptions` how a plan is run, `Execution` where, and `Sampling` what `rollouts` writes. From these
fields come the options of commands, the keys of `--set` and of a recipe and their checks, the
environment variables, the keyword arguments of the Python API, `qaudit list settings` and
docs/options.md. The name of a field is the key. Few have an option; what hardly anyone sets is set
with `--set key=value`.

Imports nothing of qaudit and nothing heavy: `--help` is made from this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NewType, get_args, get_origin, get_type_hints

Nbytes = NewType("Nbytes", int)
"""A number of bytes, written with its unit: `512MB`, `60GB`, `1.5GiB`."""

DEFAULT_SCHEMES = (
    "rtn-4bit", "rtn-3bit", "gptq-4bit", "gptq-3bit", "awq-4bit", "awq-3bit", "bnb-nf4", "bnb-int8",
)  # fmt: skip

SEARCHED_AT = "gptq-4bit"
"""The scheme of a search for a soup that names none."""

EXAMPLE_SCHEME, EXAMPLE_SCHEMES = "gptq-3bit", "rtn-4bit,gptq-4bit"
"""In hints."""

MEASURE, OUTPUT, SAMPLE = "What to measure", "Output", "What to write"
"""Panels that commands add options of their own to."""

_OWN = "the checkpoint's"
_LONGEST = 1 << 24  # tokens; the longest that a model of today claims is 10 million
SET = "--set"


def _setting(
    panel: str, text: str, default: Any = None, *, option: bool = False, **more: Any
) -> Any:
    """Make a field; `more` is of its `Entry`."""
    about = {"panel": panel, "help": text, "has_option": option, **more}
    return field(default=default, metadata=about)


measure, output = partial(_setting, MEASURE), partial(_setting, OUTPUT)
text, compute = partial(_setting, "Text"), partial(_setting, "How to compute")
execute, sample = partial(_setting, "Where to compute"), partial(_setting, SAMPLE)


@dataclass(frozen=True)
class Recipe:
    """What to measure: nothing resolved, nothing priced."""

    targets: tuple[str, ...]
    schemes: tuple[str, ...] = measure(
        "Schemes or sets of them (`qaudit list sets`), separated by commas or repeated.",
        DEFAULT_SCHEMES,
        option=True,
    )
    checkpoints: tuple[str, ...] = measure(
        "Only these: a name, a glob, or `stage1@100k..900k/50k`; repeatable.",
        (),
        unset="all; of more than 16, a selection",
        option=True,
    )
    bits: tuple[str, ...] = measure(
        "Classes of bits per weight to decide, as 4,3.",
        (),
        unset="all that are measured",
        option=True,
    )
    last: int | None = measure("Only the latest N checkpoints.", unset="all", at_least=1)
    soups: tuple[str, ...] = measure(
        "A soup: `A+B+C`, or a glob; repeatable.", (), option=True, flag="--soup"
    )
    shipped: tuple[str, ...] = measure(
        "A file or repository of the target that is quantized already; repeatable.", (), option=True
    )
    reference: str | None = measure(
        "A target or label: every other subject is compared with it, in KL and tasks."
    )
    calibration: str | None = text(
        "Calibration text: a file, or hf://datasets/org/name/path.",
        unset="C4 for Hub models, Python's own text for folders",
        option=True,
    )
    evaluation: str | None = text(
        "Evaluation text: a file, or hf://datasets/org/name/path.",
        unset="C4 for Hub models, Python's own text for folders",
        option=True,
    )
    strata: str | None = text(
        "Field of the evaluation text, as `source`: shows the errors of each of its values."
    )
    chat_template: str | None = text(
        "Jinja file that renders `messages` of the text.", unset="the checkpoint's own"
    )
    score: Literal["answer", "all"] = text(
        "Tokens of `messages` that are scored: answer (what the model wrote) or all.", "answer"
    )
    reasoning: str | None = text(
        "What begins and ends reasoning in them, as `<think> </think>`.",
        unset="the markers of the template",
    )
    rollouts: str | None = text(
        "Folder with rollouts, as `qaudit rollouts` writes it: scored in the same pass."
    )
    choices: str | None = text("Multiple-choice items to score: .jsonl.")
    tasks: tuple[str, ...] = text(
        "Tasks, separated by commas: paper-a, names of lm-eval, a folder of its YAML files.",
        (),
        option=True,
    )
    task_items: str = text("At most N items of each task, drawn at random, or all.", "500")
    task_shots: int | None = text(
        "Examples before each question.", unset="5, or as the task's file says", at_least=0
    )
    task_data: str | None = text(
        "Folder with data sets of tasks, as org/name.", unset="from the Hub"
    )
    context: int | None = text(
        "Window length in tokens.",
        unset="the model's longest, at most 2048",
        at_least=2,
        at_most=_LONGEST,
    )
    bos: Literal["auto", "always", "never"] = text(
        "Start each window with a BOS token: auto, always or never.", "auto"
    )
    packed: bool = text("Fill windows across documents.", False)
    evaluation_documents: int = text("At most N evaluation documents.", 64, at_least=2)
    calibration_documents: int = text("At most N calibration documents.", 64, at_least=1)
    document_tokens: int | None = text(
        "At most N tokens of each document.", unset="all", at_least=2
    )
    calibration_seed: int = text("Another seed draws other calibration text.", 0, at_least=0)
    repeats: int = text(
        "Draws of calibration text, each measured: how much depends on the draw.",
        1,
        at_least=1,
        at_most=16,
    )
    device: str = compute(
        "auto (a CUDA GPU, else the CPU), cpu, cuda (the one with most free memory) or cuda:1.",
        "auto",
        option=True,
    )
    dtype: Literal["auto", "fast", "float32", "bfloat16", "float16"] = compute(
        "auto (bfloat16 on a GPU that supports it, else float32), fast (bfloat16 on a processor "
        "with instructions for it, too), float32, bfloat16 or float16.",
        "auto",
    )
    arithmetic: bool = compute(
        "Round what ships otherwise too, for a tenth of the scan at most: what arithmetic moves.",
        True,
    )
    routing: Literal["own", "reference"] = compute(
        "Who chooses experts: own (each stream's routers) or reference (full precision's choice).",
        "own",
    )
    confidence: float = measure("Confidence level of intervals.", 0.95)
    schedule: dict[str, Any] | None = measure(
        "Learning-rate schedule of the run.", unset="as the family says"
    )
    family: str | None = measure(
        "Family that explains checkpoint names; see `qaudit list families`.",
        unset="recognized by the names",
    )
    diagnostics: tuple[str, ...] = measure(
        "Why it breaks: weights, sensitivity, curvature, plane, positions, or all.", ()
    )
    policy: str = output(
        "Policy that judges findings: explore, release, strict or a file.", "release", option=True
    )


@dataclass(frozen=True)
class Presets:
    """Several keys of a recipe at once, as `PRESETS` has them; an option beside one wins."""

    quick: bool = measure(
        "Minutes on a CPU: dtype `fast`, 512 tokens of a document, a scheme for 8, 4 and 3 bits.",
        False,
        option=True,
    )


PRESETS: dict[str, dict[str, Any]] = {
    "quick": {
        "schemes": ("rtn-8bit", "gptq-4bit", "gptq-3bit"),
        "dtype": "fast",
        "document_tokens": 512,
        "evaluation_documents": 64,
        "calibration_documents": 64,
        "repeats": 1,
        "arithmetic": False,
    }
}
"""What each preset sets. `fast` is decided with the plan, by the instructions of the processor."""


@dataclass(frozen=True)
class RunOptions:
    """How a plan is run: none of these changes a number."""

    stream_memory: Nbytes | None = compute(
        "Memory for hidden states before they go to disk, as 512MB or 4GB.",
        unset="a quarter of what is free",
    )
    disk_budget: Nbytes | None = compute(
        "Disk space for downloads, as 60GB.", unset="keep everything while it fits"
    )
    update: bool = compute("Ask the Hub again where this plan was made before.", False)
    allow_pickle: bool = compute("Read .bin weights too.", False, option=True)
    trust_remote_code: bool = compute("Run code that a repository contains.", False, option=True)
    keep: tuple[str, ...] = output(
        "Keep the weights under these schemes, for `export`; separated by commas.", (), option=True
    )
    sign: bool = output("Sign the audit with the key in QAUDIT_SIGNING_KEY.", False)
    out: Path | None = output("Output folder.", unset="qaudit-out/TARGET", option=True)


@dataclass(frozen=True)
class Execution:
    """Where a plan is computed, and what is printed meanwhile: settings of the command line."""

    gpus: str | None = execute(
        "Use N GPUs of this machine, or all. Each search for a soup uses one of them.", option=True
    )
    executor: Literal["in-process", "local", "slurm"] | None = execute(
        "in-process, local (a process for each part here) or slurm (a job array).",
        unset="in-process; local with --gpus",
    )
    workers: int = execute("Processes of the executor local without GPUs.", 2, at_least=1)
    parts: int = execute("Tasks of the Slurm array at most.", 16, at_least=1)
    slurm: tuple[str, ...] = execute(
        "Options of sbatch, as `--account=x --gres=gpu:1`; repeatable.", ()
    )
    detach: bool = execute("Submit to Slurm and return; the same command follows.", False)
    threads: int | None = execute(
        "Threads of each part of a plan on a CPU.",
        unset="OMP_NUM_THREADS, or every core",
        at_least=1,
    )
    verbose: bool = execute("Print a line at every block.", False)


@dataclass(frozen=True)
class Sampling:
    """What `rollouts` writes behind prompts."""

    samples: int = sample("Samples of each prompt.", 4, option=True, at_least=0)
    max_tokens: int = sample("Tokens of each sample at most.", 2048, option=True, at_least=1)
    temperature: float | None = sample("Of the sampler.", unset=_OWN, option=True)
    top_k: int | None = sample("Likeliest tokens to draw from; 0: all.", unset=_OWN)
    top_p: float | None = sample("Probability to draw from.", unset=_OWN)
    seed: int = sample("Of all random numbers.", 0, at_least=0)
    greedy: bool = sample("Write the likeliest tokens of each prompt, too.", True)
    server: str | None = sample(
        "A server with OpenAI's completions, as http://127.0.0.1:8000/v1.",
        unset="this machine",
        option=True,
    )
    served_model: str | None = sample("The model's name there.", unset="TARGET")
    marks: Path | None = sample("Marks of samples that were judged since, as JSON lines.")


Settings = type[Recipe] | type[Presets] | type[RunOptions] | type[Execution] | type[Sampling]
GROUPS: tuple[Settings, ...] = (Recipe, Presets, RunOptions, Execution, Sampling)


_KINDS: dict[Any, str] = {
    bool: "true or false",
    float: "a number",
    Nbytes: "a size, as 512MB or 4GB",
    Path: "a path",
    tuple: "texts",
    dict: "a table, as {key: value}",
}


@dataclass(frozen=True)
class Entry:
    """One row of the table, as everything that is made from it reads it."""

    name: str
    type: Any  # without `None`
    optional: bool
    default: Any
    help: str
    panel: str
    unset: str = ""  # what applies by default, where neither the value nor `none` says it
    has_option: bool = False  # or only a key
    flag: str = ""  # the option, where it is not the name with hyphens
    at_least: int | None = None
    at_most: int | None = None

    @property
    def option(self) -> str:
        """The option, as `--bits`; empty where there is only the key."""
        flag = self.flag or f"--{self.name.replace('_', '-')}"
        return flag if self.has_option else ""

    @property
    def variable(self) -> str:
        """The environment variable: QAUDIT_ and the name of the option, or else of the key."""
        return f"QAUDIT_{(self.option or self.name).strip('-').replace('-', '_').upper()}"

    @property
    def kind(self) -> str:
        """What it takes, in words: `a whole number from 2 on`."""
        low, high = self.at_least, self.at_most
        if self.type is int:
            bounds = f" from {low}" * (low is not None) + (f" to {high}" if high else " on")
            return "a whole number" + (bounds if low is not None else "")
        if get_origin(self.type) is Literal:
            return " or ".join(get_args(self.type))
        kind = get_origin(self.type) or self.type
        return _KINDS.get(kind, "a text")

    @property
    def shown_default(self) -> str:
        if self.unset or self.default in (None, ()):
            return self.unset or "none"
        if isinstance(self.default, bool):
            return "true" if self.default else "false"
        return ", ".join(self.default) if isinstance(self.default, tuple) else str(self.default)


def settings_of(*groups: Settings) -> dict[str, Entry]:
    """Return the settings of groups by name, in the order of the table; without one, of all."""
    return {entry.name: entry for group in groups or GROUPS for entry in _TABLE[group]}


def written(name: str, value: Any) -> str:
    """Return a setting as the command line has it: `--set context=512`, or `--bits 4`."""
    return " ".join(words_of(settings_of()[name], value))


def words_of(entry: Entry, value: Any) -> list[str]:
    """Return the words of one value on the command line, unquoted."""
    if entry.option and value is True:
        return [entry.option]
    text = str(value).lower() if isinstance(value, bool) else str(value)
    is_key = isinstance(value, bool) or not entry.option
    return [SET, f"{entry.name}={text}"] if is_key else [entry.option, text]


def _entries(group: Settings) -> Iterator[Entry]:
    hints = get_type_hints(group)
    for setting in fields(group):
        if not setting.metadata:  # `targets`
            continue
        annotation = hints[setting.name]
        optional = NoneType in get_args(annotation)
        if optional:
            (annotation,) = (part for part in get_args(annotation) if part is not NoneType)
        yield Entry(setting.name, annotation, optional, setting.default, **setting.metadata)


_TABLE = {group: [*_entries(group)] for group in GROUPS}
