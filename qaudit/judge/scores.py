"""Each measurement, and each comparison of two subjects, with its intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from qaudit.core import statistics
from qaudit.core.statistics import Statistic, documents_for_width
from qaudit.errors import AuditError
from qaudit.judge.choose import NO_SEARCH
from qaudit.judge.quantities import (
    MEANS,
    estimated,
    fidelity_columns,
    largest_share,
    reference_columns,
)
from qaudit.judge.table import Cell, EvidenceFiles, Measurements, is_finite
from qaudit.types import (
    FULL_PRECISION,
    Comparison,
    Interval,
    Measurement,
    MeasurementRow,
)

NARROW = 0.1
"""Of an estimate: how far its interval reaches with the documents that a row names."""

ComparisonKind = Literal["outright", "difference_of_differences", "relative_error_difference"]
Outcome = Literal["a_better", "b_better", "equivalent", "inconclusive"]
UNITS: dict[ComparisonKind, str] = {
    "outright": "nats per token",
    "difference_of_differences": "nats per token",
    "relative_error_difference": "fraction",
}


def score(
    table: Measurements, measured: Measurement, files: EvidenceFiles, reference: str | None = None
) -> MeasurementRow:
    evidence, confidence = measured.evidence, table.confidence
    nll, tokens = evidence.nll_sum, evidence.tokens
    used = tokens > 0
    full = None if measured.scheme == FULL_PRECISION else table.full(measured.subject)
    relative = change = share = needed = None
    if full is not None and is_finite(full) and is_finite(measured) and used.any():
        pair = nll[used], full.evidence.nll_sum[used]
        relative = statistics.relative_error(*pair, confidence)
        change = statistics.absolute_change(*pair, tokens[used], confidence)
        share = largest_share(pair[0] - pair[1])
        needed = documents_for_width(
            pair, statistics.excess, NARROW, confidence
        )  # as it is printed
    ce = statistics.cross_entropy(nll[used], tokens[used], confidence)
    per_byte = is_finite(measured) and evidence.nbytes.any()
    kl_columns = MEANS["kl"].columns(evidence, evidence.scored())
    needed_for_kl = kl_columns and documents_for_width(
        kl_columns, statistics.per_token, NARROW, confidence
    )
    per_parameter = None
    if measured.nbytes is not None and measured.parameters:
        per_parameter = 8 * measured.nbytes / measured.parameters
    path, sha256 = _file(measured, files)
    return MeasurementRow(
        subject=measured.subject,
        scheme=measured.scheme,
        spec=measured.spec,
        calibration_seed=measured.calibration_seed,
        ce=ce,
        relative_error=relative,
        absolute_change=change,
        perplexity=statistics.perplexity(ce.estimate),
        bits_per_byte=statistics.bits_per_byte(nll, evidence.nbytes) if per_byte else None,
        documents=table.documents,
        tokens=int(tokens.sum()),
        bits_per_weight=measured.bits_per_weight,
        seconds=measured.seconds,
        notes=measured.notes,
        evidence=path,
        evidence_sha256=sha256,
        bits_per_parameter=per_parameter,
        nbytes=measured.nbytes,
        worst_share=share,
        documents_for_loss=needed,
        documents_for_kl=needed_for_kl,
        bit_class=measured.bit_class,
        calibrates=measured.calibrates,
        mixture=measured.mixture,
        **fidelity_columns(evidence, confidence),
        **(reference_columns(measured, reference, confidence) if reference else {}),
    )


def _file(measured: Measurement, files: EvidenceFiles) -> tuple[str, str]:
    try:
        return files[measured.subject, measured.spec, measured.calibration_seed]
    except KeyError:
        raise AuditError(
            f"there is no evidence for `{measured.subject}` under `{measured.scheme}`",
            hint="run the same scan again: what is missing is measured again",
        ) from None


def first_rows(rows: Sequence[MeasurementRow]) -> dict[Cell, MeasurementRow]:
    """Return one row for each subject and scheme: of several draws the one that is judged."""
    first: dict[Cell, MeasurementRow] = {}
    for row in sorted(rows, key=lambda row: row.calibration_seed):
        first.setdefault((row.subject, row.scheme), row)
    return {(row.subject, row.scheme): first[row.subject, row.scheme] for row in rows}


def compare(table: Measurements, searched: Mapping[str, int] = NO_SEARCH) -> tuple[Comparison, ...]:
    """Compare pairs of subjects under every scheme that both were measured with.

    Differences are paired on the same documents; a negative one favours `a`. Three questions can
    have different answers: which quantized model is better as it is (`outright`, which decides
    what to ship), which loses less to quantization in nats (`difference_of_differences`), and which
    loses a smaller part of its own loss (`relative_error_difference`, the reading of the papers).

    The best of ten soups looks better than its members by luck alone: the intervals of soups hold
    for all soups at once, those that a search tried (`searched`) among them.
    """
    soups = [subject.label for subject in table.subjects if subject.kind == "soup"]
    among = sum(max(1, searched.get(label, 1)) for label in soups)

    def compared(a: str, b: str) -> Iterator[Comparison]:
        chosen = not {a, b}.isdisjoint(soups)
        level = statistics.simultaneous(table.confidence, among if chosen else 1)
        for scheme in (FULL_PRECISION, *table.quantized_schemes):
            for kind, interval in _intervals(table, scheme, a, b, level):
                verdict = judge_difference(interval, table.documents)
                yield Comparison(
                    kind, UNITS[kind], scheme, a, b, interval, verdict, table.documents
                )

    return tuple(row for a, b in _pairs(table) for row in compared(a, b))


def _pairs(table: Measurements) -> Iterator[tuple[str, str]]:
    """Yield soups with members and the last checkpoint, and what ends a series with stages."""
    last = table.last_checkpoint
    for subject in table.subjects:
        if subject.kind == "soup":
            rivals = dict.fromkeys([*table.members(subject), *([last] if last else [])])
            yield from ((subject.label, other) for other in rivals)
    for reached in table.series_ends():
        yield from ((reached, end) for end in table.stage_ends() if reached != end)


def _intervals(
    table: Measurements, scheme: str, a: str, b: str, level: float
) -> Iterator[tuple[ComparisonKind, Interval]]:
    outright = estimated(table, [(a, scheme), (b, scheme)], statistics.change, confidence=level)
    if outright is None:
        return
    yield "outright", outright.interval
    if scheme == FULL_PRECISION:
        return
    four = [(label, which) for label in (a, b) for which in (scheme, FULL_PRECISION)]
    kinds: tuple[tuple[ComparisonKind, Statistic], ...] = (
        ("difference_of_differences", statistics.change_difference),
        ("relative_error_difference", statistics.excess_difference),
    )
    for kind, statistic in kinds:
        difference = estimated(table, four, statistic, confidence=level)
        if difference is not None:
            yield kind, difference.interval


def judge_difference(interval: Interval, documents: int, margin: float = 0.0) -> Outcome:
    """Compare an interval with zero, or with a margin inside which differences do not matter."""
    if documents < statistics.MINIMUM_DOCUMENTS:
        return "inconclusive"
    if -margin <= interval.low and interval.high <= margin:
        return "equivalent"
    if interval.high < 0:
        return "a_better"
    if interval.low > 0:
        return "b_better"
    return "inconclusive"
