"""What schemes would score at addition, by weighted answers, against generating with each of them.

    python -m experiments.addition OUT [--steps 1000,1500] [--prompts 600] [--samples 4]
        [--generated 8]

The trainer here trains a million parameters on sums of two numbers of two digits, a character a
token, and stops while the model still errs. Full precision answers sums that it was not trained
on; arithmetic marks the answers, and a scan weighs them under each scheme. Then each
scheme's file is exported and answers the same sums itself, with other random numbers. Everything
goes through the command line, in float32 on a CPU; the same command again resumes.

Intervals are over prompts. The difference, expected less generated, has prompts in pairs.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from experiments.text import END, train_tokenizer
from qaudit.core.items import expected_score
from qaudit.core.statistics import interval
from qaudit.rollouts.folder import TEXTS
from qaudit.saved.evidence import read_saved
from qaudit.types import FULL_PRECISION, Interval, RolloutEvidence

Array = npt.NDArray[np.float64]

RUN = "adds"
SCHEMES = ("rtn-4bit", "gptq-4bit", "rtn-3bit", "gptq-3bit", "rtn-2bit")
MACHINE = ("--set", "dtype=float32", "--device", "cpu", "-q")
BYTES = 257  # entries of a tokenizer without merges
SHAPE = {"model.context": 32, "model.layers": 5, "batch": 64, "attention": "eager", "threads": 1}
PEAK, WARMUP = 0.003, 100  # of a rate that is held
EVALUATED, CALIBRATED, LONGEST = 400, 512, 4  # documents, documents, tokens of an answer


@dataclass(frozen=True)
class Compared:
    """A scheme's score as it is expected, and as it was generated."""

    scheme: str
    generated: Interval
    effective: float
    expected: Interval | None
    difference: Interval | None
    reason: str = ""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", default="1000,1500", help="of the checkpoints, in order")
    parser.add_argument("--prompts", type=int, default=600)
    parser.add_argument("--samples", type=int, default=4, help="weighed, of each prompt")
    parser.add_argument("--generated", type=int, default=8, help="with each scheme")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    options = parser.parse_args(arguments)
    steps = [int(step) for step in options.steps.split(",")]
    sums = train(options.out, steps)
    for step in steps:
        checkpoint = options.out / "runs" / f"{RUN}-step{step}"
        place = options.out / f"step{step}"
        texts = write_texts(place, options.out, sums, options.prompts)
        weigh(place, checkpoint, texts, options.samples, options.schemes)
        saved = {m.scheme: m.evidence.rollouts for m in read_saved(place / "audit").measurements}
        rows = []
        for scheme in options.schemes.split(","):
            answers = answered(place, scheme, texts, options.generated)
            rows.append(compare(scheme, saved[scheme], saved[FULL_PRECISION], answers))
        print(table(step, rows), flush=True)


def run(*arguments: object, module: str = "qaudit") -> None:
    """Run a command of qaudit, or of the experiments."""
    subprocess.run([sys.executable, "-m", module, *map(str, arguments)], check=True)


# ---------------------------------------------------------------------------------------- its text


def problems() -> list[str]:
    """Return every sum of two numbers of two digits, shuffled."""
    sums = [f"{a}+{b}={a + b}" for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(sums)
    return sums


def prompt_of(problem: str) -> str:
    return f"{END}{problem.partition('=')[0]}="


def marks_of(answers: Sequence[Mapping[str, object]], sums: Sequence[str]) -> list[str]:
    """Return a line of marks for each answer: whether it is the sum."""
    lines = []
    for answer in answers:
        place = {name: answer[name] for name in ("prompt", "sample", "greedy")}
        right = sums[int(str(answer["prompt"]))].partition("=")[2]
        lines.append(json.dumps({**place, "correct": answer["text"] == right}))
    return lines


def train(out: Path, steps: Sequence[int]) -> list[str]:
    """Train the model; return the sums that it has not seen."""
    out.mkdir(parents=True, exist_ok=True)
    train_tokenizer(iter(()), BYTES).save_pretrained(out / "tokenizer")
    write_lines(out / "addition.jsonl", [json.dumps({"text": text}) for text in problems()])
    warmup = min(WARMUP, steps[-1] // 2)
    schedule = f"{{kind: constant, peak: {PEAK}, warmup: {warmup}}}"
    settings = {**SHAPE, "name": RUN, "schedule": schedule, "steps": steps[-1]}
    settings |= {"text": out / "addition.jsonl", "tokenizer": out / "tokenizer"}
    settings["save_at"] = list(steps)
    train_options = ("--out", out / "runs", "--device", "cpu", "-q")
    run("train", *_set(settings), *train_options, module="experiments")
    lines = (out / "runs" / "text" / "heldout.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def _set(settings: Mapping[str, object]) -> list[str]:
    return [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]


def write_texts(place: Path, out: Path, sums: Sequence[str], prompts: int) -> list[str]:
    """Write prompts, calibration and evaluation text; return the sums that are asked."""
    place.mkdir(exist_ok=True)
    asked, evaluated = sums[:prompts], sums[prompts:][:EVALUATED]
    heldout = set(sums)
    trained = [text for text in problems() if text not in heldout][:CALIBRATED]
    write_lines(place / "prompts.jsonl", [json.dumps({"prompt": prompt_of(s)}) for s in asked])
    for name, texts in (("calibration", trained), ("evaluation", evaluated)):
        write_lines(place / f"{name}.jsonl", [json.dumps({"text": text}) for text in texts])
    return list(asked)


def write_lines(path: Path, lines: Sequence[str]) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------- its answers


def rollouts(place: Path, target: Path, name: str, samples: int, seed: int) -> list[object]:
    """Return the command that has a model answer the prompts."""
    how = ["--samples", samples, "--max-tokens", LONGEST, "--set", f"seed={seed}"]
    out = ["--out", place / f"answers-{name}"]
    return ["rollouts", target, "--prompts", place / "prompts.jsonl", *how, *out, *MACHINE]


def answers_in(place: Path, name: str) -> list[Mapping[str, object]]:
    lines = (place / f"answers-{name}" / TEXTS).read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def weigh(place: Path, checkpoint: Path, sums: Sequence[str], samples: int, schemes: str) -> None:
    """Have full precision answer, mark the answers, and scan with them."""
    command = rollouts(place, checkpoint, FULL_PRECISION, samples, 0)
    if not (place / "marks.jsonl").exists():
        run(*command)
        write_lines(place / "marks.jsonl", marks_of(answers_in(place, FULL_PRECISION), sums))
        run(*command, "--set", f"marks={place / 'marks.jsonl'}")
    texts = [f"--{name}={place / name}.jsonl" for name in ("calibration", "evaluation")]
    settings = {
        "calibration_documents": CALIBRATED,
        "evaluation_documents": EVALUATED,
        "bos": "always",
        "context": SHAPE["model.context"],
        "rollouts": place / f"answers-{FULL_PRECISION}",
    }
    options = [*texts, *_set(settings), "--schemes", schemes, *MACHINE]
    run("scan", checkpoint, *options, "--out", place / "audit")


def answered(place: Path, scheme: str, sums: Sequence[str], samples: int) -> list[tuple[int, bool]]:
    """Export a scheme's file and have it answer; return prompts, and whether answers are right."""
    if not (folder := place / scheme).exists():
        (subject,) = {m.subject for m in read_saved(place / "audit").measurements}
        named = ["--subject", subject, "--scheme", scheme]
        run("export", place / "audit", *named, "--out", folder, "-q")
    run(*rollouts(place, folder, scheme, samples, 1))
    answers = [a for a in answers_in(place, scheme) if not a["greedy"]]
    marks = [json.loads(line) for line in marks_of(answers, sums)]
    return [(mark["prompt"], mark["correct"]) for mark in marks]


def compare(
    scheme: str,
    stream: RolloutEvidence | None,
    full: RolloutEvidence | None,
    answers: Sequence[tuple[int, bool]],
) -> Compared:
    """Compare weighted answers of full precision with answers of a stream to the same prompts."""
    assert stream is not None and full is not None
    assert stream.mark is not None and stream.drawn_sum is not None and full.drawn_sum is not None
    drawn = ~np.isnan(stream.mark)
    marks, prompts = stream.mark[drawn], stream.prompt[drawn]
    log_weights = (stream.drawn_sum - full.drawn_sum)[drawn]
    result = expected_score(marks, log_weights, prompts)
    own_prompts, right = np.array(answers).T
    count = 1 + max(prompts.max(), own_prompts.max())

    def by_prompt(places: npt.NDArray[np.int64], values: Array | None = None) -> Array:
        return np.bincount(places, values, count).astype(np.float64)

    own = by_prompt(own_prompts, right.astype(np.float64)), by_prompt(own_prompts)
    generated = interval(own, lambda s: s[0] / s[1])
    if result.score is None:
        return Compared(scheme, generated, result.effective, None, None, result.reason)
    weights = np.exp(log_weights)
    weighed = by_prompt(prompts, weights * marks), by_prompt(prompts, weights)
    difference = interval((*weighed, *own), lambda s: s[0] / s[1] - s[2] / s[3])
    return Compared(scheme, generated, result.effective, result.score, difference)


def table(step: int, rows: Sequence[Compared]) -> str:
    """Return a Markdown table, in percent."""
    lines = [
        f"| {step} steps | expected | effective samples | generated | difference |",
        "|---|---|--:|---|---|",
    ]
    for row in rows:
        expected = shown(row.expected) if row.expected else f"-: {row.reason}"
        cells = [row.scheme, expected, f"{row.effective:,.0f}", shown(row.generated)]
        lines.append(f"| {' | '.join([*cells, shown(row.difference)])} |")
    return "\n".join([*lines, ""])


def shown(values: Interval | None) -> str:
    if values is None:
        return "-"
    estimate, low, high = (100 * v for v in (values.estimate, values.low, values.high))
    return f"{estimate:.1f} [{low:.1f}, {high:.1f}]"


if __name__ == "__main__":
    main()
