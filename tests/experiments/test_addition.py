"""The experiment that compares expected scores with generation: `experiments/addition.py`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.__main__ import commands
from experiments.addition import compare, main, marks_of, problems, prompt_of, table
from qaudit.types import RolloutEvidence
from tests.support.cli import run_in

PROMPTS, SAMPLES = 60, 4
PROMPT_S = np.repeat(np.arange(PROMPTS), SAMPLES)


def evidence(log_p_S: np.ndarray) -> RolloutEvidence:
    """Return samples of which the first two behind each prompt are right."""
    count = len(PROMPT_S)
    return RolloutEvidence(
        sha256="",
        prompt=PROMPT_S,
        tokens=np.full(count, 3),
        nll_sum=-log_p_S,
        agreed=np.full(count, -1),
        end_names=(),
        end_sum=np.zeros((count, 0)),
        mark=(np.arange(count) % SAMPLES < 2).astype(np.float64),
        drawn_sum=log_p_S,
    )


def test_every_sum_of_two_digits_is_there_once() -> None:
    sums = problems()
    assert len(set(sums)) == len(sums) == 90 * 90
    assert all(sum(map(int, s.partition("=")[0].split("+"))) == int(s[6:]) for s in sums)
    assert prompt_of("12+34=46") == "<|endoftext|>12+34="


def test_an_answer_is_right_where_it_is_the_sum_and_nothing_else() -> None:
    answers = [
        {"prompt": 1, "sample": k, "greedy": False, "text": text}
        for k, text in enumerate(("46", "47", "460", ""))
    ]
    marks = [json.loads(line) for line in marks_of(answers, ["10+10=20", "12+34=46"])]
    assert [mark["correct"] for mark in marks] == [True, False, False, False]
    assert marks[1] == {"prompt": 1, "sample": 1, "greedy": False, "correct": False}


def test_weighted_answers_are_compared_with_those_of_the_scheme_by_prompt() -> None:
    full = evidence(np.full(len(PROMPT_S), -1.0))
    right = np.arange(len(PROMPT_S)) % SAMPLES < 2
    stream = evidence(np.where(right, -1.1, -0.9))  # right answers are less likely
    answers = [(k, sample < 9) for k in range(PROMPTS) for sample in range(20)]  # 45 %
    row = compare("rtn-4bit", stream, full, answers)
    weight = np.exp([-0.1, 0.1])
    assert row.expected is not None
    assert row.difference is not None
    assert row.expected.estimate == pytest.approx(weight[0] / weight.sum())
    assert row.generated.estimate == pytest.approx(0.45)
    assert row.difference.estimate == pytest.approx(weight[0] / weight.sum() - 0.45)
    assert "| rtn-4bit | 45.0 [45.0, 45.0] |" in table(7, [row])


def test_a_refused_score_has_its_reason_in_the_table() -> None:
    full = evidence(np.full(len(PROMPT_S), -1.0))
    far = np.where(np.arange(len(PROMPT_S)) < 5, 3.0, -9.0)
    row = compare("rtn-2bit", evidence(far), full, [(k, False) for k in range(PROMPTS)])
    assert row.expected is None
    assert "effective sample size is 5 of 240" in table(7, [row])


@pytest.mark.slow
def test_the_whole_experiment_in_a_small_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: object, module: str = "qaudit") -> None:
        of_module = commands if module == "experiments" else None
        assert run_in(tmp_path, *arguments, commands=of_module) == 0

    monkeypatch.setattr("experiments.addition.run", run)  # without a process for each command
    size = ["--steps", "20", "--prompts", "10", "--generated", "2", "--schemes", "rtn-4bit"]
    main([str(tmp_path), *size])
    printed = capsys.readouterr().out
    assert "| 20 steps | expected |" in printed
    assert "| rtn-4bit |" in printed
