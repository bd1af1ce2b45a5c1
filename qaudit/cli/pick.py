"""`qaudit pick`: name the one thing to ship, from saved audits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qaudit.cli.options import BITS, AsJson, Quiet, classes_named, option
from qaudit.cli.terminal import print_result
from qaudit.errors import UsageError

if TYPE_CHECKING:
    from qaudit.saved.evidence import SavedAudit
    from qaudit.types import ClassVerdict

PARETO = "pareto"


def pick(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="AUDIT...", help="Output folders; a target is scanned first."),
    ],
    objective: Annotated[
        str,
        option(
            "What to pick by",
            "loss, loss@SCHEME, kl, bits@1% (within a margin of full precision) or pareto.",
        ),
    ] = "loss",
    bits: Annotated[
        str | None, option("What to pick by", BITS, show_default="all that were measured")
    ] = None,
    policy: Annotated[
        str | None,
        option("What to pick by", "A preset or a file.", show_default="that of the audit"),
    ] = None,
    *,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Name the subject and scheme to ship of each bit class, why, and what would change it.

    Exits with 3 when the documents cannot confirm a choice, or a class is undecided.

    Example: qaudit pick qaudit-out/demo --objective bits@2%
    """
    from qaudit.judge.choose import parse_objective, pick_of
    from qaudit.judging import decide
    from qaudit.report.verdict import pick_to_json, render_pareto, render_pick
    from qaudit.saved.evidence import combine

    wanted = None if objective == PARETO else parse_objective(objective)
    audits = {name: _read(target, quiet) for name, target in _names(targets).items()}
    saved = combine(audits)
    audit = saved.audit
    if wanted is None:
        print_result(pick_to_json(audit, None) if as_json else render_pareto(audit))
        return 0
    schemes = dict.fromkeys(m.scheme for m in saved.measurements)
    if wanted.scheme is not None and wanted.scheme not in schemes:
        raise UsageError(
            f"nothing was measured at `{wanted.scheme}`",
            hint=f"measured were: {', '.join(schemes)}",
        )
    verdict = decide(saved, policy or audit.plan.recipe.policy, str(wanted), classes_named(bits))
    best = pick_of(verdict.classes)
    audit = replace(audit, verdict=verdict, pick=best)
    print_result(pick_to_json(audit, best) if as_json else render_pick(audit, best))
    gated = any(decision.level == "error" for decision in verdict.classes)
    ships = gated and verdict.status == "ship" and wanted.kind != "kl"  # the same as for `gate`
    judged = [decision for decision in verdict.classes if decision.status != "unjudged"]
    sure = all(_is_sure(one, wanted.kind == "kl") for one in judged or verdict.classes)
    return 0 if best and (ships or sure) else 3


def _is_sure(one: ClassVerdict, by_divergence: bool) -> bool:
    """Whether something was chosen, no tie by KL divergence, and its class decided if judged."""
    is_decided = one.status in ("ship", "hold", "unjudged") or one.level == "off"
    return is_decided and one.subject is not None and not (by_divergence and one.contenders)


def _names(targets: Sequence[str]) -> dict[str, str]:
    """Name each audit by its folder, or by its whole path where two folders share a name."""
    names: dict[str, str] = {}
    for target in targets:
        path = Path(target)
        short = path.parent.name if path.name == "audit.json" else path.name
        names[target if short in names else short or target] = target
    if len(names) < len(targets):
        raise UsageError("an audit is named twice", hint="name each audit once")
    return names


def _read(target: str, quiet: bool) -> SavedAudit:
    """Read an audit; any other target is scanned with the default settings."""
    from qaudit.saved.evidence import read_saved
    from qaudit.saved.parts import is_unfinished

    path = Path(target)
    if path.name == "audit.json" or (path / "audit.json").is_file() or is_unfinished(path):
        return read_saved(path)
    from qaudit.audit import complete, in_process
    from qaudit.cli.scan import planned

    with planned([target], {}, quiet=quiet) as (work, progress):
        return complete(in_process(work, progress)).evidence
