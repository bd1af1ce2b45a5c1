"""Measurements by subject and scheme, and quantities of them with their intervals over documents.

Measurements that cannot be compared are refused.

A quantity is a function of sums over documents, and its columns are the losses of some subjects
under some schemes (cells), in the function's order. Documents are paired across cells.

How far a stream is from full precision is a mean over tokens, which is a function of sums over
documents, like a loss, or a quantile of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qaudit.core import statistics
from qaudit.core.course import ends
from qaudit.core.statistics import Array, Estimate, Statistic, quantile_interval
from qaudit.errors import AuditError
from qaudit.types import FULL_PRECISION, SURE, Evidence, Interval, Measurement, Noise, Subject

Cell = tuple[str, str]
"""A subject, and a scheme by its display name."""

Sums = Callable[[Evidence], npt.NDArray[np.float64]]
"""What is summed over the tokens of each document."""


def losses(evidence: Evidence) -> npt.NDArray[np.float64]:
    return evidence.nll_sum


def divergences(evidence: Evidence) -> npt.NDArray[np.float64]:
    """Return the KL divergence of each document to full precision; NaN if it was not measured."""
    fidelity = evidence.fidelity
    return fidelity.kl_sum if fidelity else np.full(len(evidence.tokens), np.nan)


EvidenceFiles = Mapping[tuple[str, str, int | str], tuple[str, str]]
"""(subject, spec, calibration seed, or a task) -> (path beside audit.json, sha256)."""


@dataclass(frozen=True, eq=False)
class Measurements:
    """Measurements on the same documents, found by subject and scheme."""

    subjects: tuple[Subject, ...]
    measurements: tuple[Measurement, ...]
    confidence: float

    @classmethod
    def of(
        cls, subjects: Sequence[Subject], measurements: Sequence[Measurement], confidence: float
    ) -> Measurements:
        """Build a table, or refuse measurements that cannot be compared."""
        if not 0 < confidence < 1:
            raise AuditError(
                f"a confidence of {confidence} is not between 0 and 1", hint="use 0.95, for example"
            )
        labels = [s.label for s in subjects]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise AuditError(
                f"two subjects are named `{twice[0]}`", hint="give every subject its own label"
            )
        seen: set[tuple[str, str, int]] = set()
        for m in measurements:
            first, key = measurements[0], (m.subject, m.spec, m.calibration_seed)
            if m.subject not in labels:
                raise AuditError(
                    f"`{m.subject}` was measured and is no subject of this audit",
                    hint="evidence of another audit may be in the same folder",
                )
            if key in seen:
                raise AuditError(
                    f"`{m.subject}` was measured twice under `{m.scheme}`",
                    hint="one measurement for each subject, scheme and calibration seed",
                )
            seen.add(key)
            what, hint = "documents", "measure both on the same evaluation text and protocol"
            if m.evidence.document_sha256 == first.evidence.document_sha256:
                what, hint = "tokens", "different tokenizers compare only in bits per byte"
                if np.array_equal(m.evidence.tokens, first.evidence.tokens):
                    continue
            raise AuditError(
                f"`{m.subject}` under `{m.scheme}` and `{first.subject}` under `{first.scheme}` "
                f"were measured on different {what}",
                hint=hint,
            )
        return cls(tuple(subjects), tuple(measurements), confidence)

    @cached_property
    def first_draws(self) -> Measurements:
        """The measurements that are judged: the first draw of calibration text of each cell."""
        first = tuple(draws[0] for draws in self._draws.values())
        if len(first) == len(self.measurements):
            return self
        kept = set(map(id, first))
        return replace(self, measurements=tuple(m for m in self.measurements if id(m) in kept))

    @cached_property
    def _draws(self) -> dict[Cell, list[Measurement]]:
        return by_cell(self.measurements)

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(dict.fromkeys(m.cell for m in self.measurements))

    def draws(self, subject: str, scheme: str) -> tuple[Measurement, ...]:
        return tuple(self._draws.get((subject, scheme), ()))

    def find(self, subject: str, scheme: str) -> Measurement | None:
        """Return the measurement of a subject under a scheme: of several draws, the first."""
        return next(iter(self.draws(subject, scheme)), None)

    def full(self, subject: str) -> Measurement | None:
        return self.find(subject, FULL_PRECISION)

    @cached_property
    def quantized_schemes(self) -> tuple[str, ...]:
        names = dict.fromkeys(m.scheme for m in self.measurements)
        return tuple(name for name in names if name != FULL_PRECISION)

    @cached_property
    def class_of(self) -> Mapping[str, str]:
        """The bit class of each scheme."""
        return {m.scheme: m.bit_class for m in self.measurements}

    @cached_property
    def documents(self) -> int:
        """Number of documents with at least one scored token; the same for all measurements."""
        return int(self.scored().sum()) if self.measurements else 0

    def scored(self) -> npt.NDArray[np.bool_]:
        return self.measurements[0].evidence.scored()

    @cached_property
    def _checkpoints(self) -> tuple[Subject, ...]:
        return tuple(s for s in self.subjects if s.kind == "checkpoint")

    @property
    def last_checkpoint(self) -> str | None:
        return self._checkpoints[-1].label if self._checkpoints else None

    def series_ends(self) -> tuple[str, ...]:
        """Return the last checkpoint, and the last ones of the ingredients beside it."""
        return tuple(self._checkpoints[k].label for k in ends([s.first for s in self._checkpoints]))

    def stage_ends(self) -> tuple[str, ...]:
        stages = {s.first.stage: s.label for s in self._checkpoints if s.first.stage is not None}
        return tuple(label for label in stages.values() if label != self.last_checkpoint)

    def members(self, soup: Subject) -> tuple[str, ...]:
        singles = {s.first: s.label for s in self._checkpoints}
        labels = (singles.get(checkpoint) for checkpoint, _ in soup.members)
        return tuple(dict.fromkeys(label for label in labels if label is not None))


def by_cell(measurements: Iterable[Measurement]) -> dict[tuple[str, str], list[Measurement]]:
    draws: dict[tuple[str, str], list[Measurement]] = {}
    for m in sorted(measurements, key=lambda m: m.calibration_seed):
        draws.setdefault(m.cell, []).append(m)
    return draws


def is_finite(measurement: Measurement) -> bool:
    return bool(np.isfinite(measurement.evidence.nll_sum).all())


Mean = Literal[
    "kl", "top1_agreement", "sure_flips", "rms_dp", "output_error", "routing_agreement",
    "routing_moved",
]  # fmt: skip


def scored_tokens(evidence: Evidence) -> Array:
    return evidence.tokens.astype(np.float64)


def _known(of: Callable[[Evidence], npt.NDArray[Any] | None]) -> Callable[[Evidence], Array]:
    """Return a function to sums over the tokens of each document; NaN where none were recorded.

    Of sums by layer it is the mean over layers.
    """

    def sums(evidence: Evidence) -> Array:
        sums_D = of(evidence)
        if sums_D is None:
            return np.full(len(evidence.tokens), np.nan)
        return sums_D.astype(np.float64) if sums_D.ndim == 1 else sums_D.mean(0, dtype=np.float64)

    return sums


def _sure(name: str, evidence: Evidence) -> npt.NDArray[np.int64] | None:
    """Return sums over the tokens of which full precision is sure."""
    sums = evidence.fidelity.by_confidence if evidence.fidelity else None
    return None if sums is None else getattr(sums, name)[:, SURE:].sum(axis=1)


sure_flips, sure_tokens = (_known(partial(_sure, name)) for name in ("flips", "tokens"))
_same_top = _known(lambda evidence: getattr(evidence.fidelity, "same_top", None))
_squared_dp = _known(lambda evidence: getattr(evidence.fidelity, "squared_dp_sum", None))
_output_error = _known(lambda evidence: evidence.output_error)
_same_experts = _known(lambda evidence: getattr(evidence.routing, "same", None))
_moved = _known(lambda evidence: getattr(evidence.routing, "moved", None))

MEANS: dict[Mean, tuple[Callable[[Evidence], Array], Statistic, float]] = {
    "kl": (divergences, statistics.per_token, math.inf),
    "top1_agreement": (_same_top, statistics.per_token, 1.0),
    "sure_flips": (sure_flips, statistics.per_token, 1.0),
    "rms_dp": (_squared_dp, lambda sums: np.sqrt(sums[0] / sums[1]), 1.0),
    "output_error": (_output_error, statistics.per_token, math.inf),
    "routing_agreement": (_same_experts, statistics.per_token, 1.0),
    "routing_moved": (_moved, statistics.per_token, 1.0),
}
"""Means over tokens: what is summed over documents, what it becomes, and its upper bound."""


def mean_columns(evidence: Evidence, name: Mean) -> tuple[Array, Array] | None:
    """Return (sums, tokens) of the scored documents; None where none were recorded."""
    sums, scored = MEANS[name][0], evidence.scored()
    sums_D = sums(evidence)[scored]
    if not np.isfinite(sums_D).all():
        return None
    return sums_D, (sure_tokens if sums is sure_flips else scored_tokens)(evidence)[scored]


def mean_of(evidence: Evidence, name: Mean, confidence: float) -> Interval | None:
    """Return a mean with its interval over documents; None where nothing was compared."""
    _, statistic, highest = MEANS[name]
    columns = mean_columns(evidence, name)
    if columns is None or not columns[1].sum():
        return None
    return statistics.within(statistics.interval(columns, statistic, confidence), 0.0, highest)


def agreement_of(other: Interval) -> Interval:
    """Return the agreement, from the disagreement, which draws move in proportion to itself."""
    return statistics.within(Interval(1 - other.estimate, 1 - other.high, 1 - other.low), 0.0, 1.0)


def disagreements(evidence: Evidence) -> Array:
    """Return the tokens of each document whose likeliest token is another."""
    return scored_tokens(evidence) - _same_top(evidence)


def reroutings(evidence: Evidence) -> Array:
    """Return the tokens of each document that go to other experts."""
    return scored_tokens(evidence) - _same_experts(evidence)


SUMS: Mapping[str, Sums] = {
    "losses": losses,
    "divergences": divergences,
    "disagreements": disagreements,
    "sure_flips": sure_flips,
    "reroutings": reroutings,
}
"""What a metric sums over documents, by name."""


def reference_columns(measured: Measurement, reference: str, confidence: float) -> dict[str, Any]:
    """Return the columns of a measurement, as far as it was compared with the reference.

    The reference itself is compared with its own full precision.
    """
    evidence = measured.evidence
    if measured.subject != reference:
        evidence = replace(evidence, fidelity=evidence.reference)
    return {
        "reference_kl": mean_of(evidence, "kl", confidence),
        "reference_top1_agreement": mean_of(evidence, "top1_agreement", confidence),
    }


def fidelity_columns(evidence: Evidence, confidence: float) -> dict[str, Any]:
    """Return the columns of a measurement, as far as it was compared with full precision."""
    means = ((name, mean_of(evidence, name, confidence)) for name in MEANS)
    columns: dict[str, Any] = {name: mean for name, mean in means if mean is not None}
    used = evidence.scored()
    if evidence.fidelity is None or "kl" not in columns:
        return columns
    counts_DB = evidence.fidelity.kl_counts[used]
    shares = {"kl_p50": 0.5, "kl_p90": 0.9, "kl_p99": 0.99, "kl_p999": 0.999}
    columns |= {name: quantile_interval(counts_DB, at, confidence) for name, at in shares.items()}
    columns["kl_max"] = float(evidence.fidelity.kl_max[used].max())
    if (sums := evidence.fidelity.by_confidence) is not None:
        tokens_B, kl_B = sums.tokens.sum(axis=0), sums.kl_sum.sum(axis=0)
        pairs = [(float(kl), int(tokens)) for kl, tokens in zip(kl_B, tokens_B, strict=True)]
        columns["confidence_shares"] = tuple(n / int(tokens_B.sum()) for _, n in pairs)
        columns["confidence_kl"] = tuple(kl / n if n else None for kl, n in pairs)
    return columns


def columns_of(
    table: Measurements, cells: Sequence[Cell], sums: Sums = losses
) -> tuple[Array, ...] | None:
    """Return the sums of cells, then tokens; None where one is missing, not finite, or empty."""
    measured = [each for cell in cells if (each := table.find(*cell)) is not None]
    columns = [sums(each.evidence) for each in measured]
    if not measured or len(measured) < len(cells) or not np.isfinite(columns).all():
        return None
    scored = table.scored()
    counts = sure_tokens if sums is sure_flips else scored_tokens
    tokens = counts(measured[0].evidence)[scored]
    columns = [column[scored].astype(np.float64) for column in columns]
    return (*columns, tokens) if tokens.any() else None


def largest_share(added_D: Array) -> float | None:
    """Return the largest part that a document has of a sum; None where the sum is no gain."""
    total = float(added_D.sum())
    return float(added_D.max()) / total if total > 0 else None


def estimated(
    table: Measurements,
    cells: Sequence[Cell],
    statistic: Statistic,
    *,
    confidence: float | None = None,
    sums: Sums = losses,
) -> Estimate | None:
    """Return a quantity; None where a sum is missing or not finite."""
    columns = columns_of(table, cells, sums)
    if columns is None:
        return None
    level = table.confidence if confidence is None else confidence
    return statistics.estimated(columns, statistic, level)


def interval_of(
    table: Measurements, cells: Sequence[Cell], statistic: Statistic, **how: Any
) -> Interval | None:
    result = estimated(table, cells, statistic, **how)
    return None if result is None else result.interval


def sided(low: Interval | None, high: Interval | None) -> Interval | None:
    """Return an interval with the lower end of one and the upper end of another."""
    return None if low is None or high is None else Interval(low.estimate, low.low, high.high)


@dataclass(frozen=True)
class Moved:
    """How far arithmetic alone moved a measurement, per token; None is not measured."""

    nats: float
    kl: float | None = None
    top1: float | None = None  # the share of tokens


def noise(table: Measurements, floor: Mapping[Cell, Moved]) -> Iterator[Noise]:
    """Yield what else moves added losses than documents, where it is known.

    `table` has every draw of calibration text, and `floor` how far rounding alone moves a
    measurement. None of it is in an interval.
    """
    drawn = [cell for cell in table.cells if len(table.draws(*cell)) > 1]
    for subject, scheme in dict.fromkeys((*drawn, *floor)):
        full, draws = table.full(subject), table.draws(subject, scheme)
        result = draw = numerical = None
        if scheme != FULL_PRECISION:
            cells = [(subject, scheme), (subject, FULL_PRECISION)]
            result = estimated(table, cells, statistics.excess)
        spread = result.spread if result else None
        moved = floor.get((subject, scheme))
        if full is not None and is_finite(full):
            loss = float(full.evidence.nll_sum.sum())
            if len(draws) > 1 and all(map(is_finite, draws)):
                totals = [float(m.evidence.nll_sum.sum()) for m in draws]
                draw = float(np.std(totals, ddof=1)) / loss  # of the added loss
            if moved:
                numerical = moved.nats * float(full.evidence.tokens.sum()) / loss
        yield Noise(
            subject=subject,
            scheme=scheme,
            draws=len(draws),
            interval=result.interval if result and spread else None,
            documents=spread.standard_error if spread else None,
            draw=draw,
            numerical=numerical,
            numerical_nats=moved.nats if moved else None,
            kl_floor=moved.kl if moved else None,
            top1_floor=moved.top1 if moved else None,
        )


@dataclass(frozen=True)
class Deciding:
    """What would decide, in a sentence; the documents where more of them do."""

    hint: str
    documents: int | None = None


def settling(
    table: Measurements,
    cells: Sequence[Cell],
    statistic: Statistic,
    margin: float = 0.0,
    interval: Interval | None = None,
    sums: Sums = losses,
) -> Deciding:
    """Return how many documents decide on which side of a margin a quantity is.

    `interval` is that which is held against the margin; by default the plain one.
    """
    result = estimated(table, cells, statistic, sums=sums)
    if result is None or result.spread is None:
        return Deciding("")
    whole, error = interval or result.interval, result.spread.standard_error
    needed = statistics.documents_to_decide(whole, error, table.documents, margin)
    return deciding(needed, table.documents)


def deciding(needed: int | None, measured: int) -> Deciding:
    if needed is None:
        most = f"{statistics.MOST_TO_DECIDE:,} documents would not decide it in four of five cases"
        return Deciding(f"at the margin: {most}")
    hint = f"needs about {needed:,} documents to decide; {measured:,} were measured"
    return Deciding(hint, needed)
