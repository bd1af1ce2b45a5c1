"""Audits of a few drawn documents, to be held to policies."""

from dataclasses import replace
from datetime import date

import numpy as np

from qaudit.judge.gate import GateInput, gate
from qaudit.judge.table import Measurements
from qaudit.types import Checkpoint, Evidence, Policy, PolicyRule, Ref, Subject
from tests.support.measured import measurement
from tests.support.sample import alone

TODAY = date(2026, 6, 15)
A, B, SOUP = "step1", "step2", "soup"
SCHEMES = ("gptq-4bit", "rtn-4bit")
PROTOCOL = {
    "context": 256,
    "bos": "auto",
    "packed": False,
    "document_tokens": None,
    "calibration_documents": 32,
    "calibration_seed": 0,
    "corpus_sha256": "c" * 64,
}


def series():
    ends = [Checkpoint(Ref("here", label), label, step=k) for k, label in enumerate((A, B))]
    return (*map(alone, ends), Subject(SOUP, tuple((c, 0.5) for c in ends), "mean"))


def measured(  # the documents are the same for all; each cell has noise of its own
    errors, *, documents=64, levels=None, seed=0
):
    """Draw losses whose relative errors are near those asked for."""
    draw = np.random.default_rng(1)
    tokens = draw.integers(50, 200, documents).astype(np.int64)
    hard = np.exp(0.2 * draw.standard_normal(documents))
    levels = levels or {A: 3.0, B: 2.9, SOUP: 2.8}
    draw = np.random.default_rng((seed, 0))
    names = tuple(f"{k:064d}" for k in range(documents))
    found = []
    for label, level in levels.items():
        noise = 1 + 0.002 * np.random.default_rng(len(label)).standard_normal(documents)
        full = level * hard * noise * tokens
        losses = {"fp": full}
        for scheme in SCHEMES:
            if (label, scheme) in errors:
                added = errors[label, scheme] * (1 + 0.3 * draw.standard_normal(documents))
                losses[scheme] = full * (1 + added)
        for scheme, nll in losses.items():
            evidence = Evidence(names, nll, tokens, tokens * 4)
            found.append(measurement(label, scheme, scheme, evidence, 4.25))
    return found


def held(errors=0.01, **changes):
    """Return an audit in which every cell has this error, or each its own."""
    if isinstance(errors, float):
        errors = {(label, scheme): errors for label in (A, B, SOUP) for scheme in SCHEMES}
    return of(measured(errors, **changes))


def of(found, **changes):
    labels = {m.subject for m in found}
    subjects = tuple(s for s in series() if s.label in labels)
    table = Measurements.of(subjects, found, 0.95)
    plain = GateInput(table, "new", planned=subjects, protocol=PROTOCOL, dtype="float32")
    return replace(plain, **changes)


def rule(**changes):
    plain = PolicyRule("four-bit", "relative_error", 0.02, schemes=("*",), subjects=("@all",))
    return replace(plain, **changes)


def policy(*rules, **changes):
    return Policy("here", rules or (rule(),), **changes)


def judged(asked, audit, before=None):
    return gate(asked, audit, before, today=TODAY)


def check(found, subject, scheme=SCHEMES[0]):
    (only,) = [c for c in found.checks if (c.subject, c.scheme) == (subject, scheme)]
    return only
