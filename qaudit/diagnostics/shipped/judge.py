"""Rank files by KL divergence: which is dominated, and which looks broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qaudit.core import statistics
from qaudit.core.shipped import LOOKS_BROKEN, Shipped
from qaudit.judge.fidelity import mean_of
from qaudit.judge.pooling import estimated
from qaudit.judge.table import Measurements, divergences
from qaudit.types import FULL_PRECISION, Diagnostics, Finding, Interval, Measurement, ShippedRow


def judge(table: Measurements, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
    """Return the diagnostics with their ranking, and what is wrong with files."""
    rows: list[ShippedRow] = []
    findings: list[Finding] = []
    for subject in table.subjects:
        ranked, more = _ranked(table, subject.label)
        rows += ranked
        findings += more
    return replace(diagnostics, shipped=tuple(rows)), tuple(findings)


def _ranked(table: Measurements, subject: str) -> tuple[list[ShippedRow], list[Finding]]:
    """Rank the files of one base; schemes that were measured beside them may dominate them."""
    first = {m.scheme: m for m in reversed(table.measurements) if m.subject == subject}
    quantized = [m for m in first.values() if m.scheme != FULL_PRECISION]
    files = [m for m in quantized if is_shipped(m.spec)]
    level = statistics.simultaneous(table.confidence, len(files) * (len(quantized) - 1))
    rows: list[ShippedRow] = []
    findings: list[Finding] = []
    for file in sorted(files, key=lambda m: (_divergence(m), m.scheme)):
        leads = _leads(table, file, quantized, level)
        broken = tuple(note for note in file.notes if note.startswith(LOOKS_BROKEN))
        rows.append(_row(table, file, tuple(leads), broken))
        findings += [_dominated(file, leads)] if leads else []
        findings += [_broken(file, note) for note in broken]
    return rows, findings


def is_shipped(spec: str) -> bool:
    """Return whether a canonical form is that of a quantized file."""
    return spec.startswith(f"{Shipped.name}:")


def _divergence(one: Measurement) -> float:
    mean = mean_of(one.evidence, "kl", 0.95)
    return mean.estimate if mean else float("inf")


def _leads(
    table: Measurements, file: Measurement, others: Sequence[Measurement], level: float
) -> dict[str, Interval]:
    """Return the files that dominate one, and by how many nats per token.

    It takes no more bytes and diverges less, paired by document.
    """
    leads: dict[str, Interval] = {}
    for measurement in others:
        smaller = (
            measurement.nbytes is not None
            and file.nbytes is not None
            and measurement.nbytes <= file.nbytes
        )
        if measurement.scheme == file.scheme or not smaller:
            continue
        cells = [(file.subject, file.scheme), (measurement.subject, measurement.scheme)]
        lead = estimated(table, cells, statistics.change, confidence=level, sums=divergences)
        if lead is not None and lead.interval.low > 0:
            leads[measurement.scheme] = lead.interval
    return leads


def _row(
    table: Measurements, file: Measurement, dominated_by: tuple[str, ...], broken: tuple[str, ...]
) -> ShippedRow:
    pairs = dict(pair.split("=", 1) for pair in file.spec.split(":") if "=" in pair)
    return ShippedRow(
        subject=file.subject,
        scheme=file.scheme,
        spec=file.spec,
        format=pairs.get("format", ""),
        bits=int(pairs["bits"]) if pairs.get("bits", "").isdigit() else None,
        nbytes=file.nbytes,
        kl=mean_of(file.evidence, "kl", table.confidence),
        dominated_by=dominated_by,
        looks_broken=broken,
    )


def _dominated(file: Measurement, leads: dict[str, Interval]) -> Finding:
    best = max(leads, key=lambda name: leads[name].estimate)
    cell, lead = (file.subject, file.scheme), leads[best]
    more = f", as by {len(leads) - 1} more" if len(leads) > 1 else ""
    message = (
        f"`{file.scheme}` is dominated by `{best}`, which takes no more bytes and diverges "
        f"by {lead.estimate:.2g} nats per token less{more}"
    )
    return Finding("QA042", "info", *cell, message, f"take `{best}`", lead, margin=0.0)


def _broken(file: Measurement, note: str) -> Finding:
    message = f"`{file.scheme}` {note}"
    hint = "compare it with another file of this model, or quantize it again"
    return Finding("QA043", "warn", file.subject, file.scheme, message, hint)
