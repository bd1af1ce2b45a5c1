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
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qaudit.core import statistics
from qaudit.core.statistics import Array
from qaudit.diagnostics.strata import Binned, bins_of, interval_of
from qaudit.judge.table import Cell, Measurements
from qaudit.judge.tasks import (
    REASONING,
    TURN,
    change_of_end,
    places_of_divergence,
    tokens_to_divergence,
    weighed,
)
from qaudit.report import document as doc
from qaudit.report.format import or_dash, percent, spread
from qaudit.report.views import View
from qaudit.types import (
    FULL_PRECISION,
    Diagnostics,
    Finding,
    Interval,
    PositionRow,
    RoleRow,
    RolloutEvidence,
    RolloutRow,
)

LEAST_ENDS = 1.0
"""Of a role or of positions: where fewer ends are expected, a change of them decides nothing."""


def judge(table: Measurements, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
    """Return the diagnostics with a row for each stream that scored rollouts, and no finding."""
    rows = (_row(table, cell) for cell in table.cells)
    return replace(
        diagnostics,
        rollouts=tuple(row for row in rows if row is not None),
        rollout_roles=tuple(RoleRow(**columns) for columns in _parts(table, "roles")),
        rollout_positions=tuple(PositionRow(**columns) for columns in _parts(table, "positions")),
    ), ()


def _parts(table: Measurements, name: str) -> Iterator[dict[str, Any]]:
    """Yield the columns of each role or bin of positions that has tokens, of every stream."""
    for cell in table.cells:
        measured = table.draws(*cell)[0]
        evidence, of_full = measured.evidence.rollouts, _of_full(table, cell)
        samples = getattr(evidence, name, None)
        if evidence is None or samples is None:
            continue
        part, beside = _parts_by_prompt(evidence, samples), None
        full = getattr(of_full, name, None)
        if full is not None and of_full is not None and evidence.sha256 == of_full.sha256:
            shapes = {e.end_sum.shape for e in (samples, full) if e.end_sum is not None}
            beside = _parts_by_prompt(evidence, full) if len(shapes) == 1 else None
        for b, level, columns in bins_of(measured, part, beside, table.confidence):
            for end in {TURN, REASONING}.intersection(evidence.end_names):
                number = evidence.end_names.index(end)
                ends = [each.end_sum for each in (part, beside) if each is not None]
                sums = tuple(end_DPG[:, b, number] for end_DPG in ends if end_DPG is not None)
                change = None  # where not even one end is expected
                if len(sums) == 2 and max(float(column.sum()) for column in sums) >= LEAST_ENDS:
                    change = statistics.interval(sums, statistics.excess, level)
                    change = statistics.within(change, -1.0, np.inf)
                columns[f"end_of_{end}"] = change
            yield columns


def _parts_by_prompt(evidence: RolloutEvidence, part: Binned) -> Binned:
    names = ("tokens", "nll_sum", "kl_sum", "end_sum")
    arrays = {name: values for name in names if (values := getattr(part, name)) is not None}
    sums: dict[str, Any] = {k: _by_prompt(evidence, values) for k, values in arrays.items()}
    return replace(part, **sums)


def _by_prompt(evidence: RolloutEvidence, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return numbers of samples added up by their prompt."""
    prompts, place = np.unique(evidence.prompt, return_inverse=True)
    sums = np.zeros((len(prompts), *values.shape[1:]), values.dtype)
    np.add.at(sums, place, values)
    return sums


def _row(table: Measurements, cell: Cell) -> RolloutRow | None:
    measured = table.draws(*cell)[0]
    evidence, level = measured.evidence.rollouts, table.confidence
    if evidence is None:
        return None

    def sums_of(values: npt.NDArray[Any]) -> Array:
        return _by_prompt(evidence, values.astype(np.float64))

    def ratio(sums: Array, counts: Array) -> Interval:
        return statistics.interval((sums, counts), statistics.per_token, level)

    tokens = sums_of(evidence.tokens)
    kl = sequence_kl = None
    if evidence.kl_sum is not None:
        kl = ratio(sums_of(evidence.kl_sum), tokens)
        drawn = evidence.agreed < 0  # of greedy ones only where there are no others
        counted = drawn if drawn.any() else ~drawn
        samples, sums = sums_of(counted), sums_of(evidence.kl_sum * counted)
        sequence_kl = ratio(sums[samples > 0], samples[samples > 0])
    # Of greedy rollouts alone: the median, and the share of prompts without a divergence.
    places, median = places_of_divergence(evidence), tokens_to_divergence(evidence, level)
    of_full = _of_full(table, cell)
    expected: dict[str, Any] = {}  # scores of the stream's answers, or why there are none
    if evidence.mark is not None:
        subject = next(s for s in table.subjects if s.label == cell[0])
        result = weighed(
            evidence, evidence if cell[1] == FULL_PRECISION else of_full, subject, level
        )
        expected["unweighed"] = result if isinstance(result, str) else result.reason
        if not isinstance(result, str):
            expected["expected_score"] = result.score
            expected["expected_change"] = None if cell[1] == FULL_PRECISION else result.change
            expected["effective_samples"] = result.effective
    return RolloutRow(
        subject=cell[0],
        scheme=cell[1],
        spec=measured.spec,
        prompts=len(tokens),
        samples=len(evidence.prompt),
        tokens=int(evidence.tokens.sum()),
        ce=ratio(sums_of(evidence.nll_sum), tokens),
        kl=kl,
        sequence_kl=sequence_kl,
        tokens_to_divergence=median if median and np.isfinite(median.estimate) else None,
        never_diverges=statistics.accuracy(np.isinf(places), level) if median else None,
        end_of_turn=change_of_end(evidence, of_full, TURN, level),
        end_of_reasoning=change_of_end(evidence, of_full, REASONING, level),
        **expected,
    )


def _of_full(table: Measurements, cell: Cell) -> RolloutEvidence | None:
    """Return what a stream is compared with; full precision itself with nothing."""
    full = table.full(cell[0]) if cell[1] != FULL_PRECISION else None
    return full.evidence.rollouts if full else None


TITLE = "Rollouts"
COLUMNS = (
    "subject", "scheme", "KL of a sequence, nats", "tokens to divergence", "never diverges, %",
    "end of turn, %", "end of reasoning, %",
)  # fmt: skip
PARTS = ("part", "tokens", "KL, nats", "end of turn, %", "end of reasoning, %")
SCORES = ("subject", "scheme", "expected score", "change", "effective samples")


def section(view: View) -> doc.Section:
    rows = {row.cell: row for row in view.audit.diagnostics.rollouts}
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
    blocks = [doc.paragraph(about), doc.table(COLUMNS, table), *_scores(shown)]
    tables = view.audit.diagnostics
    named: list[tuple[str, RoleRow | PositionRow]] = [(r.role, r) for r in tables.rollout_roles]
    named += [(f"tokens {r.first:,} to {r.last:,}", r) for r in tables.rollout_positions]
    for cell in view.ships:
        part = [
            (
                name,
                f"{row.tokens:,}",
                interval_of(row.kl, spread),
                interval_of(row.end_of_turn, percent),
                interval_of(row.end_of_reasoning, percent),
            )
            for name, row in named
            if row.cell == cell
        ]
        if part:
            title = f"{cell[0]} at {cell[1]}, by role and by place in the answer"
            blocks.append(doc.fold(title, doc.table(PARTS, part)))
    return doc.Section(TITLE, tuple(blocks), 6)


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
