"""The README.md of an exported folder: what it holds, what was measured, and what loads it."""

from __future__ import annotations

import json

from qaudit.export.choice import Choice
from qaudit.export.formats import Format
from qaudit.report.document import (
    Block,
    Column,
    Section,
    Table,
    code,
    paragraph,
    row,
    words,
)
from qaudit.report.format import percent, spread
from qaudit.report.markdown import render_blocks
from qaudit.saved.exports import FILE, ExportRecord
from qaudit.types import MeasurementRow


def export_card(choice: Choice, record: ExportRecord, form: Format) -> str:
    """Return the card, with the metadata that the Hub reads."""
    blocks = [
        _description(record),
        *_measured(choice),
        paragraph(words("Lowest versions that load these files, and what they need:")),
        _runtimes(form),
        _proof(record),
    ]
    card = Section(f"{record.subject}, {record.scheme}", tuple(blocks))
    return f"{_front_matter(choice)}\n\n{render_blocks([card], level=1)}\n"


def _description(record: ExportRecord) -> Block:
    text = (
        *code(record.subject),
        *words(" under "),
        *code(record.spec),
        *words(
            f", as {record.format} files of {record.bits_per_weight:.3f} bits per quantized "
            f"weight, written by qaudit {record.qaudit}. Embeddings, norms and the head are as "
            "they were."
        ),
    )
    return paragraph(text)


def _measured(choice: Choice) -> list[Block]:
    """Return what the audit measured of these weights, and whether it says they may ship."""
    rows = [one for one in _rows(choice) if one.scheme == choice.scheme.short or _is(choice, one)]
    if not rows:
        return [paragraph("No audit measured these weights.")]
    first = rows[0]
    table = Table(
        (Column("measured"), Column("value", "right")),
        (
            row("loss, nats per token", spread(first.ce)),
            row(
                "more than in full precision",
                percent(first.relative_error, unit=" %") if first.relative_error else "-",
            ),
            row("KL divergence, nats per token", spread(first.kl) if first.kl else "-"),
            row("documents", str(first.documents)),
        ),
    )
    blocks: list[Block] = [table]
    if choice.ships is not None:
        line = f"The verdict on {choice.ships.bit_class} bits: {choice.ships.status}."
        blocks.append(paragraph(line))
    return blocks


def _rows(choice: Choice) -> list[MeasurementRow]:
    if choice.record is None:
        return []
    return [row for row in choice.record.measurements if row.subject == choice.subject.label]


def _is(choice: Choice, row: MeasurementRow) -> bool:
    return row.spec == choice.scheme.spec


def _runtimes(form: Format) -> Block:
    return Table(
        (Column("runtime"), Column("version"), Column("note")),
        tuple(row(one.name, one.lowest, one.remark or "-") for one in form.runtimes),
    )


def _proof(record: ExportRecord) -> Block:
    audit = f" The audit has the sha256 {record.audit_sha256}." if record.audit_sha256 else ""
    text = (
        *code(FILE),
        *words(" has a hash of every weight as it was measured; "),
        *code("qaudit verify"),
        *words(f" compares them with the files.{audit}"),
    )
    return paragraph(text)


def _front_matter(choice: Choice) -> str:
    """Return the metadata: checkpoints on the Hub are base models."""
    bases = dict.fromkeys(c.ref.location for c, _ in choice.subject.members if c.commit)
    lines = ["---"]
    if bases:
        # JSON's quoted texts are YAML's: no name can be taken for anything else.
        lines += ["base_model:", *(f"- {json.dumps(base)}" for base in bases)]
        lines += ["base_model_relation: quantized"]
    return "\n".join([*lines, "tags:", "- quantized", "- qaudit", "---"])
