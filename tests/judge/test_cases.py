"""Golden cases: a policy, what was measured, and what the gate answers, as text.

    python -m tests.judge.test_cases

writes the answers anew; read the difference before it is committed. A case is a document of YAML in
`cases/`. `losses` has the loss of each subject in full precision, `errors` what a scheme adds to it
in percent, or a table with more of its evidence (`_Cell`), `policy` a policy as in a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from qaudit.core.statistics import counts_of
from qaudit.judge.choose import parse_objective
from qaudit.judge.gate import GateInput, findings_of, gate, verdict_of
from qaudit.judge.table import Measurements
from qaudit.policy import policy_in
from qaudit.types import (
    ByConfidence,
    Checkpoint,
    Evidence,
    Fidelity,
    Ref,
    RolloutEvidence,
    Routing,
    Subject,
)
from tests.support.gated import PROTOCOL, TODAY
from tests.support.items import items_of
from tests.support.measured import measurement

FOLDER = Path(__file__).with_name("cases")
BITS = {"gptq-4bit": 4.12, "rtn-4bit": 4.25, "bnb-nf4": 4.5, "bnb-int8": 8.0, "gptq-3bit": 3.12}
ITEMS, PROMPTS = 200, 40


@dataclass(frozen=True)
class _Cell:
    """What a subject has under a scheme."""

    adds: float = 0.0  # percent of the loss in full precision
    scatter: float = 0.3  # over documents, of what is added
    nan: bool = False
    kl: float | None = None  # nats per token, the same in every document but for a tenth
    worst: tuple[int, float] | None = None  # so many tokens have this divergence
    sure: float | None = None  # of tokens that full precision is sure of, those that flip; -1: none
    moved: float | None = None  # of tokens whose experts are others
    code: float = 1.0  # in the stratum `code`, so many times what is added elsewhere
    wrong: Mapping[str, int] | None = None  # items of each task that go wrong
    agreed: float | None = None  # tokens before a greedy rollout changes, of the median prompt
    ends: float = 1.0  # the probability of an end, of that in full precision
    bits: float | None = None
    seed: int = 0


def _cell(value):
    return _Cell(**value) if isinstance(value, dict) else _Cell(float(value))


def _subjects(losses):
    """Return checkpoints, and a soup of all of them by that name."""
    singles = [Checkpoint(Ref("here", name), name, step=k) for k, name in enumerate(losses)]
    alone = {c.label: Subject(c.label, ((c, 1.0),)) for c in singles if c.label != "soup"}
    members = [s.first for s in alone.values()] or singles
    soup = Subject("soup", tuple((c, 1 / len(members)) for c in members), "mean")
    return tuple(alone.get(name, soup) for name in losses)


def _measured(case):
    losses, documents = case.get("losses", {"step1": 3.0}), case.get("documents", 64)
    draw = np.random.default_rng(1)
    tokens = draw.integers(50, 200, documents).astype(np.int64)
    hard = np.exp(0.2 * draw.standard_normal(documents))
    every = case.get("errors", {})
    if not isinstance(every, dict):
        every = {f"{label} gptq-4bit": every for label in losses}
    for label, loss in losses.items():
        noise = 1 + 0.002 * np.random.default_rng([*label.encode()]).standard_normal(documents)
        full = loss * hard * noise * tokens
        cells = {
            name: _cell(value) for name, value in every.items() if name.startswith(f"{label} ")
        }
        cells = {f"{label} fp": _Cell()} | cells
        for name, cell in cells.items():
            scheme = name.partition(" ")[2].partition(" #")[0]
            own = np.random.default_rng([cell.seed, *name.encode()]).standard_normal(documents)
            strata = np.where(np.arange(documents) % 4 == 0, "code", "prose")
            harm = np.where(strata == "code", cell.code, 1.0)
            nll = full * (1 + cell.adds / 100 * harm * (1 + cell.scatter * own))
            if cell.nan:
                nll[3] = np.nan
            names = tuple(f"{k:064d}" for k in range(documents))
            evidence = Evidence(names, nll, tokens + case.get("more_tokens", 0), tokens * 4)
            evidence = replace(evidence, **_more(cell, scheme, evidence))
            if case.get("strata"):
                evidence = replace(evidence, strata=tuple(map(str, strata)))
            bits = cell.bits or BITS.get(scheme.partition(":")[0], 4.25)
            yield measurement(label, scheme, scheme, evidence, bits, cell.seed)


def _more(cell, scheme, evidence):
    tokens_D, found = evidence.tokens, dict[str, Any]()
    if cell.kl is not None:
        document_N = np.repeat(np.arange(len(tokens_D)), tokens_D)
        near = 1 + 0.1 * np.random.default_rng(5).standard_normal(len(tokens_D))
        kl_N = cell.kl * near[document_N]
        if cell.worst:
            count, most = cell.worst
            kl_N[:: len(kl_N) // count][:count] = most
        flips = None
        if cell.sure is not None:
            quarter = tokens_D // 4 if cell.sure >= 0 else 0 * tokens_D
            counts = np.stack([tokens_D - 2 * quarter, quarter * 0, quarter, quarter], 1)
            none = quarter * 0
            changed = (cell.sure * 2 * quarter).round().astype(np.int64)
            flips = ByConfidence(counts, counts * cell.kl, np.stack([none, none, changed, none], 1))
        found["fidelity"] = Fidelity(
            np.bincount(document_N, kl_N),
            np.full(len(tokens_D), kl_N.max()),
            counts_of(kl_N, document_N, len(tokens_D)),
            (0.9 * tokens_D).astype(np.int64),
            1e-4 * tokens_D,
            flips,
        )
    if cell.moved is not None:
        same = ((1 - cell.moved) * tokens_D).round().astype(np.int64)[None]
        found["routing"] = Routing(np.zeros(1, np.int64), same, cell.moved * tokens_D[None])
    if cell.wrong is not None:
        tasks = []
        for name, wrong in cell.wrong.items():
            nll = np.tile([1.0, 2.0], (ITEMS, 1))
            nll[:wrong] = [2.0, 1.0]
            tasks.append(items_of(nll.ravel(), options=2, task=name))
        found["tasks"] = tuple(tasks)
    if cell.agreed is not None:
        places = cell.agreed * np.linspace(0.8, 1.2, PROMPTS)
        draw = np.random.default_rng(7)
        found["rollouts"] = RolloutEvidence(
            sha256="hash",
            prompt=np.arange(PROMPTS),
            tokens=np.full(PROMPTS, 200),
            nll_sum=np.full(PROMPTS, 100.0),
            agreed=np.clip(places, -1, 200).round().astype(np.int64),
            end_names=("turn",),
            end_sum=cell.ends * draw.gamma(9, 0.1, (PROMPTS, 1)),
            kl_sum=None if scheme == "fp" else np.full(PROMPTS, 0.1),
        )
    return found


def _audit(case, name):
    found, skipped = list(_measured(case)), case.get("skipped", {})
    planned = _subjects({**case.get("losses", {"step1": 3.0}), **dict.fromkeys(skipped, 0.0)})
    labels = {m.subject for m in found}
    subjects = tuple(s for s in planned if s.label in labels)
    return GateInput(
        Measurements.of(subjects, found, 0.95),
        name,
        planned=planned,
        skipped=skipped,
        protocol={**PROTOCOL, **case.get("protocol", {})},
        dtype="float32",
        searched=case.get("searched", {}),
        bits=tuple(case.get("bits", ())),
        objective=parse_objective(case.get("objective", "loss")),
        lost=tuple(map(tuple, case.get("lost", ()))),
    )


def answered(case):
    """Return what the gate answers, a line for each check, class and warning."""
    text = case["policy"] if isinstance(case["policy"], str) else yaml.safe_dump(case["policy"])
    policy = policy_in(text, where="policy", name="case", path=None)
    before = _audit(case["baseline"], "old") if "baseline" in case else None
    day = case.get("today", TODAY)
    audit = _audit(case, "new")
    judged = gate(policy, audit, before, today=day)
    lines = [*_lines(judged, case.get("objective", "loss")), *_pick(audit.pick)]
    return "".join(f"{line}\n" for line in lines)


def _pick(pick):
    if pick:
        over = f"over {pick.runner_up} at {pick.runner_up_scheme}, reference {pick.reference}"
        yield f"the pick is {pick.subject} at {pick.scheme} {over}"
        yield f"  contenders: {', '.join(pick.contenders)}; changes: {'; '.join(pick.changes)}"


def _lines(judged, objective):
    verdict = verdict_of(judged, objective)
    yield f"{judged.verdict}, exit {judged.exit_code}, {verdict.status}, {judged.at_once} at once"
    for check in judged.checks:
        yield from _check(check)
    for one in judged.classes:
        yield from _class(one)
    yield from (f"warning {w.rule} {w.subject} {w.scheme}: {w.message}; {w.hint}"
                for w in judged.warnings)  # fmt: skip
    yield from (f"other: {other}" for other in verdict.others)
    found = [f"{f.level} {f.rule} of {f.subject} {f.outcome}" for f in findings_of(judged)]
    yield f"findings of a scan: {', '.join(found) or 'none'}"


def _check(check):
    facts = {
        "interval": check.interval and _interval(check.interval),
        "documents": check.documents,
        "needs": check.needed_documents,
        "against": check.against,
        "ignored": check.ignored and check.ignored.reason,
        "known": check.known,
        "class": check.bit_class,
    }
    what = f"{check.rule} {check.name} ({check.level}) of {check.subject} at {check.scheme}"
    named = [f"{name} {value}" for name, value in facts.items() if value]
    yield "; ".join([f"{check.outcome} {what}", f"{check.metric} of line {check.line}", *named])
    yield f"  {check.message}"
    if check.hint:
        yield f"  hint: {check.hint}"


def _class(one):
    facts = {
        "K": one.at_once,
        "adds": one.relative_error and _interval(one.relative_error),
        "kl": one.kl and _interval(one.kl),
        "lead": one.lead and _interval(one.lead),
        "over": one.runner_up and f"{one.runner_up} at {one.runner_up_scheme}",
        "reference": one.reference,
        "rule": one.rule and f"{one.rule} {one.metric} {one.margin} {one.unit}",
        "needed": one.needed_documents,
        "contenders": ", ".join(one.contenders),
    }
    what = f"class {one.bit_class} ({one.level}) {one.status}: {one.subject} at {one.scheme}"
    yield "; ".join([what, *(f"{name} {value}" for name, value in facts.items() if value)])
    for name in ("changes", "breaches", "warnings", "needs"):
        yield from (f"  {name}: {text}" for text in getattr(one, name))


def _interval(interval):
    return f"{interval.estimate:.5g} [{interval.low:.5g}, {interval.high:.5g}]"


def _cases():
    for path in sorted(FOLDER.glob("*.yaml")):
        documents = yaml.safe_load_all(path.read_text(encoding="utf-8"))
        yield from ((path, k, case) for k, case in enumerate(documents))


CASES = [pytest.param(case, id=f"{path.stem}: {case['case']}") for path, _, case in _cases()]


@pytest.mark.parametrize("case", CASES)
def test_the_gate_answers_as_written(case):
    assert answered(case) == case["answer"]


def main():
    for path in sorted(FOLDER.glob("*.yaml")):
        parts = path.read_text(encoding="utf-8").split("---\n")
        written = []
        for part in filter(str.strip, parts):
            case = yaml.safe_load(part)
            head = part.partition("answer: |\n")[0].rstrip("\n")
            answer = "".join(f"  {line}\n" for line in answered(case).splitlines())
            written.append(f"{head}\nanswer: |\n{answer}")
        path.write_text("---\n".join(written), encoding="utf-8")


if __name__ == "__main__":
    main()
