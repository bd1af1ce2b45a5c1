"""What a person asks for in a few words -> a run with everything said.

What is not given follows from what is: the schedule ends where the run does, the last fifth of a
warmup-stable-decay run decays, a hundredth of a run from the start is warm-up, and the fork of a
run is trained like the run unless it is said otherwise, from the rate at which it left if there
was any. A batch is computed in parts that fit a cache, or the memory of a GPU
(`benchmarks/training.py` has what that is worth).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qaudit.core.keys import nearest
from qaudit.core.schedules import Schedule, build
from qaudit.errors import UsageError
from qaudit.lab.records import runs_in
from qaudit.lab.run import ATTENTIONS, Run
from qaudit.lab.shapes import Shape, preset

SCHEDULES = ("constant", "wsd", "cosine", "linear", "sgdr", "oli")
SAVES = 10
"""Checkpoints of a run, where it is not said which."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of a run; what is None was not given."""

    name: str | None = None
    shape: str | None = None
    sizes: Mapping[str, int | bool | None] = field(default_factory=dict)
    schedule: str = "wsd"
    rates: Mapping[str, float | str | None] = field(default_factory=dict)  # peak, warmup, ...
    decay_share: float | None = None
    steps: int
    save_every: int | None = None
    save_at: tuple[int, ...] = ()
    attention: str = "auto"
    training: Mapping[str, Any] = field(default_factory=dict)  # fields of Run, as they are
    fork: Path | None = None


def run_asked(asked: Asked, device: str) -> Run:
    """Return the run that is asked for, to be trained on a kind of device."""
    parent, fork_at = _forked(asked.fork) if asked.fork else (None, 0)
    shape = _shape(asked, parent)
    fields: dict[str, Any] = {"batch": 32, "seed": 1}
    if parent is not None:
        fields = {name: getattr(parent, name) for name in _INHERITED}
        fields |= {"parent": parent, "fork_at": fork_at}
    fields |= {name: value for name, value in asked.training.items() if value is not None}
    fields.setdefault("accumulation", _parts(fields["batch"], shape.context, device))
    return Run(
        name=asked.name or asked.schedule,
        shape=shape,
        schedule=_schedule(asked, parent, fork_at),
        steps=asked.steps,
        save_at=_saved(asked),
        attention=_attention(asked.attention, device, shape, parent),
        **fields,
    )


_INHERITED = ("batch", "seed", "weight_decay", "betas", "clip", "precision")
_PART_TOKENS = {"cpu": 2048, "mps": 8192, "cuda": 16_384}


def _parts(batch: int, context: int, device: str) -> int:
    """Return in how many equal parts a batch is computed."""
    most = max(1, _PART_TOKENS[device] // context)  # windows of a part
    return next(
        parts for parts in range(1, batch + 1) if batch % parts == 0 and batch // parts <= most
    )


def fork_folder(fork: Path) -> Path:
    """Return the folder of runs that the checkpoint to fork from lies in."""
    return fork.parent


def _forked(fork: Path) -> tuple[Run, int]:
    """Read `FOLDER/RUN-stepN`: the run there and the step of it."""
    match = re.fullmatch(r"(?P<name>.+)-step(?P<step>[0-9]{1,18})", fork.name)
    if match is None:
        raise UsageError(
            f"`{fork}` does not name a checkpoint to fork from",
            hint="write the folder of one, such as `runs/one/stage1-step500`",
        )
    runs = {run.name: run for run in runs_in(fork_folder(fork))}
    if match["name"] not in runs:
        raise UsageError(
            f"there is no run `{match['name']}` in `{fork_folder(fork)}`",
            hint=nearest(match["name"], runs) if runs else "train one there first",
        )
    return runs[match["name"]], int(match["step"])


def _shape(asked: Asked, parent: Run | None) -> Shape:
    if parent is None or asked.shape is not None:
        return preset(asked.shape or "olmo2-1m", **asked.sizes)
    given: dict[str, Any] = {k: v for k, v in asked.sizes.items() if v is not None}
    return replace(parent.shape, **given)


def _schedule(asked: Asked, parent: Run | None, fork_at: int) -> Schedule:
    if asked.schedule not in SCHEDULES:
        raise UsageError(
            f"there is no schedule `{asked.schedule}`", hint=nearest(asked.schedule, SCHEDULES)
        )
    given = {name: value for name, value in asked.rates.items() if value is not None}
    left = parent.schedule.at(fork_at) or parent.schedule.peak if parent else 3e-3
    given.setdefault("peak", left)
    given.setdefault("warmup", 0 if parent else round(asked.steps / 100))
    if not 0 <= float(given["warmup"]) < asked.steps:
        raise UsageError(
            f"`warmup` is {given['warmup']:g}", hint=f"from 0 to below the {asked.steps} steps"
        )
    if asked.schedule in ("cosine", "linear", "oli"):
        given["end"] = asked.steps
    if asked.schedule == "wsd":
        given |= _decay(asked)
    elif asked.decay_share is not None:
        raise UsageError(
            f"schedule `{asked.schedule}` has no `decay_share`", hint="leave it out, or take `wsd`"
        )
    try:
        return build(asked.schedule, **given)
    except ValueError as error:
        raise UsageError(str(error), hint="mend what is named, or leave it out") from error


def _decay(asked: Asked) -> dict[str, float]:
    share = 0.2 if asked.decay_share is None else asked.decay_share
    if not 0 < share <= 1:
        raise UsageError(f"`decay_share` is {share:g}", hint="above 0, and at most 1")
    length = max(1, round(share * asked.steps))
    return {"decay_start": asked.steps - length, "decay_length": length}


def _saved(asked: Asked) -> tuple[int, ...]:
    if asked.save_at and asked.save_every is not None:
        raise UsageError("both `save_at` and `save_every` are given", hint="leave one of them out")
    if asked.save_at:
        return tuple(sorted({*asked.save_at, asked.steps}))
    every = asked.save_every or max(1, asked.steps // SAVES)
    return tuple(sorted({*range(every, asked.steps + 1, every), asked.steps}))


def _attention(asked: str, device: str, shape: Shape, parent: Run | None) -> str:
    """Return how attention is computed: whole matrices are faster on CPUs, while they fit."""
    if asked != "auto":
        return asked
    if parent is not None:
        return parent.attention
    return ATTENTIONS[1] if device == "cpu" and shape.context <= 512 else ATTENTIONS[0]
