"""Marks of rollouts: answers as text for whatever judges them, and its verdicts back.

`answers.jsonl` has the text of each sample. A file of marks has a line for each, in any order:

    {"prompt": 0, "sample": 1, "greedy": false, "correct": true}

with `score`, a number, in place of `correct` where answers are worth more or less, and `reads`, the
number of tokens from the first that were read, where the others decided nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qaudit.core.foreign import json_of
from qaudit.errors import CorpusError
from qaudit.rollouts.folder import Key, key_of, write_lines
from qaudit.text.rollouts import Rollout, read_rollouts
from qaudit.whole import read_regular, write_whole

TEXTS = "answers.jsonl"
_FORM = 'write {"prompt": 0, "sample": 0, "greedy": false, "correct": true} on each line'


def write_texts(folder: Path, tokenizer: Any) -> None:
    lines = []
    for sample in read_rollouts(folder).samples:
        text = tokenizer.decode(sample.new_ids, skip_special_tokens=True)
        place = {"prompt": sample.prompt, "sample": sample.sample, "greedy": sample.greedy}
        lines.append(json.dumps({**place, "text": text}) + "\n")
    write_whole(folder / TEXTS, "".join(lines))


def add_marks(folder: Path, path: Path) -> None:
    """Put the marks of a file into a folder of rollouts; CorpusError names what is wrong."""
    rollouts = read_rollouts(folder)
    marks = read_marks(path)
    keys = {key_of(sample) for sample in rollouts.samples}
    if strange := [key for key in marks if key not in keys]:
        prompt, sample, greedy = strange[0]
        kind = "greedy" if greedy else f"{sample}th"
        raise CorpusError(
            f"`{path}` marks the {kind} sample of prompt {prompt}, which `{folder}` does not have",
            hint=f"mark those that `{folder / TEXTS}` has",
        )
    marked = [_with_mark(sample, marks.get(key_of(sample), {})) for sample in rollouts.samples]
    write_lines(folder, marked, rollouts.header)


def read_marks(path: Path) -> dict[Key, Mapping[str, Any]]:
    """Read a file of marks; CorpusError says what is wrong with it."""
    try:
        lines = [line for line in read_regular(path).decode().split("\n") if line.strip()]
        marks = {}
        for number, line in enumerate(lines, 1):
            mark = json_of(line)
            key = (mark["prompt"], mark.get("sample", 0), mark.get("greedy", False))
            if [type(part) for part in key] != [int, int, bool] or not _is_mark(mark):
                raise ValueError(f"line {number} is no mark")
            if key in marks:
                raise ValueError(f"line {number} marks a sample again")
            marks[key] = mark
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise CorpusError(f"`{path}` cannot be read: {reason}", hint=_FORM) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CorpusError(f"`{path}` cannot be read as marks: {error}", hint=_FORM) from error
    return marks


def _is_mark(mark: Mapping[str, Any]) -> bool:
    """Return whether there is one of a verdict and a finite score."""
    correct, score, reads = mark.get("correct"), mark.get("score"), mark.get("reads", 1)
    if type(reads) is not int or reads < 1:
        return False
    if correct is not None:
        return isinstance(correct, bool) and score is None
    return isinstance(score, int | float) and math.isfinite(score)


def _with_mark(sample: Rollout, mark: Mapping[str, Any]) -> Rollout:
    score = mark.get("score")
    worth, reads = None if score is None else float(score), mark.get("reads")
    reads = None if reads is None else min(reads, len(sample.new_ids))
    if not mark:
        return sample
    return replace(sample, correct=mark.get("correct"), score=worth, reads=reads)
