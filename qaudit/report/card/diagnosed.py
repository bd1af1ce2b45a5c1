"""Why: what each role of the model adds to the loss, and what its weights look like.

For what is to be shipped and for the last checkpoint, where somebody asked for it. Tensors,
other subjects and groups of layers stand in `audit.json`.
"""

from __future__ import annotations

from qaudit.report.document import (
    Block,
    Cell,
    Row,
    Table,
    bullets,
    cell,
    code,
    columns,
    name_cell,
    paragraph,
    prose,
    words,
)
from qaudit.report.format import NOT_MEASURED, listing, percent, plural, spread
from qaudit.report.views import View
from qaudit.types import SensitivityRow, WeightRow


def diagnosed_section(view: View) -> tuple[Block, ...]:
    """Return a table by role for each subject of interest, the mixture, and what is missing."""
    tables = view.audit.diagnostics
    weights, parts = tables.weights, tables.sensitivity
    shown = [block for label in _of_interest(view) for block in _subject(label, weights, parts)]
    missing = [
        (
            *code(one.subject),
            *words(f" went without {one.diagnostic}: "),
            *prose(one.reason),
            *words("."),
        )
        for one in tables.skipped
    ]
    return (*shown, *([bullets(*missing)] if missing else []))


def _of_interest(view: View) -> list[str]:
    """Return what is to be shipped and the last checkpoint, each once."""
    pick = [view.audit.pick.subject] if view.audit.pick else []
    last = [view.last.label] if view.last else []
    return list(dict.fromkeys([*pick, *last]))


def _subject(
    label: str, weights: tuple[WeightRow, ...], parts: tuple[SensitivityRow, ...]
) -> tuple[Block, ...]:
    own = {row.name: row for row in weights if row.subject == label and row.part == "role"}
    added = [row for row in parts if row.subject == label]
    lowest = min((row.bits for row in added if row.bits is not None), default=None)
    alone = {row.name: row for row in added if row.part == "role" and row.bits == lowest}
    roles = list(dict.fromkeys([*own, *alone]))
    if not roles:
        return ()
    said = _legend(label, list(own.values()), list(alone.values()))
    schemes = [name for row in own.values() for name in row.perturbation]
    scheme = next((row.scheme for row in alone.values() if row.scheme in schemes), None)
    scheme = scheme or next(iter(schemes), None)
    names = ["role", "adds, nats per token", "share, %", "excess kurtosis", "range / deviation"]
    names += [f"moved by {scheme}, %"] if scheme else []
    rows = tuple(
        Row(_cells(role, own.get(role), alone.get(role), scheme)[: len(names)]) for role in roles
    )
    return (
        paragraph(said),
        Table(columns(*names), rows),
        *(paragraph(text) for text in _mixture(added)),
    )


def _legend(label: str, own: list[WeightRow], alone: list[SensitivityRow]) -> str:
    if not alone:
        return f"The weights of `{label}`, by role."
    ends = "" if not own else "; beside it, what its weights look like"
    return (
        f"What each role of `{label}` adds to the loss when it alone is quantized at "
        f"{alone[0].scheme}, and its share of what all of them add so{ends}."
    )


def _cells(
    role: str, own: WeightRow | None, alone: SensitivityRow | None, scheme: str | None
) -> tuple[Cell, ...]:
    adds = None if alone is None else alone.absolute_change
    share = None if alone is None else alone.share
    moved = None if own is None or scheme is None else own.perturbation.get(scheme)
    texts = [
        NOT_MEASURED if adds is None else spread(adds),
        NOT_MEASURED if share is None else percent(share),
        _number(None if own is None else own.kurtosis),
        _number(None if own is None else own.effective_range),
        _number(None if moved is None else 100 * moved),
    ]
    return name_cell(role), *map(cell, texts)


def _number(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.3g}"


def _mixture(added: list[SensitivityRow]) -> list[str]:
    """Say which mixture is suggested, what was measured of it, and what of its rivals."""
    whole = {row.bits: row for row in added if row.part == "all"}
    mixed = next((row for row in added if row.part == "mixture"), None)
    if mixed is None or mixed.absolute_change is None or mixed.predicted is None:
        return []
    by_bits: dict[int, list[str]] = {}
    for role, bits in mixed.mixture.items():
        by_bits.setdefault(bits, []).append(f"`{role}`")
    chosen = listing([f"{bits} bits for {listing(by_bits[bits])}" for bits in sorted(by_bits)])
    rivals = [
        f"all at {bits} bits ({row.bits_per_weight:.2f}) {spread(row.absolute_change)}"
        for bits, row in sorted(whole.items(), key=lambda item: item[0] or 0)
        if row.absolute_change is not None
    ]
    beside = f"; {' and '.join(rivals)}" if rivals else ""
    return [
        f"Suggested within {mixed.budget or mixed.bits_per_weight:.2f} bits per weight: {chosen}. "
        f"Measured on {plural(mixed.documents, 'document')}, at {mixed.bits_per_weight:.2f} bits "
        f"per weight it adds {spread(mixed.absolute_change)} nats per token, where the sum of its "
        f"parts predicts {mixed.predicted:.3f}{beside}. All of these are calibrated on the "
        "full-precision model."
    ]
