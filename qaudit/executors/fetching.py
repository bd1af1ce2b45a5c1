"""Everything that a plan takes from the Hub, downloaded in the order of its work. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qaudit.errors import HubError
from qaudit.executors.cut import in_line
from qaudit.hub import open_hub
from qaudit.items.prepare import fetch_items
from qaudit.saved.parts import read_run
from qaudit.text.texts import fetch_texts
from qaudit.types import SILENT, Watch, units_of


@dataclass(frozen=True)
class Fetched:
    """What a plan needs of the Hub, and what of it is in the cache now."""

    checkpoints: int
    whole: int  # of these, in the cache
    texts: int
    failed: dict[str, str]  # why, by label


def fetch_all(out: Path, *, code: bool = False, watch: Watch = SILENT) -> Fetched:
    """Download texts, configurations, tokenizers and weights; a failure does not end the others."""
    run, _ = read_run(out)
    plan = run.plan
    units = in_line(units_of(plan.passes))
    members = {c.content: c for unit in units for c in unit.checkpoints if c.commit}
    if not members and not plan.texts:
        return Fetched(0, 0, 0, {})
    hub = open_hub(watch=watch)
    fetcher = hub.fetcher
    fetch_texts(fetcher, plan.recipe, plan.texts)
    tasks = fetch_items(hub, plan.recipe, plan.texts)
    failed = {f"task {task}": error.message for task, error in tasks.items()}
    for checkpoint in members.values():
        try:
            fetcher.settings(checkpoint, code=code)
            fetcher.weights(checkpoint)
        except HubError as error:
            failed[checkpoint.label] = error.message
    whole = len(members) - (len(failed) - len(tasks))
    return Fetched(len(members), whole, len(plan.texts), failed)
