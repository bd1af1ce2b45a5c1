"""What each stream makes of rollouts: how far it is from them, and where it would leave them.

The unit is the prompt: all samples behind it are summed, and intervals are over prompts. The KL
divergence of a sequence is the sum of those of its tokens, E_p[sum KL_t], which has far less noise
than that of log p / q; the expectation is over drawn samples, of which a greedy one is none. Along
a greedy rollout the first token that is not a stream's own choice is where its own generation would
differ: nothing is generated for that. Along a sampled one that place means nothing, and is not
measured. Drawn answers that carry marks give the score to expect of a stream by importance weights
(`core/items.py`).

Scored is what ships; all other streams are in `audit.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qaudit.core import statistics
from qaudit.core.statistics import Array
from qaudit.diagnostics.strata import Binned, interval_of, of_bin
from qaudit.judge.rollouts import (
    REASONING,
    TURN,
    change_of_end,
    places_of_divergence,
    tokens_to_divergence,
    weighed,
)
from qaudit.judge.table import Cell, Measurements
from qaudit.report import document as doc
from qaudit.report.format import or_dash, percent, spread
from qaudit.report.views import View
from qaudit.types import (
    FULL_PRECISION,
    Diagnostics,
    Finding,
    Interval,
    PositionRow,
    Positions,
    RoleRow,
    Roles,
    RolloutEvidence,
    RolloutRow,
)

Ints = npt.NDArray[np.signedinteger[Any]]

LEAST_ENDS = 1.0
"""Of a role or of positions: where fewer ends are expected, a change of them decides nothing."""


def judge(table: Measurements, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
    """Return the diagnostics with a row for each stream that scored rollouts, and no finding."""
    rows = (_row(table, cell) for cell in table.cells)
    return replace(
        diagnostics,
        rollouts=tuple(row for row in rows if row is not None),
        rollout_roles=tuple(
            RoleRow(role=roles.names[b], **columns)
            for roles, b, columns in _parts(table, "roles", Roles)
        ),
        rollout_positions=tuple(
            PositionRow(first=int(bins.edges[b]), last=int(bins.edges[b + 1]) - 1, **columns)
            for bins, b, columns in _parts(table, "positions", Positions)
        ),
    ), ()


def _parts(
    table: Measurements, name: str, kind: type[Binned]
) -> Iterator[tuple[Binned, int, dict[str, Any]]]:
    """Yield each role or bin of positions that has tokens, of every stream, and its columns."""
    for cell in table.cells:
        measured = table.draws(*cell)[0]
        evidence, of_full = measured.evidence.rollouts, _of_full(table, cell)
        samples = getattr(evidence, name, None)
        if evidence is None or not isinstance(samples, kind):
            continue
        by_prompt = _ByPrompt.of(evidence)
        part = by_prompt.sums_of(samples)
        full, beside = getattr(of_full, name, None), None
        is_comparable = of_full is not None and evidence.sha256 == of_full.sha256
        if is_comparable and isinstance(full, kind):
            shapes = {e.end_sum.shape for e in (samples, full) if e.end_sum is not None}
            beside = by_prompt.sums_of(full) if len(shapes) == 1 else None
        bins = np.flatnonzero(part.tokens.sum(axis=0) > 0)
        level = statistics.simultaneous(table.confidence, len(bins))
        for b in map(int, bins):
            columns = of_bin(measured, b, part, beside, level)
            for end in {TURN, REASONING}.intersection(evidence.end_names):
                number = evidence.end_names.index(end)
                ends = [each.end_sum for each in (part, beside) if each is not None]
                sums = [end_DPG[:, b, number] for end_DPG in ends if end_DPG is not None]
                columns[f"end_of_{end}"] = _end(sums, level)
            yield part, b, columns


def _end(sums: Sequence[Array], confidence: float) -> Interval | None:
    """Return by how much an end is likelier; None where not even one is expected."""
    if len(sums) < 2 or max(float(column.sum()) for column in sums) < LEAST_ENDS:
        return None
    return statistics.within(
        statistics.interval(tuple(sums), statistics.excess, confidence), -1.0, np.inf
    )


@dataclass(frozen=True, eq=False)
class _ByPrompt:
    """Samples summed by prompt."""

    place: Ints  # (S,) of each sample's prompt
    count: int

    @classmethod
    def of(cls, evidence: RolloutEvidence) -> _ByPrompt:
        prompts, place = np.unique(evidence.prompt, return_inverse=True)
        return cls(place, len(prompts))

    def sums(self, values: Array | Ints | None = None) -> Array:
        sums: Array = np.bincount(self.place, values, self.count).astype(np.float64)
        return sums

    def sums_of(self, part: Binned) -> Binned:
        sums: dict[str, Any] = {}
        for name in ("tokens", "nll_sum", "kl_sum", "end_sum"):
            values: Any = getattr(part, name)
            if values is not None:
                sums[name] = np.zeros((self.count, *values.shape[1:]), values.dtype)
                np.add.at(sums[name], self.place, values)
        return replace(part, **sums)


def _row(table: Measurements, cell: Cell) -> RolloutRow | None:
    measured = table.draws(*cell)[0]
    evidence = measured.evidence.rollouts
    if evidence is None:
        return None
    by_prompt, level = _ByPrompt.of(evidence), table.confidence
    tokens = by_prompt.sums(evidence.tokens)
    kl = sequence_kl = None
    if evidence.kl_sum is not None:
        kl = _ratio(by_prompt.sums(evidence.kl_sum), tokens, level)
        drawn = evidence.agreed < 0  # of greedy ones only where there are no others
        counted = drawn if drawn.any() else ~drawn
        samples = by_prompt.sums(counted.astype(np.float64))
        sums = by_prompt.sums(evidence.kl_sum * counted)
        sequence_kl = _ratio(sums[samples > 0], samples[samples > 0], level)
    of_full = _of_full(table, cell)
    return RolloutRow(
        subject=cell[0],
        scheme=cell[1],
        spec=measured.spec,
        prompts=by_prompt.count,
        samples=len(evidence.prompt),
        tokens=int(evidence.tokens.sum()),
        ce=_ratio(by_prompt.sums(evidence.nll_sum), tokens, level),
        kl=kl,
        sequence_kl=sequence_kl,
        **_divergence(evidence, level),
        end_of_turn=change_of_end(evidence, of_full, TURN, level),
        end_of_reasoning=change_of_end(evidence, of_full, REASONING, level),
        **_score(evidence, evidence if cell[1] == FULL_PRECISION else of_full, table, cell),
    )


def _of_full(table: Measurements, cell: Cell) -> RolloutEvidence | None:
    """Return what a stream is compared with; full precision itself with nothing."""
    full = table.full(cell[0]) if cell[1] != FULL_PRECISION else None
    return full.evidence.rollouts if full else None


def _ratio(sums: Array, counts: Array, confidence: float) -> Interval:
    return statistics.interval((sums, counts), statistics.per_token, confidence)


def _divergence(evidence: RolloutEvidence, confidence: float) -> dict[str, Any]:
    """Return the median of tokens to divergence, and the share of prompts without; greedy only."""
    places, median = places_of_divergence(evidence), tokens_to_divergence(evidence, confidence)
    if median is None:
        return {"tokens_to_divergence": None, "never_diverges": None}
    return {
        "tokens_to_divergence": median if np.isfinite(median.estimate) else None,
        "never_diverges": statistics.accuracy(np.isinf(places), confidence),
    }


def _score(
    evidence: RolloutEvidence, full: RolloutEvidence | None, table: Measurements, cell: Cell
) -> dict[str, Any]:
    """Return what a stream's answers are expected to score, or why that is not said."""
    if evidence.mark is None:
        return {}
    subjects = {subject.label: subject for subject in table.subjects}
    result = weighed(evidence, full, subjects[cell[0]], table.confidence)
    if isinstance(result, str):
        return {"unweighed": result}
    return {
        "expected_score": result.score,
        "expected_change": None if evidence is full else result.change,
        "effective_samples": result.effective,
        "unweighed": result.reason,
    }


TITLE = "Rollouts"
COLUMNS = (
    "subject", "scheme", "KL of a sequence, nats", "tokens to divergence", "never diverges, %",
    "end of turn, %", "end of reasoning, %",
)  # fmt: skip
PARTS = ("part", "tokens", "KL, nats", "end of turn, %", "end of reasoning, %")
SCORES = ("subject", "scheme", "expected score", "change", "effective samples")


def section(view: View) -> doc.Section:
    rows = {(row.subject, row.scheme): row for row in view.audit.diagnostics.rollouts}
    cells = [(subject, name) for subject, scheme in view.ships for name in (FULL_PRECISION, scheme)]
    shown = [rows[cell] for cell in dict.fromkeys(cells) if cell in rows]
    if not shown:
        return doc.Section(TITLE, (), 6)
    first = next(iter(rows.values()))
    about = (
        f"{first.samples:,} rollouts of {first.prompts:,} prompts, {first.tokens:,} tokens; "
        "intervals are over prompts. Tokens to divergence: the median along greedy rollouts; "
        "ends: how much more probable than in full precision."
    )
    parts = [_part_blocks(cell, view.audit.diagnostics) for cell in view.ships]
    table = (
        (
            doc.name_cell(row.subject),
            row.scheme,
            interval_of(row.sequence_kl, spread),
            _tokens(row),
            interval_of(row.never_diverges, percent),
            interval_of(row.end_of_turn, percent),
            interval_of(row.end_of_reasoning, percent),
        )
        for row in shown
    )
    blocks = (doc.paragraph(about), doc.table(COLUMNS, table), *_scores(shown))
    return doc.Section(TITLE, (*blocks, *(fold for fold in parts if fold is not None)), 6)


def _part_blocks(cell: tuple[str, str], diagnostics: Diagnostics) -> doc.Block | None:
    rows: list[tuple[str, RoleRow | PositionRow]] = [(r.role, r) for r in diagnostics.rollout_roles]
    rows += [(f"tokens {r.first:,} to {r.last:,}", r) for r in diagnostics.rollout_positions]
    table = [
        (
            name,
            f"{row.tokens:,}",
            interval_of(row.kl, spread),
            interval_of(row.end_of_turn, percent),
            interval_of(row.end_of_reasoning, percent),
        )
        for name, row in rows
        if (row.subject, row.scheme) == cell
    ]
    title = f"{cell[0]} at {cell[1]}, by role and by place in the answer"
    return doc.fold(title, doc.table(PARTS, table)) if table else None


def _scores(rows: Sequence[RolloutRow]) -> tuple[doc.Block, ...]:
    """Return the scores to expect, and why some are not said; nothing without marks."""
    marked = [row for row in rows if row.unweighed or row.expected_score]
    if not marked:
        return ()
    about = (
        "Expected scores are of answers that full precision wrote and something else marked, each "
        "weighted by how likely a scheme is to write it; nothing is generated again."
    )
    reasons = dict.fromkeys(f"{r.scheme}: {r.unweighed}." for r in marked if r.unweighed)
    table = (
        (
            doc.name_cell(row.subject),
            row.scheme,
            interval_of(row.expected_score, spread),
            interval_of(row.expected_change, spread),
            or_dash(row.effective_samples, "{:.0f}".format),
        )
        for row in marked
    )
    return (doc.paragraph(about, *reasons), doc.table(SCORES, table))


def _tokens(row: RolloutRow) -> str:
    """Print a median with its bounds, the upper of which may be beyond the longest rollout."""
    median = row.tokens_to_divergence
    if median is None:
        return "-" if row.never_diverges is None else "most never diverge"
    ends = (median.low, median.high)
    low, high = ("never" if end == float("inf") else f"{end:,.0f}" for end in ends)
    return f"{median.estimate:,.0f} [{low}, {high}]"
