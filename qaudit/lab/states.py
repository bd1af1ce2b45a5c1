"""What a run needs to go on, and to be forked from: its states, kept beside its checkpoints.

`OUT/states/RUN.pt` is the latest state of a run, `OUT/states/RUN-stepN.pt` one that was kept to
fork from. A file is written beside its place and moved there whole, so that a run which is
killed while it writes goes on from the state before. Every state carries the run it belongs to
and the keys of its text: going on with other settings is refused by the name of each setting,
because the result would be neither run.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from qaudit.errors import SourceError, UsageError, not_written
from qaudit.lab.records import FOLDER
from qaudit.lab.run import Run, differences, run_of
from qaudit.lab.text import TokenStream


def latest_path(out: Path, run: Run) -> Path:
    """Return where the latest state of a run lies."""
    return out / FOLDER / f"{run.name}.pt"


def kept_path(out: Path, run: Run, step: int) -> Path:
    """Return where the state of a run at a step lies, if it was to be kept."""
    return out / FOLDER / f"{run.name}-step{step}.pt"


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state whole or not at all."""
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            torch.save(dict(state), file)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise not_written(path, error) from error


def read_state(path: Path) -> dict[str, Any]:
    """Read a state; a damaged one is named."""
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise SourceError(
            f"the state `{path}` cannot be read", hint="remove it: the run then starts again"
        ) from error
    return state


# ------------------------------------------------------------------------ what may be gone on from


def own_state(run: Run, text: TokenStream, out: Path) -> dict[str, Any] | None:
    """Return the latest state of this very run, or nothing where there is none."""
    path = latest_path(out, run)
    if not path.exists():
        return None
    state = read_state(path)
    wrong = differences(run_of(state["run"]), run)
    if state["text"] != text.key:
        wrong.append(f"`text` was {state['text'][:12]} and is {text.key[:12]}")
    if wrong:
        raise UsageError(
            f"run `{run.name}` in `{out}` was begun otherwise: {'; '.join(wrong)}",
            hint="give the settings it was begun with, or another name or folder",
        )
    _must_be_there(run, out, int(state["step"]))
    return state


def _must_be_there(run: Run, out: Path, step: int) -> None:
    """Refuse to go on past a step that is asked for only now."""
    wanted = {at: out / run.label(at) for at in run.save_at}
    wanted |= {at: kept_path(out, run, at) for at in run.keep_at}
    for at, path in sorted(wanted.items()):
        if at <= step and not path.exists():
            raise UsageError(
                f"run `{run.name}` stands at step {step}, and `{path}` of step {at} is not there",
                hint="leave that step out, or train the run under another name",
            )


def parent_state(run: Run, text: TokenStream, place: Path) -> dict[str, Any]:
    """Return the state that a run forks from; `place` is a folder of runs or the state itself."""
    assert run.parent is not None
    path = place if place.is_file() else _found(run.parent, run.fork_at, place)
    state = read_state(path)
    wrong = differences(run_of(state["run"]), run.parent)
    if int(state["step"]) != run.fork_at:
        wrong.append(f"`fork_at` was {state['step']} and is {run.fork_at}")
    if state["tokenizer"] != text.tokenizer_key:
        wrong.append("`tokenizer` is another")
    if wrong:
        raise UsageError(
            f"`{path}` is not what run `{run.name}` forks from: {'; '.join(wrong)}",
            hint="fork from the run that is meant",
        )
    return state


def _found(parent: Run, step: int, place: Path) -> Path:
    kept, latest = kept_path(place, parent, step), latest_path(place, parent)
    if kept.exists():
        return kept
    if latest.exists() and int(read_state(latest)["step"]) == step:
        return latest
    steps = sorted(
        int(p.stem.rpartition("-step")[2]) for p in kept.parent.glob(f"{parent.name}-step*.pt")
    )
    raise UsageError(
        f"no state of run `{parent.name}` at step {step} is kept in `{place}`",
        hint=f"kept are {', '.join(map(str, steps)) or 'none'}, and the last of a finished run; "
        f"train it with `--keep-states {step}`",
    )
