"""Rank files by KL divergence: which is dominated, and which looks broken.

The ranking of shipped files: bytes, KL divergence, what dominates them, what was seen.

KL divergence of files and schemes, a row for each, the smallest file lowest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from qaudit.core import statistics
from qaudit.core.scheme import LOOKS_BROKEN, Shipped
from qaudit.diagnostics.diagnostic import DiagnosticFigure
from qaudit.judge.table import Measurements, divergences, estimated, mean_of
from qaudit.report import document as doc
from qaudit.report.chart import COLOURS, Chart
from qaudit.report.format import NOT_MEASURED, listing, or_dash, percent, size, spread
from qaudit.report.plots import ROW, rows_of
from qaudit.report.views import View
from qaudit.types import (
    FULL_PRECISION,
    Diagnostics,
    Finding,
    Interval,
    Measurement,
    MeasurementRow,
    ShippedRow,
)


def judge(table: Measurements, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
    """Return the diagnostics with their ranking, and what is wrong with files."""
    rows: list[ShippedRow] = []
    findings: list[Finding] = []
    for subject in table.subjects:
        # Schemes that were measured beside the files of a base may dominate them.
        first = {m.scheme: m for m in reversed(table.measurements) if m.subject == subject.label}
        quantized = [m for m in first.values() if m.scheme != FULL_PRECISION]
        files = [m for m in quantized if is_shipped(m.spec)]
        level = statistics.simultaneous(table.confidence, len(files) * (len(quantized) - 1))
        for file in sorted(files, key=lambda m: (_divergence(m), m.scheme)):
            row, leads = _ranked(table, file, quantized, level)
            rows.append(row)
            cell = file.subject, file.scheme
            if leads:
                best = max(leads, key=lambda name: leads[name].estimate)
                lead, more = leads[best], len(leads) - 1
                message = (
                    f"`{file.scheme}` is dominated by `{best}`, which takes no more bytes and "
                    f"diverges by {lead.estimate:.2g} nats per token less"
                    + (f", as by {more} more" if more else "")
                )
                hint = f"take `{best}`"
                findings.append(Finding("QA042", "info", *cell, message, hint, lead, margin=0.0))
            for note in row.looks_broken:
                hint = "compare it with another file of this model, or quantize it again"
                findings.append(Finding("QA043", "warn", *cell, f"`{file.scheme}` {note}", hint))
    return replace(diagnostics, shipped=tuple(rows)), tuple(findings)


def is_shipped(spec: str) -> bool:
    """Return whether a canonical form is that of a quantized file."""
    return spec.startswith(f"{Shipped.name}:")


def _divergence(one: Measurement) -> float:
    mean = mean_of(one.evidence, "kl", 0.95)
    return mean.estimate if mean else float("inf")


def _ranked(
    table: Measurements, file: Measurement, others: Sequence[Measurement], level: float
) -> tuple[ShippedRow, dict[str, Interval]]:
    """Return the row of a file, what dominates it, and by how many nats per token.

    That takes no more bytes and diverges less, paired by document.
    """
    leads: dict[str, Interval] = {}
    for other in others:
        if other.scheme == file.scheme or other.nbytes is None or file.nbytes is None:
            continue
        if other.nbytes > file.nbytes:
            continue
        cells = [file.cell, other.cell]
        lead = estimated(table, cells, statistics.change, confidence=level, sums=divergences)
        if lead is not None and lead.interval.low > 0:
            leads[other.scheme] = lead.interval
    pairs = dict(pair.split("=", 1) for pair in file.spec.split(":") if "=" in pair)
    row = ShippedRow(
        subject=file.subject,
        scheme=file.scheme,
        spec=file.spec,
        format=pairs.get("format", ""),
        bits=int(pairs["bits"]) if pairs.get("bits", "").isdigit() else None,
        nbytes=file.nbytes,
        kl=mean_of(file.evidence, "kl", table.confidence),
        dominated_by=tuple(leads),
        looks_broken=tuple(note for note in file.notes if note.startswith(LOOKS_BROKEN)),
    )
    return row, leads


COLUMNS = ("file", "format", "size", "KL, nats", "added loss, nats", "agreement, %", "dominated by")
LEGEND = (
    "Files in the order of their KL divergence to the base. A file is dominated by one, or by a "
    "scheme, that takes no more bytes and diverges less, paired by document and in all pairs at "
    "once."
)


def section(view: View) -> doc.Section:
    rows = view.audit.diagnostics.shipped
    labels = {shipped.label for shipped in view.audit.plan.shipped}
    damaged = [f"`{row.scheme}` {note}." for row in rows for note in row.looks_broken]
    damaged += [
        f"`{skipped.scheme}` was not read: {skipped.reason}."
        for skipped in view.audit.skipped
        if skipped.scheme in labels
    ]
    blocks: list[doc.Block] = []
    if rows:
        table = doc.table(COLUMNS, (_cells(view, row) for row in rows), name="shipped")
        blocks += [doc.paragraph(LEGEND), table]
    blocks += [doc.bullets(*damaged)] if damaged else []
    return doc.Section("Shipped files", tuple(blocks), 3)


def _cells(view: View, one: ShippedRow) -> doc.Cells:
    score = view.score(one.subject, one.scheme)
    return (
        doc.name_cell(one.scheme),
        f"{one.format or NOT_MEASURED}, {or_dash(one.bits, str)}-bit",
        or_dash(one.nbytes, size),
        doc.interval_cell(one.kl, spread),
        doc.interval_cell(score.absolute_change if score else None, spread),
        doc.interval_cell(score.top1_agreement if score else None, percent),
        listing(list(one.dominated_by)) if one.dominated_by else "-",
    )


ALT = "KL divergence of shipped files against their bytes"


def _draw(view: View) -> Chart:
    scores = sorted(_with_bytes(view), key=lambda score: -(score.nbytes or 0))
    broken = {row.scheme for row in view.audit.diagnostics.shipped if row.looks_broken}
    note = "Filled: nothing with fewer bytes diverges less, by estimate. Circle: a file; square: a "
    note += "scheme. Lines: intervals over documents."
    note += f" A cross: looks broken ({len(broken)})." if broken else ""
    chart = Chart(ALT, note, 0.4 + ROW * len(scores))
    axes = chart.figure.subplots()
    rows_of(axes, [f"{score.scheme}, {size(score.nbytes or 0)}" for score in scores])
    axes.set_xlabel("KL divergence to the base, nats per token")
    for y, score in enumerate(scores):
        assert score.kl is not None and score.nbytes is not None
        kind = int(not is_shipped(score.spec))
        tip = f"{score.scheme}\n{size(score.nbytes)}, KL {spread(score.kl)} nats per token"
        tip += "\nlooks broken" if score.scheme in broken else ""
        marker = "X" if score.scheme in broken else "os"[kind]
        on_front = not any(
            (other.nbytes or 0) <= score.nbytes and other.kl.estimate < score.kl.estimate
            for other in scores
            if other.kl is not None
        )
        look = {"marker": marker, "color": COLOURS[kind], "filled": on_front}
        chart.whiskers(axes, "0", [(y, score.kl, tip)], across=True, **look)
    lows = [s.kl.low for s in scores if s.kl and s.kl.low > 0]
    highs = [s.kl.high for s in scores if s.kl and math.isfinite(s.kl.high)]
    if lows and len(lows) == len(scores) and max(highs, default=0.0) > 20 * min(lows):
        axes.set_xscale("log")
    return chart


def _with_bytes(view: View) -> list[MeasurementRow]:
    """Return the rows with bytes and a KL divergence, of bases that have files."""
    scores = [
        score
        for base in {row.subject for row in view.audit.diagnostics.shipped}
        for scheme in view.schemes
        if (score := view.score(base, scheme)) is not None
    ]
    return [s for s in scores if s.nbytes and s.kl and 0 < s.kl.estimate < math.inf]


FIGURE = DiagnosticFigure(
    "shipped", ALT, lambda view: any(is_shipped(score.spec) for score in _with_bytes(view)), _draw
)
