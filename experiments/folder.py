"""The folder of runs: checkpoints, records, states, and the training log.

    OUT/RUN-stepN/            a checkpoint that `transformers` and `qaudit scan` read, in bf16
    OUT/states/RUN.json       what a run is
    OUT/states/RUN.pt         its latest state: weights, optimizer, averages, step
    OUT/states/RUN-stepN.pt   a state kept to fork from
    OUT/training.jsonl        one line for every tenth step and every step that is saved

`states/` holds no checkpoint, so that a scan of OUT passes it by. Files are replaced whole: a run
that is killed while it writes resumes from the state before. A state carries the run it belongs
to and the keys of its text; resuming with other settings is refused by the name of each, because
the result would be neither run.

**The family file** of a folder of runs: what a checkpoint's name means, and its learning rate.

A run is a stage whose steps count from the end of its parent; its averages are stages of their own
with the same steps. Runs named `X-ingredientN` that fork from one point are the ingredients of one
stage `X`. The schedules are those that were run, so that `qaudit scan` needs no option to know the
learning rate of every checkpoint.
"""

from __future__ import annotations

import errno
import json
import pickle
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from torch import Tensor
from transformers.utils import logging as hf_logging

from experiments.run import TrainingRun, differences, spell
from experiments.text import TokenStream
from qaudit.errors import SourceError, UsageError, not_written
from qaudit.families import FAMILY_FILE, Family
from qaudit.whole import write_whole

FOLDER = "states"
LOG = "training.jsonl"


def write_record(
    out: Path, run: TrainingRun, text_key: str, environment: Mapping[str, Any]
) -> None:
    record = {
        "run": run.table(),
        "key": run.key,
        "text": text_key,
        "environment": dict(environment),
    }
    write_whole(out / FOLDER / f"{run.name}.json", json.dumps(record, indent=1) + "\n")


def must_not_replace(run: TrainingRun, out: Path) -> None:
    """Refuse checkpoints under the names of a run that was never begun here."""
    if (out / FOLDER / f"{run.name}.json").exists():
        return
    for label in (run.label(s, name) for s in run.save_at for name in ("", *run.averages)):
        for path in (out / label, _partial(out / label)):
            if path.exists() or path.is_symlink():
                raise UsageError(
                    f"`{path}` exists, and run `{run.name}`, which did not write it, would "
                    "replace it",
                    hint="choose another name or folder for the run",
                )


def _partial(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def runs_in(out: Path) -> Iterator[TrainingRun]:
    for path in sorted((out / FOLDER).glob("*.json")):
        try:
            yield TrainingRun(**json.loads(path.read_text(encoding="utf-8"))["run"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise SourceError(
                f"`{path}` is not the record of a run", hint="remove it, and train the run again"
            ) from error


def write_checkpoint(
    run: TrainingRun, weights: Mapping[str, Tensor], text: TokenStream, folder: Path
) -> None:
    """Write weights as a checkpoint, in place of one that exists: beside it, and moved whole."""
    with torch.random.fork_rng(devices=[]):
        model = run.shape.uninitialized()
    missing, unexpected = model.load_state_dict(dict(weights), strict=False)
    assert not unexpected, unexpected
    assert run.shape.tied or not missing, missing  # a tied weight has one name of two
    text.tokenizer.model_max_length = run.context
    partial = _partial(folder)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        hf_logging.disable_progress_bar()
        model.bfloat16().save_pretrained(partial)
        text.tokenizer.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not isinstance(error, OSError):  # safetensors writes its number into a sentence
            number = re.search(r"os error (\d+)", str(error))
            cause = OSError(int(number[1]) if number else errno.EIO, str(error))
            raise not_written(folder, cause) from error
        raise not_written(folder, error) from error


def latest_path(out: Path, run: TrainingRun) -> Path:
    return out / FOLDER / f"{run.name}.pt"


def kept_path(out: Path, run: TrainingRun, step: int) -> Path:
    """Return the path of a state that was kept to fork from."""
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
    """Read a state; a damaged one is refused by its path."""
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise SourceError(
            f"the state `{path}` cannot be read", hint="remove it: the run then starts again"
        ) from error
    return state


def own_state(run: TrainingRun, text: TokenStream, out: Path) -> dict[str, Any] | None:
    """Return the latest state of this very run, or None."""
    path = latest_path(out, run)
    if not path.exists():
        return None
    state = read_state(path)
    wrong = differences(TrainingRun(**state["run"]), run)
    if state["text"] != text.key:
        wrong.append(f"`text` was {state['text'][:12]} and is {text.key[:12]}")
    if wrong:
        raise UsageError(
            f"run `{run.name}` in `{out}` was begun with other settings: {'; '.join(wrong)}",
            hint="restore those settings, or choose another name or folder",
        )
    wanted = {at: out / run.label(at) for at in run.save_at}
    wanted |= {at: kept_path(out, run, at) for at in run.keep_at}
    for at, path in sorted(wanted.items()):
        if at <= (step := int(state["step"])) and not path.exists():
            raise UsageError(
                f"run `{run.name}` is at step {step}, and `{path}` of step {at} does not exist",
                hint="leave that step out, or train the run under another name",
            )
    return state


def parent_state(run: TrainingRun, text: TokenStream, place: Path) -> dict[str, Any]:
    """Return the state that a run forks from; `place` is a folder of runs or the state itself."""
    assert run.parent is not None
    path = place if place.is_file() else kept_path(place, run.parent, run.fork_at)
    latest = latest_path(place, run.parent)
    if not path.exists() and latest.exists() and int(read_state(latest)["step"]) == run.fork_at:
        path = latest
    if not path.exists():
        kept = path.parent.glob(f"{run.parent.name}-step*.pt")
        steps = sorted(int(other.stem.rpartition("-step")[2]) for other in kept)
        raise UsageError(
            f"no state of run `{run.parent.name}` at step {run.fork_at} is kept in `{place}`",
            hint=f"kept are {', '.join(map(str, steps)) or 'none'}, and the last of a finished "
            f"run; train it with `--set keep_states=[{run.fork_at}]`",
        )
    state = read_state(path)
    wrong = differences(TrainingRun(**state["run"]), run.parent)
    if int(state["step"]) != run.fork_at:
        wrong.append(f"`fork_at` was {state['step']} and is {run.fork_at}")
    if state["tokenizer"] != text.tokenizer_key:
        wrong.append("`tokenizer` is another")
    if wrong:
        raise UsageError(
            f"`{path}` is not the state that run `{run.name}` forks from: {'; '.join(wrong)}",
            hint="fork from a checkpoint of the parent run",
        )
    return state


def log_line(out: Path, line: Mapping[str, Any]) -> None:
    try:
        with (out / LOG).open("a", encoding="utf-8") as log:
            log.write(json.dumps(dict(line)) + "\n")
    except OSError as error:
        raise not_written(out / LOG, error) from error


def truncate_log(out: Path, run: str, step: int) -> None:
    """Drop the lines of a run past a step: it is about to take those steps again."""
    if not (out / LOG).exists():
        return
    lines = (out / LOG).read_text(encoding="utf-8").splitlines(keepends=True)
    remaining = []
    for line in lines:
        try:
            entry = json.loads(line)
            if entry["run"] != run or entry["step"] <= step:
                remaining.append(line)
        except (ValueError, LookupError, TypeError, RecursionError):
            continue  # cut off when the machine stopped, or not written by `log_line`
    if len(remaining) < len(lines):
        write_whole(out / LOG, "".join(remaining))


_INGREDIENT = re.compile(r"(?P<stage>.+)-ingredient(?P<number>[0-9]+)")


def write_family(out: Path) -> None:
    table = family_table(out.resolve().name, runs_in(out))
    Family.model_validate(table)
    head = "# Written by `python -m experiments`: what the runs in this folder are.\n"
    write_whole(out / FAMILY_FILE, head + yaml.safe_dump(table, sort_keys=False, width=100))


def family_table(name: str, runs: Iterable[TrainingRun]) -> dict[str, Any]:
    all_runs = _with_parents(runs)
    stages: dict[str, dict[str, Any]] = {}
    for run in all_runs:
        name_of_stage = _stage_name(run, all_runs)
        table = _stage(run, name_of_stage, all_runs)
        if (first := stages.setdefault(name_of_stage, table)) is not table:
            first["lr"] += table["lr"]
            first["end_step"] = max(first["end_step"], run.steps)
    averages = ((run, f"{run.name}-{average}") for run in all_runs for average in run.averages)
    stages |= {stage: _stage(run, stage, all_runs) for run, stage in averages}
    for table in stages.values():  # one rate where all ingredients share their schedule
        bare = [{k: v for k, v in rate.items() if k != "ingredients"} for rate in table["lr"]]
        if all(rate == bare[0] for rate in bare):
            table["lr"] = bare[:1]
    contexts = {run.context for run in all_runs}
    return {
        "family": f"lab-{name}",
        "description": "Runs of `python -m experiments`, with the schedules they were trained by.",
        "dtype": "bfloat16",
        **({"context": contexts.pop()} if len(contexts) == 1 else {}),
        "stages": list(stages.values()),
    }


def _with_parents(runs: Iterable[TrainingRun]) -> list[TrainingRun]:
    ordered: dict[str, TrainingRun] = {}

    def add(run: TrainingRun) -> None:
        if run.parent is not None and run.parent.name not in ordered:
            add(run.parent)
        ordered[run.name] = run

    for run in sorted(runs, key=lambda run: run.name):
        add(run)
    return list(ordered.values())


def _stage_name(run: TrainingRun, known: list[TrainingRun]) -> str:
    match = _INGREDIENT.fullmatch(run.name)
    if match is None or any(other.name == match["stage"] for other in known):
        return run.name
    siblings = [other for other in known if other.name.startswith(f"{match['stage']}-ingredient")]
    points = {
        (other.parent.name if other.parent else None, other.fork_at, other.tokens_per_step)
        for other in siblings
    }
    return match["stage"] if len(points) == 1 else run.name


def _stage(run: TrainingRun, stage: str, known: list[TrainingRun]) -> dict[str, Any]:
    match = _INGREDIENT.fullmatch(run.name)
    rate: dict[str, Any] = {**spell(run.schedule), "units": "steps"}
    middle = ""
    if match is not None and match["stage"] == stage:
        rate["ingredients"] = [int(match["number"])]
        middle = r"-ingredient(?P<ingredient>\d+)"
    table: dict[str, Any] = {
        "name": stage,
        "pattern": rf"{re.escape(stage)}{middle}-step(?P<step>\d+)",
        "lr": [rate],
        "tokens_per_step": run.tokens_per_step,
        "end_step": run.steps,
    }
    if run.parent is not None:
        parent = next(other for other in known if other.name == run.parent.name)
        table["starts_after"] = f"{_stage_name(parent, known)}@{run.fork_at}"
    return table
