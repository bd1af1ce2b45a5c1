"""What `qaudit series --after` says: which checkpoints are worth measuring next."""

from __future__ import annotations

import shlex

from qaudit.cli.speech import note
from qaudit.errors import UsageError
from qaudit.report.catalog import Catalog
from qaudit.report.format import printable

PROMISING, FIRST = 0.05, 3
"""Named are the first few that have such a chance of being better than the best measured one."""


def suggested(after: str, catalog: Catalog, *, as_json: bool) -> str:
    """Return the suggestion for a series, by an audit of some of it."""
    from qaudit.cli.audits import believed  # what judges takes a while to load
    from qaudit.diagnostics.phases.traits import traits_of
    from qaudit.judge.pick import picked_scheme
    from qaudit.judge.suggest import suggest
    from qaudit.report.suggestion import render_suggestion, suggestion_to_json

    saved, table = believed(after)
    named = {subject.label for subject in saved.audit.subjects}
    if not any(checkpoint.label in named for checkpoint in catalog.checkpoints):
        raise UsageError(
            f"no checkpoint of `{', '.join(catalog.targets)}` is in the audit `{after}`",
            hint="name an audit of the same series",
        )
    pick = saved.audit.pick
    scheme = pick.scheme if pick else picked_scheme(table)
    if scheme is None:
        raise UsageError(
            f"the audit `{after}` measured no quantized scheme", hint="scan with `--schemes`"
        )
    found = suggest(table, catalog.checkpoints, scheme, traits_of(saved.audit.diagnostics))
    promising = [row.label for row in found.prospects if row.better > PROMISING][:FIRST]
    if promising:
        names = " ".join(f"--checkpoints {shlex.quote(printable(name))}" for name in promising)
        note(f"to measure what may be better, add to the scan: {names}")
    return suggestion_to_json(found) if as_json else render_suggestion(found)
