"""The configuration of a training: YAML keys -> a run with every field filled in.

What a file leaves out follows from the rest: the schedule ends where the run does, the last fifth
of a warmup-stable-decay run decays, the first hundredth of a run is warm-up. A fork is trained
like its parent where the file says nothing else, from the learning rate at which it left. A batch
is computed in parts that fit a cache, or the memory of a GPU (`benchmarks/training.py` measures
what that is worth).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from experiments.document import STRICT, LabDocument, lay_over, read_document
from experiments.folder import runs_in
from experiments.run import Name, Steps, Training, TrainingRun, schedule_of
from experiments.shapes import PRESETS, Count, ModelShape
from qaudit.core.schedules import Schedule
from qaudit.errors import UsageError
from qaudit.support.keys import as_list, nearest

if TYPE_CHECKING:
    from experiments.text import Progress, TokenStream

SCHEDULES = ("constant", "wsd", "cosine", "linear", "sgdr", "oli")
_SAVES = 10  # checkpoints of a run that names none
_PART_TOKENS = {"cpu": 2048, "mps": 8192, "cuda": 16_384}
_INHERITED = ("batch", "seed", "weight_decay", "betas", "clip", "precision")
_PRESET = "olmo2-1m"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config(Training):
    """The keys of a training file."""

    name: Name | None = None  # by default the schedule's kind
    model: dict[str, Any] = Field(default_factory=dict)  # `preset`, and sizes to change
    schedule: Annotated[
        dict[str, Any], BeforeValidator(lambda kind: {"kind": kind} if type(kind) is str else kind)
    ] = Field(default_factory=dict)
    steps: Count = 2000
    fork: Path | None = None  # a checkpoint of a run, to start from with its optimizer's state
    save_every: Count | None = None  # by default a tenth of the run
    save_at: Steps = ()
    keep_states: Steps = ()  # steps to fork from later; the last one always is
    accumulation: Count | None = None  # by default what fits a cache
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    text: Annotated[
        tuple[str, ...], BeforeValidator(as_list)
    ] = ()  # files, folders; or Python's own
    tokenizer: Path | None = None  # the folder of one; by default one is trained
    threads: Count | None = None  # on a CPU; results differ in the last bits
    state_every: Count = 250  # steps between states, from which a killed run resumes


def read_config(path: Path | None, settings: Sequence[str] = ()) -> tuple[Config, LabDocument]:
    if path is None:
        document = LabDocument()
        lay_over(document, settings)
    else:
        document = read_document(path, "a training configuration", settings)
    config = document.check(Config, document.table)
    if config.save_at and config.save_every is not None:
        raise document.refuse(
            "`save_at` and `save_every` exclude each other", "leave one out", ("save_every",)
        )
    return config, document


def run_of(config: Config, document: LabDocument, device: str) -> TrainingRun:
    parent, fork_at = _parent(config.fork) if config.fork else (None, 0)
    shape = _shape(config, document, parent)
    inherited = () if parent is None else set(_INHERITED) - set(document.table)
    values: dict[str, Any] = {
        f.name: getattr(parent if f.name in inherited else config, f.name) for f in fields(Training)
    }
    batch, windows = values["batch"], max(1, _PART_TOKENS[device] // shape.context)
    parts = (n for n in range(1, batch + 1) if batch % n == 0 and batch // n <= windows)
    every = config.save_every or max(1, config.steps // _SAVES)
    saved = config.save_at or range(every, config.steps + 1, every)
    # Whole matrices of attention are faster on CPUs while they fit.
    attention = "eager" if device == "cpu" and shape.context <= 512 else "sdpa"
    if config.attention != "auto":
        attention = config.attention
    elif parent is not None:
        attention = parent.attention
    kind = str(config.schedule.get("kind", "wsd"))
    values |= {
        "name": config.name or kind,
        "shape": shape,
        "schedule": _schedule(kind, config, document, parent, fork_at),
        "steps": config.steps,
        "save_at": tuple(sorted({*saved, config.steps})),
        "keep_at": config.keep_states,
        "accumulation": config.accumulation or next(parts),
        "attention": attention,
        "parent": parent,
        "fork_at": fork_at,
    }
    return document.check(TrainingRun, values)


def _parent(fork: Path) -> tuple[TrainingRun, int]:
    """Read `FOLDER/RUN-stepN`: the run there, and the step."""
    match = re.fullmatch(r"(?P<name>.+)-step(?P<step>[0-9]{1,18})", fork.name)
    if match is None:
        raise UsageError(
            f"`fork` is `{fork}`, which names no checkpoint of a run",
            hint="write the folder of one, such as `runs/one/stage1-step500`",
        )
    runs = {run.name: run for run in runs_in(fork.parent)}
    if match["name"] not in runs:
        raise UsageError(
            f"there is no run `{match['name']}` in `{fork.parent}`",
            hint=nearest(match["name"], runs) if runs else "train one there first",
        )
    return runs[match["name"]], int(match["step"])


def _shape(config: Config, document: LabDocument, parent: TrainingRun | None) -> ModelShape:
    sizes = dict(config.model)
    name = sizes.pop("preset", None)
    if name is not None and name not in PRESETS:
        place = ("model", "preset")
        raise document.refuse(f"there is no model `{name}`", nearest(str(name), PRESETS), place)
    base = parent.shape if parent and name is None else PRESETS[name or _PRESET]
    sizes = {**asdict(base), **sizes}
    if config.tokenizer is not None and "vocabulary" not in config.model:
        from experiments.text import entries_of  # imports transformers

        sizes["vocabulary"] = entries_of(config.tokenizer)
    return document.check(ModelShape, sizes, ("model",))


def _schedule(
    kind: str, config: Config, document: LabDocument, parent: TrainingRun | None, fork_at: int
) -> Schedule:
    if kind not in SCHEDULES:
        place = ("schedule", "kind") if "kind" in config.schedule else ("schedule",)
        raise document.refuse(f"there is no schedule `{kind}`", nearest(kind, SCHEDULES), place)
    rates = {key: value for key, value in config.schedule.items() if key != "kind"}
    peak = parent.schedule.at(fork_at) or parent.schedule.peak if parent else 3e-3
    warmup = 0 if parent else round(config.steps / 100)
    try:
        if kind == "wsd":
            share = rates.pop("decay_share", 0.2)
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
                raise ValueError(f"`decay_share` is {share}, and it must be above 0 and at most 1")
            length = max(1, round(share * config.steps))
            rates.setdefault("decay_start", config.steps - length)
            rates.setdefault("decay_length", length)
        schedule = schedule_of(kind, rates, peak=peak, warmup=warmup, end=config.steps)
        if not 0 <= schedule.warmup < config.steps:
            raise ValueError(f"`warmup` is {schedule.warmup:g} of {config.steps} steps")
    except ValueError as error:
        raise document.refuse(str(error), "fix it, or leave it out", ("schedule",)) from error
    return schedule


def prepare_text(config: Config, run: TrainingRun, out: Path, progress: Progress) -> TokenStream:
    """Return the text to train on; a fork into another folder uses its parent's tokenizer."""
    from experiments.text import prepare

    tokenizer = config.tokenizer
    if tokenizer is None and config.fork and config.fork.parent.resolve() != out.resolve():
        tokenizer = config.fork.parent / "text" / "tokenizer"
    return prepare(
        out / "text",
        sources=config.text,
        vocabulary=run.shape.vocabulary,
        tokenizer=tokenizer,
        progress=progress,
    )
