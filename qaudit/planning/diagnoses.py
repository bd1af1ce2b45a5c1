"""The price of diagnostics, and a note where measured weights are needed again. No torch.

Each diagnostic has its own price in `diagnostics/<name>/price.py`; one without is listed by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from glob import escape
from pathlib import Path

from qaudit.core.scheme import Scheme
from qaudit.diagnostics.registry import parse_diagnostics, part
from qaudit.planning.price import Load, Sizes
from qaudit.saved.results import slug_of
from qaudit.types import Plan, Price, Protocol, Recipe, Subject


@dataclass(frozen=True)
class DiagnosticPrice:
    """The price of one diagnostic of one subject."""

    text: str
    price: Price = field(default_factory=Price)
    load: Load | None = None  # of a pass beside those of the audit


def price_diagnostics(
    recipe: Recipe, schemes: Sequence[Scheme], protocol: Protocol, sizes: Sizes
) -> tuple[DiagnosticPrice, ...]:
    prices = []
    for diagnostic in parse_diagnostics(recipe.diagnostics):
        module = part(diagnostic.name, "price")
        prices.append(
            DiagnosticPrice(diagnostic.short)
            if module is None
            else module.price(diagnostic, schemes, protocol, sizes)
        )
    return tuple(prices)


def with_needed_again(plan: Plan, evidence: Path) -> Plan:
    """Return the plan with a note where measured subjects must be read again to be diagnosed.

    Only file names are checked: a result for other weights under the same label counts.
    """
    names = [diagnostic.name for diagnostic in parse_diagnostics(plan.recipe.diagnostics)]
    if not names or not evidence.is_dir():
        return plan
    again = [s.label for s in plan.subjects if _needed_again(s, names, evidence)]
    if not again:
        return plan
    shown = ", ".join(f"`{label}`" for label in again[:3])
    more = f" and {len(again) - 3} more" if len(again) > 3 else ""
    note = f"{shown}{more}: measured already, and their weights are needed again to diagnose them"
    return replace(plan, notes=(*plan.notes, note))


def _needed_again(subject: Subject, names: Sequence[str], evidence: Path) -> bool:
    measured = any(evidence.glob(f"{_glob(subject.label)}--*.npz"))
    folder = evidence / "diagnostics"
    return measured and not all(
        any(folder.glob(f"{_glob(subject.label)}--{name}--*.json")) for name in names
    )


def _glob(label: str) -> str:
    return escape(slug_of(label))
