"""`qaudit series`: the checkpoints of a target as a table, before anything is measured."""

from __future__ import annotations

import shlex
import shutil
import sys
from typing import TYPE_CHECKING, Annotated, Any

from qaudit.cli.options import AsJson, Quiet, Targets, option, with_settings
from qaudit.cli.terminal import print_result, say
from qaudit.errors import UsageError
from qaudit.settings import MEASURE, OUTPUT

if TYPE_CHECKING:
    from qaudit.report.catalog import Catalog

NARROWEST, WIDEST = 80, 120
PROMISING, MOST_SUGGESTED = 0.05, 3
"""The least chance of being better than the best measured checkpoint, and how many to name."""


@with_settings("checkpoints", keys=("last", "family"))
def series(
    targets: Targets,
    *,
    check: Annotated[
        bool, option(MEASURE, "Read every file tree, so that equal revisions are known.", "--check")
    ] = False,
    after: Annotated[
        str | None,
        option(
            MEASURE,
            "Suggest checkpoints to measure next, from this audit of the series.",
            metavar="AUDIT",
        ),
    ] = None,
    everything: Annotated[bool, option(OUTPUT, "Show every row; fold none.", "--all")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    **settings: Any,
) -> int:
    """Show a series: stage, step, tokens, learning rate, size, and what is odd.

    What a scan would measure is marked. Names cost one request to the Hub; only the file trees
    of selected checkpoints are read, and kept, unless `--check` reads all. `--after` predicts
    from an audit what the other checkpoints would show, and names the most promising.

    Example: qaudit series allenai/OLMo-2-1124-7B --check
    """
    from qaudit.cli.progress import Progress
    from qaudit.planning.catalog import read_catalog
    from qaudit.recipe.table import recipe_and_options
    from qaudit.report.catalog import catalog_to_json, render_catalog

    recipe, _ = recipe_and_options(*targets, **settings)
    with Progress(quiet=quiet) as progress:
        catalog, failures = read_catalog(recipe, progress, check=check)
    if after is not None:
        print_result(_suggested(after, catalog, as_json=as_json))
    elif as_json:
        print_result(catalog_to_json(catalog))
    else:
        print_result(render_catalog(catalog, width=_width(), everything=everything))
    for reason, times in failures.items():
        say(f"{times} of the trees could not be read: {reason}")
    return 3 if check and failures else 0


def _width() -> int | None:
    """Return the width of the terminal, or none where the table goes into a file."""
    if not sys.stdout.isatty():
        return None
    return min(WIDEST, max(NARROWEST, shutil.get_terminal_size().columns))


def _suggested(after: str, catalog: Catalog, *, as_json: bool) -> str:
    from qaudit.cli.options import audit_at
    from qaudit.judge.suggest import suggest
    from qaudit.report.format import printable
    from qaudit.report.plan import render_suggestion, suggestion_to_json
    from qaudit.saved.evidence import read_saved

    saved = read_saved(audit_at(after)).checked()
    audited = {subject.label for subject in saved.audit.subjects}
    if not any(checkpoint.label in audited for checkpoint in catalog.checkpoints):
        raise UsageError(
            f"no checkpoint of `{', '.join(catalog.targets)}` is in the audit `{after}`",
            hint="name an audit of the same series",
        )
    pick = saved.audit.pick
    if pick is None:
        raise UsageError(
            f"the audit `{after}` has no finite quantized loss", hint="scan with `--schemes`"
        )
    suggestion = suggest(saved.table, catalog.checkpoints, pick.scheme)
    promising = [row.label for row in suggestion.prospects if row.better > PROMISING]
    if promising:
        names = (f"--checkpoints {shlex.quote(printable(n))}" for n in promising[:MOST_SUGGESTED])
        say(f"to measure the most promising, add to the scan: {' '.join(names)}")
    return suggestion_to_json(suggestion) if as_json else render_suggestion(suggestion)
