"""What `qaudit pick` does once its options are parsed: read, join, choose, print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qaudit.cli.speech import print_result
from qaudit.errors import UsageError
from qaudit.judge.objective import parse_objective
from qaudit.judge.pick import choose
from qaudit.judge.table import Table
from qaudit.report.pick import pick_to_json, render_pareto, render_pick
from qaudit.saved.saved import SavedAudit, combine, read_saved
from qaudit.types import FULL_PRECISION, Pick

PARETO = "pareto"


def carry_out(
    targets: Sequence[str],
    objective: str,
    *,
    as_json: bool,
    quiet: bool,
    unused: Sequence[str] = (),
) -> int:
    """Choose and print; return 0 for a pick that holds, 3 for one that cannot be told."""
    if unused:
        raise UsageError(
            f"`{unused[0]}` belongs to a race, and none was asked for",
            hint="add `--race`, or scan with these options and pick from the audit",
        )
    wanted = None if objective == PARETO else parse_objective(objective)
    names = _names(targets)
    saved = combine({name: _read(target, quiet) for name, target in names.items()})
    audit = saved.audit
    if wanted is None:
        print_result(pick_to_json(audit, None) if as_json else render_pareto(audit))
        return 0
    table = Table.of(audit.subjects, saved.measurements, audit.plan.recipe.confidence)
    if wanted.scheme is not None and wanted.scheme not in (
        *table.quantized_schemes,
        FULL_PRECISION,
    ):
        raise UsageError(
            f"nothing was measured at `{wanted.scheme}`",
            hint=f"measured were: {', '.join(table.quantized_schemes)}",
        )
    found = choose(table, wanted)
    print_result(pick_to_json(audit, found) if as_json else render_pick(audit, found))
    return 0 if _holds(found) else 3


def _holds(found: Pick | None) -> bool:
    """Say whether other documents than those it was chosen on agree, or nobody competes."""
    return found is not None and (found.interval is None or found.confirmed_on is not None)


def _names(targets: Sequence[str]) -> dict[str, str]:
    """Name each audit by its folder, told apart where two folders are called the same."""
    names: dict[str, str] = {}
    for target in targets:
        path = Path(target)
        short = path.parent.name if path.name == "audit.json" else path.name
        names[target if short in names else short or target] = target
    if len(names) < len(targets):
        raise UsageError("an audit is named twice", hint="name each audit once")
    return names


def _read(target: str, quiet: bool) -> SavedAudit:
    """Read an audit; what is none is a target, which is scanned as `qaudit scan` would."""
    path = Path(target)
    if path.name == "audit.json" or (path / "audit.json").is_file():
        return read_saved(path)
    from qaudit.cli.scanning import scanned

    return read_saved(scanned(target, quiet=quiet))
