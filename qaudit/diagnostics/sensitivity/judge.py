"""Findings of `sensitivity`: roles that add most of the error, mixtures unlike their sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qaudit.judge.table import Measurements
from qaudit.types import Diagnostics, Finding, SensitivityRow

MOST = 0.5
"""A role adds most of the error if all of the interval of its share is above this."""


def judge(table: Measurements, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
    """Return the diagnostics as they are, and the findings QA035 and QA036."""
    return diagnostics, tuple(diagnosed_findings(diagnostics.sensitivity))


def diagnosed_findings(rows: Sequence[SensitivityRow]) -> Iterator[Finding]:
    low = {row.bits for row in rows if row.part == "all"}
    for row in rows:
        if row.part == "role" and row.bits == min(filter(None, low), default=row.bits):
            yield from _most(row)
        elif row.part == "mixture":
            yield from _off(row)


def _most(row: SensitivityRow) -> Iterator[Finding]:
    share = row.share
    if share is None or share.low <= MOST:
        return
    message = (
        f"of what the roles of `{row.subject}` add to the loss at {row.scheme}, each quantized "
        f"alone, `{row.name}` adds {100 * share.estimate:.0f} % "
        f"[{100 * share.low:.0f}, {100 * share.high:.0f}]"
    )
    hint = f"more bits for `{row.name}` alone may pay most; measure such a mixture"
    yield Finding("QA035", "info", row.subject, row.scheme, message, hint, share, outcome="pass")


def _off(row: SensitivityRow) -> Iterator[Finding]:
    change = row.absolute_change
    if change is None or row.predicted is None or change.low <= row.predicted <= change.high:
        return
    message = (
        f"the suggested mixture of bits for `{row.subject}` adds {change.estimate:.4f} "
        f"[{change.low:.4f}, {change.high:.4f}] nats per token, where its parts add up to "
        f"{row.predicted:.4f}: they act on each other"
    )
    hint = "use the measured loss, not the sum of the parts"
    yield Finding("QA036", "info", row.subject, row.scheme, message, hint, change, outcome="pass")
