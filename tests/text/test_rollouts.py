"""Rollouts in a folder: what is written is read, and any damage is one sentence."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from qaudit.errors import CorpusError
from qaudit.text.rollouts import (
    HEADER,
    LINES,
    Rollout,
    RolloutHeader,
    Rollouts,
    Sampler,
    line_of,
    read_rollouts,
    text_of,
)

SAMPLES = (
    Rollout(prompt=0, prompt_sha256="aa", ids=(1, 2), new_ids=(3, 4, 5), greedy=True),
    Rollout(prompt=0, prompt_sha256="aa", ids=(1, 2), new_ids=(3,), finished=True, correct=True),
    Rollout(prompt=1, prompt_sha256="bb", ids=(1,), new_ids=(9,), sample=1, score=0.25),
)


def written(folder: Path, samples: tuple[Rollout, ...] = SAMPLES) -> Rollouts:
    """Write samples with their header."""
    lines = "".join(map(line_of, samples))
    header = RolloutHeader(
        format=1,
        target="org/model",
        revision="main",
        weights_sha256="cc",
        tokenizer_sha256="dd",
        sampler=Sampler(temperature=0.7, top_k=20),
        seed=0,
        count=len(samples),
        rollouts_sha256=hashlib.sha256(lines.encode()).hexdigest(),
        end_ids=(5,),
    )
    (folder / LINES).write_text(lines)
    (folder / HEADER).write_text(text_of(header))
    return Rollouts(header, samples)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert written(tmp_path) == read_rollouts(tmp_path)


def test_marks_are_scores_or_correctness() -> None:
    assert [sample.mark for sample in SAMPLES] == [None, 1.0, 0.25]


def test_only_penalties_that_change_something_count() -> None:
    assert not Sampler(temperature=0.2, top_k=5, top_p=0.9).has_penalties
    assert Sampler(repetition_penalty=1.1).has_penalties


def refusal(folder: Path) -> CorpusError:
    with pytest.raises(CorpusError) as caught:
        read_rollouts(folder)
    assert caught.value.hint
    return caught.value


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "there is no folder" in refusal(tmp_path / "none").message


def test_a_folder_without_its_header_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / HEADER).unlink()
    assert HEADER in refusal(tmp_path).message


def test_lines_that_were_cut_are_refused(tmp_path: Path) -> None:
    written(tmp_path)
    lines = (tmp_path / LINES).read_bytes()
    (tmp_path / LINES).write_bytes(lines[: len(lines) // 2])
    assert "has the hash of" in refusal(tmp_path).message


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    header = written(tmp_path).header
    (tmp_path / HEADER).write_text(text_of(replace(header, format=2)))
    assert "format 2" in refusal(tmp_path).message


@pytest.mark.parametrize(
    ("sample", "wrong"),
    [
        (replace(SAMPLES[0], ids=()), "needs a prompt"),
        (replace(SAMPLES[0], new_ids=()), "no token in `new_ids`"),
        (replace(SAMPLES[0], new_ids=(-1,)), "no token id"),
        (replace(SAMPLES[0], new_ids=(2**31,)), "no token id"),
        (replace(SAMPLES[0], prompt=-1), "below zero"),
    ],
)
def test_a_sample_that_cannot_be_is_refused(tmp_path: Path, sample: Rollout, wrong: str) -> None:
    written(tmp_path, (sample,))
    assert wrong in refusal(tmp_path).message


def test_a_sample_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    written(tmp_path, (SAMPLES[0], SAMPLES[0]))
    assert "has sample 0 of prompt 0 again" in refusal(tmp_path).message


def test_a_field_of_another_type_is_named(tmp_path: Path) -> None:
    header = written(tmp_path).header
    line = json.dumps(json.loads(line_of(SAMPLES[0])) | {"new_ids": "text"}) + "\n"
    (tmp_path / LINES).write_text(line)
    sha256 = hashlib.sha256(line.encode()).hexdigest()
    (tmp_path / HEADER).write_text(text_of(replace(header, count=1, rollouts_sha256=sha256)))
    message = refusal(tmp_path).message
    assert "line 1" in message
    assert "`new_ids` is not a list" in message
