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

MEASURE, TEXT, COMPUTE, OUTPUT = "What to measure", "Text", "How to compute", "Output"
EXECUTE, SAMPLE = "Where to compute", "What to write"
_OWN = "the checkpoint's"
_LONGEST = 1 << 24  # tokens; the longest that a model of today claims is 10 million
SET = "--set"


@dataclass(frozen=True)
class Setting:
    """What a setting is for, beyond its name, type and default."""

    help: str
    panel: str
    unset: str = ""  # what applies by default, where the default value does not show it
    option: bool = False  # or only a key
    flag: str = ""  # the option, where it is not the name with hyphens
    at_least: int | None = None
    at_most: int | None = None


def setting(text: str, panel: str, default: Any = None, **more: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(text, panel, **more)})


@dataclass(frozen=True)
class Recipe:
    """What to measure: nothing resolved, nothing priced."""

    targets: tuple[str, ...]
    schemes: tuple[str, ...] = setting(
        "Schemes or sets of them (`qaudit list sets`), separated by commas or repeated.",
        MEASURE,
        DEFAULT_SCHEMES,
        option=True,
    )
    checkpoints: tuple[str, ...] = setting(
        "Only these: a name, a glob, or `stage1@100k..900k/50k`; repeatable.",
        MEASURE,
        (),
        unset="all; of more than 16, a selection",
        option=True,
    )
    bits: tuple[str, ...] = setting(
        "Classes of bits per weight to decide, as 4,3.",
        MEASURE,
        (),
        unset="all that are measured",
        option=True,
    )
    last: int | None = setting("Only the latest N checkpoints.", MEASURE, unset="all", at_least=1)
    soups: tuple[str, ...] = setting(
        "A soup: `A+B+C`, or a glob; repeatable.",
        MEASURE,
        (),
        unset="none",
        option=True,
        flag="--soup",
    )
    shipped: tuple[str, ...] = setting(
        "A file or repository of the target that is quantized already; repeatable.",
        MEASURE,
        (),
        unset="none",
        option=True,
    )
    reference: str | None = setting(
        "A target or label: every other subject is compared with it, in KL and tasks.",
        MEASURE,
        unset="none",
    )
    calibration: str | None = setting(
        "Calibration text: a file, or hf://datasets/org/name/path.",
        TEXT,
        unset="C4 for Hub models, Python's own text for folders",
        option=True,
    )
    evaluation: str | None = setting(
        "Evaluation text: a file, or hf://datasets/org/name/path.",
        TEXT,
        unset="C4 for Hub models, Python's own text for folders",
        option=True,
    )
    strata: str | None = setting(
        "Field of the evaluation text, as `source`: shows the errors of each of its values.",
        TEXT,
        unset="none",
    )
    chat_template: str | None = setting(
        "Jinja file that renders `messages` of the text.", TEXT, unset="the checkpoint's own"
    )
    score: Literal["answer", "all"] = setting(
        "Tokens of `messages` that are scored: answer (what the model wrote) or all.",
        TEXT,
        "answer",
    )
    reasoning: str | None = setting(
        "What begins and ends reasoning in them, as `<think> </think>`.",
        TEXT,
        unset="the markers of the template",
    )
    rollouts: str | None = setting(
        "Folder with rollouts, as `qaudit rollouts` writes it: scored in the same pass.",
        TEXT,
        unset="none",
    )
    choices: str | None = setting("Multiple-choice items to score: .jsonl.", TEXT, unset="none")
    tasks: tuple[str, ...] = setting(
        "Tasks, separated by commas: paper-a, names of lm-eval, a folder of its YAML files.",
        TEXT,
        (),
        unset="none",
        option=True,
    )
    task_items: str = setting("At most N items of each task, drawn at random, or all.", TEXT, "500")
    task_shots: int | None = setting(
        "Examples before each question.", TEXT, unset="5, or as the task's file says", at_least=0
    )
    task_data: str | None = setting(
        "Folder with data sets of tasks, as org/name.", TEXT, unset="from the Hub"
    )
    context: int | None = setting(
        "Window length in tokens.",
        TEXT,
        unset="the model's longest, at most 2048",
        at_least=2,
        at_most=_LONGEST,
    )
    bos: Literal["auto", "always", "never"] = setting(
        "Start each window with a BOS token: auto, always or never.", TEXT, "auto"
    )
    packed: bool = setting("Fill windows across documents.", TEXT, False)
    evaluation_documents: int = setting("At most N evaluation documents.", TEXT, 64, at_least=2)
    calibration_documents: int = setting("At most N calibration documents.", TEXT, 64, at_least=1)
    document_tokens: int | None = setting(
        "At most N tokens of each document.", TEXT, unset="all", at_least=2
    )
    calibration_seed: int = setting(
        "Another seed draws other calibration text.", TEXT, 0, at_least=0
    )
    repeats: int = setting(
        "Draws of calibration text, each measured: how much depends on the draw.",
        TEXT,
        1,
        at_least=1,
        at_most=16,
    )
    device: str = setting(
        "auto (a CUDA GPU, else the CPU), cpu, cuda (the one with most free memory) or cuda:1.",
        COMPUTE,
        "auto",
        option=True,
    )
    dtype: Literal["auto", "fast", "float32", "bfloat16", "float16"] = setting(
        "auto (bfloat16 on a GPU that supports it, else float32), fast (bfloat16 on a processor "
        "with instructions for it, too), float32, bfloat16 or float16.",
        COMPUTE,
        "auto",
    )
    arithmetic: bool = setting(
        "Round what ships otherwise too, for a tenth of the scan at most: what arithmetic moves.",
        COMPUTE,
        True,
    )
    routing: Literal["own", "reference"] = setting(
        "Who chooses experts: own (each stream's routers) or reference (full precision's choice).",
        COMPUTE,
        "own",
    )
    confidence: float = setting("Confidence level of intervals.", MEASURE, 0.95)
    schedule: dict[str, Any] | None = setting(
        "Learning-rate schedule of the run.", MEASURE, unset="as the family says"
    )
    family: str | None = setting(
        "Family that explains checkpoint names; see `qaudit list families`.",
        MEASURE,
        unset="recognized by the names",
    )
    diagnostics: tuple[str, ...] = setting(
        "Why it breaks: weights, sensitivity, curvature, plane, positions, or all.",
        MEASURE,
        (),
        unset="none",
    )
    policy: str = setting(
        "Policy that judges findings: explore, release, strict or a file.",
        OUTPUT,
        "release",
        option=True,
    )


@dataclass(frozen=True)
class Presets:
    """Several keys of a recipe at once, as `PRESETS` has them; an option beside one wins."""

    quick: bool = setting(
        "Minutes on a CPU: dtype `fast`, 512 tokens of a document, a scheme for 8, 4 and 3 bits.",
        MEASURE,
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
    },
}
"""What each preset sets. `fast` is decided with the plan, by the instructions of the processor."""


@dataclass(frozen=True)
class RunOptions:
    """How a plan is run: none of these changes a number."""

    stream_memory: Nbytes | None = setting(
        "Memory for hidden states before they go to disk, as 512MB or 4GB.",
        COMPUTE,
        unset="a quarter of what is free",
    )
    disk_budget: Nbytes | None = setting(
        "Disk space for downloads, as 60GB.", COMPUTE, unset="keep everything while it fits"
    )
    update: bool = setting("Ask the Hub again where this plan was made before.", COMPUTE, False)
    allow_pickle: bool = setting("Read .bin weights too.", COMPUTE, False, option=True)
    trust_remote_code: bool = setting(
        "Run code that a repository contains.", COMPUTE, False, option=True
    )
    keep: tuple[str, ...] = setting(
        "Keep the weights under these schemes, for `export`; separated by commas.",
        OUTPUT,
        (),
        unset="none",
        option=True,
    )
    sign: bool = setting("Sign the audit with the key in QAUDIT_SIGNING_KEY.", OUTPUT, False)
    out: Path | None = setting("Output folder.", OUTPUT, unset="qaudit-out/TARGET", option=True)


@dataclass(frozen=True)
class Execution:
    """Where a plan is computed, and what is printed meanwhile: settings of the command line."""

    gpus: str | None = setting(
        "Use N GPUs of this machine, or all. Each search for a soup uses one of them.",
        EXECUTE,
        unset="none",
        option=True,
    )
    executor: Literal["in-process", "local", "slurm"] | None = setting(
        "in-process, local (a process for each part here) or slurm (a job array).",
        EXECUTE,
        unset="in-process; local with --gpus",
    )
    workers: int = setting("Processes of the executor local without GPUs.", EXECUTE, 2, at_least=1)
    parts: int = setting("Tasks of the Slurm array at most.", EXECUTE, 16, at_least=1)
    slurm: tuple[str, ...] = setting(
        "Options of sbatch, as `--account=x --gres=gpu:1`; repeatable.", EXECUTE, (), unset="none"
    )
    detach: bool = setting("Submit to Slurm and return; the same command follows.", EXECUTE, False)
    threads: int | None = setting(
        "Threads of each part of a plan on a CPU.",
        EXECUTE,
        unset="OMP_NUM_THREADS, or every core",
        at_least=1,
    )
    verbose: bool = setting("Print a line at every block.", EXECUTE, False)


@dataclass(frozen=True)
class Sampling:
    """What `rollouts` writes behind prompts."""

    samples: int = setting("Samples of each prompt.", SAMPLE, 4, option=True, at_least=0)
    max_tokens: int = setting(
        "Tokens of each sample at most.", SAMPLE, 2048, option=True, at_least=1
    )
    temperature: float | None = setting("Of the sampler.", SAMPLE, unset=_OWN, option=True)
    top_k: int | None = setting("Likeliest tokens to draw from; 0: all.", SAMPLE, unset=_OWN)
    top_p: float | None = setting("Probability to draw from.", SAMPLE, unset=_OWN)
    seed: int = setting("Of all random numbers.", SAMPLE, 0, at_least=0)
    greedy: bool = setting("Write the likeliest tokens of each prompt, too.", SAMPLE, True)
    server: str | None = setting(
        "A server with OpenAI's completions, as http://127.0.0.1:8000/v1.",
        SAMPLE,
        unset="this machine",
        option=True,
    )
    served_model: str | None = setting("The model's name there.", SAMPLE, unset="TARGET")
    marks: Path | None = setting(
        "Marks of samples that were judged since, as JSON lines.", SAMPLE, unset="none"
    )


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
    setting: Setting

    @property
    def option(self) -> str:
        """The option, as `--bits`; empty where there is only the key."""
        flag = self.setting.flag or f"--{self.name.replace('_', '-')}"
        return flag if self.setting.option else ""

    @property
    def variable(self) -> str:
        """The environment variable: QAUDIT_ and the name of the option, or else of the key."""
        return f"QAUDIT_{(self.option or self.name).strip('-').replace('-', '_').upper()}"

    @property
    def kind(self) -> str:
        """What it takes, in words: `a whole number from 2 on`."""
        low, high = self.setting.at_least, self.setting.at_most
        if self.type is int:
            bounds = f" from {low}" * (low is not None) + (f" to {high}" if high else " on")
            return "a whole number" + (bounds if low is not None else "")
        if get_origin(self.type) is Literal:
            return " or ".join(get_args(self.type))
        kind = get_origin(self.type) or self.type
        return _KINDS.get(kind, "a text")

    @property
    def shown_default(self) -> str:
        if self.setting.unset:
            return self.setting.unset
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
        if "setting" not in setting.metadata:  # `targets`
            continue
        annotation = hints[setting.name]
        optional = NoneType in get_args(annotation)
        if optional:
            (annotation,) = (part for part in get_args(annotation) if part is not NoneType)
        yield Entry(
            setting.name, annotation, optional, setting.default, setting.metadata["setting"]
        )


_TABLE = {group: [*_entries(group)] for group in GROUPS}
