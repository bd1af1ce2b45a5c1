"""A realistic audit of a series that never existed: per-document sums are drawn, not measured.

The series holds its learning rate for a stage, then decays it in three ingredients with a
soup of them. Damage grows when the learning rate falls, more so at 3 bits, and the soup is
damaged less than its ingredients. Everything downstream of the measurements is the real judge.
"""

import hashlib
import math
from dataclasses import replace
from functools import cache

import numpy as np

from qaudit.judge import judge
from qaudit.judge.table import Measurements, Moved
from qaudit.types import (
    AuditRecord,
    Checkpoint,
    ClassVerdict,
    Diagnostics,
    Plan,
    Recipe,
    Ref,
    Skipped,
    Subject,
    Verdict,
    WeightFile,
)
from tests.support.measured import drawn

PEAK = 3e-3
SCHEMES = {  # display name: (spec, bits per weight, damage at the end of the held stage)
    "rtn-4bit": ("rtn:bits=4:group=128:sym=false", 4.25, 0.009),
    "rtn-3bit": ("rtn:bits=3:group=128:sym=false", 3.25, 0.055),
    "gptq-4bit": ("gptq:bits=4:group=128:sym=true", 4.25, 0.004),
    "gptq-3bit": ("gptq:bits=3:group=128:sym=true", 3.25, 0.021),
    "awq-4bit": ("awq:bits=4:group=128:zero_point=true", 4.25, 0.005),
    "awq-3bit": ("awq:bits=3:group=128:zero_point=true", 3.25, 0.028),
    "bnb-nf4": ("bnb-nf4:double=true", 4.13, 0.006),
    "bnb-int8": ("bnb-int8:threshold=6.0", 8.02, 0.0002),
}


def checkpoint(stage, step, rate, ingredient=None):
    part = f"-ingredient{ingredient}" if ingredient else ""
    label = f"{stage}{part}-step{step}"
    sha = hashlib.sha256(label.encode()).hexdigest()
    return Checkpoint(
        ref=Ref("demo", label),
        label=label,
        files=(WeightFile("model.safetensors", 2_400_000, sha),),
        commit=sha[:40],
        family="demo",
        stage=stage,
        ingredient=ingredient,
        step=step,
        tokens=step * 8192 + (5000 * 8192 if stage == "stage2" else 0),
        learning_rate=rate,
    )


def alone(checkpoint):
    return Subject(checkpoint.label, ((checkpoint, 1.0),))


def series():
    held = [checkpoint("stage1", s, PEAK) for s in (500, 1000, 1750, 2500, 3250, 4000, 4500, 5000)]
    decay = [checkpoint("stage2", s, PEAK * (1 - s / 1000), 1) for s in (250, 500, 750, 1000)]
    ends = [decay[-1], *(checkpoint("stage2", 1000, 0.0, k) for k in (2, 3))]
    singles = map(alone, (*held, *decay, *ends[1:]))
    soup = Subject("soup", tuple((c, 1 / 3) for c in ends), "mean")
    return (*singles, soup)


@cache
def measurements(documents=64, seed=0):
    """Draw the evidence of every subject under every scheme; the same for the same seed."""
    draw = np.random.default_rng(seed)
    tokens = np.clip(np.exp(5.3 + 0.5 * draw.standard_normal(documents)), 24, 256).astype(np.int64)
    difficulty = np.exp(0.2 * draw.standard_normal(documents))
    found = []
    folded = ("o_proj: no scale folds exactly under grouped-query attention, clip only",)
    for subject in series():
        last = subject.members[0][0]
        seen = (last.tokens or 0) / (6000 * 8192)
        decayed = 1 - (last.learning_rate or 0.0) / PEAK
        soup = subject.kind == "soup"
        level = 1.62 + 0.9 * math.exp(-3.5 * seen) - 0.09 * decayed - 0.012 * soup
        jitter = 0.006 * draw.standard_normal() * (decayed > 0.99) * (not soup)
        loss = (level + jitter) * difficulty * np.exp(0.02 * draw.standard_normal(documents))
        full = loss * tokens
        sizes = (0.35 + 0.65 * seen) * (1 + 1.1 * decayed) * (0.84 if soup else 1.0)
        found.append(drawn(subject.label, "fp", "fp", full, tokens, 16.0))
        for name, (spec, bits, base) in SCHEMES.items():
            damage = base * sizes * np.exp(0.5 * draw.standard_normal(documents) - 0.125)
            noise = 0.1 * base * draw.standard_normal(documents)
            hurt = full * (1 + damage + noise)
            notes = folded if name.startswith("awq") else ()
            found.append(drawn(subject.label, name, spec, hurt, tokens, bits, notes))
    return tuple(found)


def files(found):
    return {
        (m.subject, m.spec, m.calibration_seed): (
            f"evidence/{m.subject}--{m.scheme}.npz",
            hashlib.sha256(f"{m.subject}{m.spec}".encode()).hexdigest(),
        )
        for m in found
    }


def judged(found, subjects=None):
    return judge(Measurements.of(subjects or series(), found, 0.95), files(found))


@cache
def audit(documents=64):
    """Return the whole audit, as a scan of the series would write it."""
    return assemble(measurements(documents), series())


def assemble(found, subjects):
    """Judge measurements and put the audit together."""
    return put_together(found, subjects, judged(found, subjects))


@cache
def repeated():
    """Return the audit of a scan with three draws, of which GPTQ's differ more at 3 bits."""
    found, subjects = measurements(), series()
    full = {m.subject: m.evidence.nll_sum for m in found if m.scheme == "fp"}
    scales = {"gptq-4bit": (1.05, 0.97), "gptq-3bit": (1.5, 0.6)}

    def again(m, seed):
        damage = scales[m.scheme][seed - 1] * (m.evidence.nll_sum - full[m.subject])
        return replace(with_loss(m, full[m.subject] + damage), calibration_seed=seed)

    more = tuple(again(m, seed) for seed in (1, 2) for m in found if m.scheme in scales)
    last, moved = "stage2-ingredient3-step1000", Moved(1e-4, 2e-5, 3e-4)
    floor = {(last, name): moved for name in ("fp", *scales)}
    every = (*found, *more)
    judgement = judge(Measurements.of(subjects, every, 0.95), files(every), floor=floor)
    audit = put_together(every, subjects, judgement)
    plan = replace(audit.plan, recipe=replace(audit.plan.recipe, repeats=3))
    return replace(audit, diagnostics=Diagnostics(noise=judgement.noise), plan=plan)


def put_together(found, subjects, judgement):
    """Return an audit with a judgement."""
    recipe = Recipe(
        targets=("demo",), schemes=tuple(SCHEMES), soups=("stage2-ingredient*-step1000",)
    )
    plan = Plan(
        recipe=recipe,
        subjects=subjects,
        specs=tuple(spec for spec, _, _ in SCHEMES.values()),
        device="cpu",
        dtype="float32",
        context=256,
        parameters=1_180_000,
        blocks=4,
        nbytes_read=40_000_000,
        nbytes_memory=180_000_000,
        nbytes_memory_fixed=60_000_000,
        nbytes_memory_available=8_000_000_000,
        streams=len(found),
        seconds_low=40.0,
        seconds_high=110.0,
    )
    judged_names = ("measurements", "tasks", "comparisons", "findings", "pick")
    return AuditRecord(
        plan=plan,
        environment={
            "python": "3.13.1",
            "platform": "Linux-6.8-x86_64",
            "processor": "some processor",
            "cores": 2,
            "libraries": {"torch": "2.13.0", "transformers": "5.23.0"},
            "memory_baseline_nbytes": 400_000_000,
            "memory_peak_nbytes": 545_000_000,
        },
        protocol={
            "context": 256,
            "bos": "auto",
            "packed": False,
            "evaluation_documents": 64,
            "calibration_documents": 64,
            "document_tokens": 256,
            "calibration_seed": 0,
            "calibration_tokens": 16384,
            "sources": [["evaluation", "documents of Python 3.13.1"]],
        },
        subjects=subjects,
        **{name: getattr(judgement, name) for name in judged_names},
        verdict=judgement.verdict or _undecided(judgement),
        skipped=(Skipped("stage1-step250", None, "`model.safetensors` is truncated"),),
        diagnostics=Diagnostics(),
        schema="1",
        qaudit="0.1.0",
    )


def _undecided(judgement):
    """Return the pick as a verdict of one class that nothing decides; of no pick, none."""
    pick = judgement.pick
    if pick is None:
        return None
    place = pick.subject, pick.scheme
    row = next(m for m in judgement.measurements if (m.subject, m.scheme) == place)
    names = ("subject", "scheme", "objective", "runner_up", "changes")
    one = ClassVerdict(
        bit_class=pick.scheme,
        level="off",
        status="undecided",
        ce=row.ce,
        relative_error=row.relative_error,
        runner_up_scheme=pick.scheme if pick.runner_up else None,
        lead=pick.interval,
        contenders=tuple(f"{label} at {pick.scheme}" for label in pick.contenders),
        **{name: getattr(pick, name) for name in names},
    )
    return Verdict("release", pick.objective, 0.95, (one,), "undecided")


def without(found, subject, scheme):
    return tuple(m for m in found if (m.subject, m.scheme) != (subject, scheme))


def with_loss(m, nll):
    return replace(m, evidence=replace(m.evidence, nll_sum=nll))


def many(subjects, schemes, *, soups=0, name="step{}"):
    """Return an audit of any size: its scores are those of the sample, under other names."""
    known = [s for s in audit().subjects if s.kind == "checkpoint"]
    bits = list(SCHEMES)
    names = [f"{bits[k % 8].partition('-')[0]}-v{k}" if schemes > 8 else bits[k]
             for k in range(schemes)]  # fmt: skip
    made = []
    for k in range(subjects):
        like = known[k * len(known) // max(1, subjects)].first
        made.append(alone(replace(like, label=name.format(k), step=k, tokens=k * 8192)))
    members = tuple((s.first, 1 / len(made[-3:])) for s in made[-3:])
    mixed = [Subject(f"{name.format('soup')}{k}", members, "mean") for k in range(soups)]
    scores = {(s.subject, s.scheme): s for s in audit().measurements}
    found = []
    for k, subject in enumerate((*made, *mixed)):
        like_label = "soup" if k >= subjects else known[k * len(known) // subjects].label
        for shown, source in [("fp", "fp"), *zip(names, (bits * 99), strict=False)]:
            score = scores[like_label, source]
            found.append(replace(score, subject=subject.label, scheme=shown))
    against = [
        replace(c, a=soup.label, b=member.label, scheme=scheme)
        for c in audit().comparisons
        if (c.a, c.b, c.scheme) == ("soup", "stage2-ingredient1-step1000", "gptq-4bit")
        for soup in mixed
        for member, _ in members
        for scheme in names
    ]
    whole = replace(audit(), subjects=(*made, *mixed), measurements=tuple(found), findings=())
    assert audit().pick is not None
    pick = replace(
        audit().pick,
        subject=made[-1].label,
        scheme=names[0],
        runner_up=made[0].label,
        objective=f"lowest quantized loss at {names[0]}",
        contenders=(),
        changes=(),
    )
    return replace(whole, comparisons=tuple(against), pick=pick)
