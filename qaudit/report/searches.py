"""Greedy searches, in a sentence each."""

from __future__ import annotations

from qaudit.report.format import listing, plural
from qaudit.types import AuditRecord, GreedySearch


def searches_of(audit: AuditRecord) -> dict[str, GreedySearch]:
    """Return the searches of an audit, by the label of the soup."""
    return {search.label: search for search in audit.diagnostics.greedy}


def sentence(search: GreedySearch) -> str:
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
