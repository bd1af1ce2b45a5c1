"""How often a gate says what is not so, and how often it changes its mind.

    python -m benchmarks.gate [TRIALS]

A series that never existed is measured on documents drawn anew each time, and held to a policy by
`qaudit.judge.gate` itself: four schemes of two subjects, eight intervals at once. Every share has
its Monte-Carlo error (one standard error) and its upper bound at 95 % beside it.

- false alarms: all eight relative errors are exactly the margin, the worst that may still pass. A
  breach of any is wrong.
- the same against a baseline, with a margin of zero: both audits are of the same weights, and
  differ by what a second quantization with other rounding makes of each document.
- flapping: the same truth is judged twice, on other documents of the same kind. Passing once and
  failing once is what makes people ignore a gate; becoming inconclusive is how it must happen. A
  gate by the estimate alone stands beside it.

"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import date

import numpy as np
import numpy.typing as npt

from benchmarks.evidence import share
from qaudit.judge.gate import GateInput, gate
from qaudit.judge.table import Measurements
from qaudit.types import (
    Check,
    Checkpoint,
    Evidence,
    Gate,
    Measurement,
    Metric,
    Policy,
    PolicyRule,
    Ref,
    Subject,
)

SUBJECTS, SCHEMES = ("one", "two"), ("rtn-4bit", "gptq-4bit", "awq-4bit", "bnb-nf4")
MARGIN = 0.02
TODAY = date(2026, 1, 1)
ROUNDING = 0.01  # of each document's loss, what a second quantization moves it by


def held(draw: np.random.Generator, documents: int, error: float) -> GateInput:
    """Measure both subjects on new documents; every scheme raises every loss by `error`."""
    tokens = np.clip(np.exp(5.5 + 0.8 * draw.standard_normal(documents)), 20, 1024).astype(np.int64)
    found = []
    for label in SUBJECTS:
        full = 3 * np.exp(0.25 * draw.standard_normal(documents)) * tokens
        found.append(_measured(label, "fp", full, tokens))
        for scheme in SCHEMES:
            own = error * np.exp(0.4 * draw.standard_normal(documents) - 0.08)
            noise = 0.01 / np.sqrt(tokens) * draw.standard_normal(documents)
            found.append(_measured(label, scheme, full * (1 + own + noise), tokens))
    subjects = [
        Subject(label, ((Checkpoint(Ref("here", label), label), 1.0),)) for label in SUBJECTS
    ]
    return GateInput(Measurements.of(subjects, found, 0.95))


def again(before: GateInput, draw: np.random.Generator) -> GateInput:
    """Quantize the same weights once more: every document's loss moves a little."""
    found = []
    for m in before.table.measurements:
        nll = m.evidence.nll_sum
        if m.scheme != "fp":
            nll = nll * (1 + ROUNDING * draw.standard_normal(len(nll)))
        found.append(_measured(m.subject, m.scheme, nll, m.evidence.tokens))
    return GateInput(Measurements.of(before.table.subjects, found, 0.95))


def _measured(
    subject: str, scheme: str, nll: npt.NDArray[np.float64], tokens: npt.NDArray[np.int64]
) -> Measurement:
    names = tuple(str(k) for k in range(len(tokens)))
    evidence = Evidence(names, nll, tokens, tokens * 4)
    name = "fp" if scheme == "fp" else "4"
    return Measurement(subject, scheme, scheme, evidence, 4.25, 1.0, bit_class=name)


def policy(metric: Metric, margin: float) -> Policy:
    """Ask one thing of everybody under every scheme."""
    return Policy("trial", (PolicyRule("all", metric, margin, "error", ("*",), ("@all",)),))


def judged(draw: np.random.Generator, documents: int, error: float) -> Gate:
    """Hold new documents to the margin."""
    return gate(policy("relative_error", MARGIN), held(draw, documents, error), today=TODAY)


def false_alarms(documents: int, trials: int, seed: int) -> int:
    """Count gates that breach where every error is exactly the margin."""
    draw = np.random.default_rng(seed)
    return sum(judged(draw, documents, MARGIN).verdict == "fail" for _ in range(trials))


def false_regressions(documents: int, trials: int, seed: int) -> int:
    """Count gates that find a regression between two quantizations of the same weights."""
    draw, wrong = np.random.default_rng(seed), 0
    asked = policy("loss_against_baseline", 0.0)
    for _ in range(trials):
        before = held(draw, documents, MARGIN)
        found = gate(asked, again(before, draw), again(before, draw), today=TODAY)
        wrong += found.verdict == "fail"
    return wrong


def flaps(documents: int, error: float, trials: int, seed: int) -> tuple[int, int, int]:
    """Count, of pairs of cells judged twice: pass and fail, the same by the estimate, and unclear.

    A cell is unclear if either judgement of it is inconclusive.
    """
    draw = np.random.default_rng(seed)
    turned = by_estimate = unclear = 0
    for _ in range(trials):
        first, second = (judged(draw, documents, error).checks for _ in range(2))
        for a, b in zip(first, second, strict=True):
            turned += {a.outcome, b.outcome} == {"pass", "fail"}
            unclear += "inconclusive" in (a.outcome, b.outcome)
            by_estimate += _beyond(a) != _beyond(b)
    return turned, by_estimate, unclear


def _beyond(check: Check) -> bool:
    return check.interval is not None and check.interval.estimate > MARGIN


def report(trials: int) -> Iterator[str]:
    yield f"false alarms, all errors at the margin, {trials} gates each: breached"
    for documents in (30, 64, 200):
        yield f"  {documents:3d} documents: {share(false_alarms(documents, trials, 1), trials)}"
    yield f"false regressions, the same weights, margin 0, {trials} gates each: breached"
    for documents in (30, 64, 200):
        wrong = false_regressions(documents, trials, 2)
        yield f"  {documents:3d} documents: {share(wrong, trials)}"
    cells = trials // 4 * len(SUBJECTS) * len(SCHEMES)
    yield f"flapping, 64 documents, {cells} cells judged twice, by the true error over the margin"
    for factor in (0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25):
        turned, by_estimate, unclear = flaps(64, factor * MARGIN, trials // 4, 3)
        yield (
            f"  {factor:4.2f}: pass and fail {share(turned, cells)}; by estimates alone "
            f"{100 * by_estimate / cells:.1f} %; inconclusive at least once "
            f"{100 * unclear / cells:.1f} %"
        )


def main() -> None:
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    for line in report(trials):
        print(line, flush=True)


if __name__ == "__main__":
    main()
