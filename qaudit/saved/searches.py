"""Greedy searches as an audit's `diagnostics` keep them, and in a sentence each."""

from __future__ import annotations

from dataclasses import dataclass

from qaudit.report.format import listing, plural
from qaudit.saved.decode import Row
from qaudit.types import Audit


@dataclass(frozen=True)
class Candidate:
    """A candidate and its own quantized loss; one that is no number is nothing."""

    label: str
    loss: float | None


@dataclass(frozen=True)
class Trial:
    """A mean that was tried: the members so far, and one more."""

    added: str
    loss: float | None
    taken: bool


@dataclass(frozen=True)
class Search:
    """A search: candidates from the best on, and what was tried, in order."""

    label: str
    scheme: str
    documents: int
    candidates: tuple[Candidate, ...]
    trials: tuple[Trial, ...]
    members: tuple[str, ...]
    loss: float | None


def searches_of(audit: Audit) -> dict[str, Search]:
    """Return the searches of an audit, by the label of the soup."""
    if "greedy" not in audit.diagnostics:
        return {}
    rows = Row(audit.diagnostics, "audit.diagnostics").rows("greedy")
    found = [row.build(Search) for row in rows]
    return {search.label: search for search in found}


def sentence(search: Search) -> str:
    """Say who was taken in which order, what each was worth, and who was not."""
    first = search.candidates[0]
    said = [f"took {len(search.members)} of {len(search.candidates)}: `{first.label}`"]
    refused: list[str] = []
    best = first.loss
    for trial in search.trials:
        if trial.taken and trial.loss is not None and best is not None:
            said.append(f"then `{trial.added}` improved it by {best - trial.loss:.4f}")
            best = trial.loss
        else:
            refused.append(f"`{trial.added}`")
    tried = {first.label, *(trial.added for trial in search.trials)}
    broken = [f"`{c.label}`" for c in search.candidates if c.label not in tried]
    text = (
        f"A greedy search at {search.scheme}, on the {plural(search.documents, 'document')} to "
        f"choose on, {', '.join(said)} nats per token"
    )
    if refused:
        text += f"; {listing(refused)} did not"
    if broken:
        text += f"; {listing(broken)} {'has' if len(broken) == 1 else 'have'} no finite loss"
    return f"{text}."
