"""What diagnostics add to a plan, and a note where measured weights are needed again. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from glob import escape
from pathlib import Path

from qaudit.core.keys import first_of
from qaudit.core.scheme import Scheme
from qaudit.diagnostics.diagnostic import DiagnosticWork
from qaudit.diagnostics.registry import parse_diagnostics
from qaudit.planning.cost import Load, flops
from qaudit.planning.sizes import Sizes, TextSize
from qaudit.saved.results import slug_of
from qaudit.types import Plan, Price, Protocol, Recipe, Subject


def diagnoses_of(
    recipe: Recipe, schemes: Sequence[Scheme], blocks: int, text: TextSize, protocol: Protocol
) -> dict[DiagnosticWork, Load]:
    """Return the work of each diagnostic, and what goes through a model for it at once."""
    diagnoses: dict[DiagnosticWork, Load] = {}
    for diagnostic in parse_diagnostics(recipe.diagnostics):
        work, documents = diagnostic.work(schemes, blocks), protocol.evaluation_documents
        share = min(1.0, (work.documents or documents) / documents)
        read = replace(text, evaluation_tokens=int(share * text.evaluation_tokens), item_tokens=0)
        diagnoses[work] = Load(work.schemes, read, max(1, work.streams))
    return diagnoses


def price_of(work: DiagnosticWork, load: Load, sizes: Sizes) -> Price:
    return Price(work.passes * flops(sizes, load), streams=work.passes * work.streams)


def with_needed_again(plan: Plan, evidence: Path) -> Plan:
    """Return the plan with a note where measured subjects must be read again to be diagnosed.

    Only file names are checked: a result for other weights under the same label counts.
    """
    requested = parse_diagnostics(plan.recipe.diagnostics)
    names = [diagnostic.name for diagnostic in requested if diagnostic.reads_weights]
    if not names or not evidence.is_dir():
        return plan
    again = [s.label for s in plan.subjects if _needed_again(s, names, evidence)]
    if not again:
        return plan
    shown = first_of(again)
    note = f"{shown}: measured already, and their weights are needed again to diagnose them"
    return replace(plan, notes=(*plan.notes, note))


def _needed_again(subject: Subject, names: Sequence[str], evidence: Path) -> bool:
    measured = any(evidence.glob(f"{_glob(subject.label)}--*.npz"))
    folder = evidence / "diagnostics"
    return measured and not all(
        any(folder.glob(f"{_glob(subject.label)}--{name}--*.json")) for name in names
    )


def _glob(label: str) -> str:
    return escape(slug_of(label))
