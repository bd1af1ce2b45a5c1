"""The measurements of all seeds -> what an experiment showed."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence

import numpy as np

from qaudit import __version__
from qaudit.lab.experiments.contrasts import Found, points_of, result_of
from qaudit.lab.experiments.table import Experiment
from qaudit.types import Claim, Contrast, ExperimentSummary


def summarized(  # noqa: PLR0913 - what was measured, and what to call it
    experiment: Experiment,
    size: str,
    seeds: Mapping[int, Found],
    *,
    command: str,
    parameters: int,
    tokens: int,
    confidence: float = 0.95,
) -> ExperimentSummary:
    """Return what the seeds that were measured show, subjects named as in the experiment."""
    subjects = (*experiment.scan, *(soup.label for soup in experiment.soups))
    some = next((e for found in seeds.values() for e in found.values()), None)
    return ExperimentSummary(
        experiment=experiment.name,
        size=size,
        description=experiment.description,
        command=command,
        seeds=tuple(seeds),
        parameters=parameters,
        tokens=tokens,
        documents=0 if some is None else int(some.scored().sum()),
        confidence=confidence,
        subjects=subjects,
        claims=tuple(Claim(c.name, c.source, c.says) for c in experiment.claims),
        results=tuple(result_of(c, seeds, confidence) for c in contrasts_of(experiment)),
        points=tuple(
            p for seed, found in seeds.items() for p in points_of(seed, found, confidence)
        ),
        environment={"python": platform.python_version(), "qaudit": __version__},
        notes=tuple(_notes(subjects, seeds)),
    )


def contrasts_of(experiment: Experiment) -> tuple[Contrast, ...]:
    """Return every contrast under each of its schemes."""
    return tuple(
        Contrast(
            claim=c.claim,
            says=c.says,
            a=c.a,
            b=c.b,
            measure=c.measure,
            scheme=scheme,
            expect=c.expect,
            margin=c.margin,
        )
        for c in experiment.contrasts
        for scheme in c.schemes
    )


def _notes(subjects: Sequence[str], seeds: Mapping[int, Found]) -> list[str]:
    """Say which models have a loss that is no number, and which were not measured at all."""
    notes = []
    for seed, found in seeds.items():
        for (subject, scheme), evidence in found.items():
            if not np.isfinite(evidence.nll_sum).all():
                notes.append(f"seed {seed}: the loss of `{subject}` under `{scheme}` is no number")
        there = {subject for subject, _ in found}
        notes += [f"seed {seed}: `{s}` was not measured" for s in subjects if s not in there]
    return notes
