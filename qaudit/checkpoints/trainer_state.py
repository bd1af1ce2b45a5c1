"""Read `trainer_state.json`, which HF Trainer writes beside a checkpoint: step, tokens, rates."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qaudit.errors import SourceError
from qaudit.whole import read_regular

FILE = "trainer_state.json"

_LARGEST_NBYTES = 256_000_000  # a line for each of a million steps
_LARGEST_NUMBER = 1 << 53


@dataclass(frozen=True)
class TrainerState:
    """What is known of a checkpoint's place in its run; all empty where there is no file."""

    step: int | None = None
    tokens: int | None = None
    rates: Mapping[int, float] = field(default_factory=dict)  # step -> learning rate logged at it


def read_trainer_state(folder: Path) -> TrainerState:
    """Return the state beside a checkpoint; refuse a file that Trainer cannot have written."""
    path = folder / FILE
    if not path.is_file():
        return TrainerState()
    try:
        if path.stat().st_size > _LARGEST_NBYTES:
            raise ValueError(f"it is larger than {_LARGEST_NBYTES // 10**6} MB")
        return _parsed(json.loads(read_regular(path).decode()))
    except (OSError, ValueError, RecursionError) as error:
        why = "it nests too deep" if isinstance(error, RecursionError) else error
        raise SourceError(
            f"`{path}` cannot be read: {why}", hint="fix it, or remove it from the folder"
        ) from error


def _parsed(state: Any) -> TrainerState:
    if not isinstance(state, dict):
        raise ValueError("it is not a table of keys")
    log = state.get("log_history") or []
    if not isinstance(log, list):
        raise ValueError("`log_history` is not a list")
    rates: dict[int, float] = {}
    for line in log:
        if not isinstance(line, dict):
            raise ValueError("a line of `log_history` is not a table of keys")
        step, rate = line.get("step"), line.get("learning_rate")
        if isinstance(step, int) and rate is not None:
            rates.setdefault(step, _rate(rate))
    return TrainerState(
        step=_count(state, "global_step"),
        tokens=_count(state, "num_input_tokens_seen") or None,
        rates=rates,
    )


def _count(state: Mapping[str, Any], key: str) -> int | None:
    value = state.get(key)
    if isinstance(value, float) and value.is_integer():  # numbers of tokens are logged as floats
        value = int(value)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST_NUMBER:
        raise ValueError(f"`{key}` is not a whole number from 0 to 2^53")
    return value


def _rate(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError("a `learning_rate` of `log_history` is not a number")
    if not 0 <= value < _LARGEST_NUMBER or not math.isfinite(value):
        raise ValueError("a `learning_rate` of `log_history` is out of range")
    return float(value)
