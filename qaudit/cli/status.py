"""`qaudit status`: how far the parts of a plan are."""

from __future__ import annotations

import json
from pathlib import Path

from qaudit.cli.options import AsJson
from qaudit.cli.terminal import print_result


def status(out: Path, *, as_json: AsJson = False) -> int:
    """Print what is measured, running, lost and missing in OUT, and the time that is left.

    A part is running or queued as squeue says; without Slurm, as its log and the processes of
    this host say. Exits 3 while anything is missing.

    Example: qaudit status out
    """
    from qaudit.executors.standing import render, standing_of

    standing = standing_of(out)
    print_result(json.dumps(standing.table, indent=1) if as_json else render(standing))
    return 3 if standing.state.missing else 0
