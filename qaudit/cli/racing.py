"""What `qaudit pick --race` does once its options are parsed: plan, race, print, keep."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from qaudit.cli.picking import PARETO
from qaudit.cli.scanning import Request, folder_for, going_on, planned
from qaudit.cli.speech import Bars, note, print_result
from qaudit.core.registry import parse_scheme
from qaudit.errors import UsageError
from qaudit.judge.objective import PREFERRED, parse_objective
from qaudit.judge.race import MARGIN
from qaudit.judge.race_schedule import SHARE
from qaudit.report.race import race_to_json, render_race, render_round
from qaudit.types import FULL_PRECISION, Round


@dataclass(frozen=True)
class Race:
    """The options of one race: what is scanned, for what, and by which rules."""

    request: Request
    objective: str
    margin: str | None = None
    share: str | None = None


def carry_out(asked: Race) -> int:
    """Race and print; return 0 for a winner that other documents confirm, 3 for another."""
    scheme = _scheme(asked.objective)
    rules = {
        "margin": _fraction("margin", asked.margin, MARGIN),
        "share": _fraction("share", asked.share, SHARE),
    }
    request = _at(asked.request, scheme)
    with going_on(folder_for(request)) as out, Bars(quiet=request.quiet) as bars:
        work = planned(request, out, bars)
        work.write_lock()
        from qaudit.engine.run import Options
        from qaudit.search.race import (  # imports torch: after the plan is there
            Rules,
            run_race,
        )

        def told(found: Round) -> None:
            if not request.quiet:
                note(render_round(found))

        run = run_race(work.plan, Options.of(work), Rules(**rules), bars, told)
    failed = {label: error.message for label, error in run.failed.items()}
    if request.as_json:
        print_result(race_to_json(run.race, scheme, rules, run.cost, failed))
    else:
        print_result(render_race(run.race, scheme, run.cost, failed))
    return 3 if run.race.confirmed_on is None or failed else 0


def _scheme(objective: str) -> str:
    wanted = None if objective == PARETO else parse_objective(objective)
    if wanted is None or wanted.kind != "loss":
        raise UsageError(
            f"a race is run for the lowest loss at one scheme, and `{objective}` looks at several",
            hint="write `--objective loss@SCHEME`, or scan the target and pick from the audit",
        )
    if wanted.scheme == FULL_PRECISION:
        raise UsageError(
            "a race is run over quantized losses", hint="scan the target for full precision alone"
        )
    return parse_scheme(wanted.scheme or PREFERRED).short


def _at(request: Request, scheme: str) -> Request:
    """Return the request with the scheme of the objective in place of whatever a recipe names."""
    asked: dict[str, Any] = {**request.asked, "schemes": [scheme]}
    return replace(request, asked=asked)


def _fraction(name: str, text: str | None, otherwise: float) -> float:
    """Read `40%` or `0.4`."""
    if text is None:
        return otherwise
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= value <= 1:
        raise UsageError(
            f"`{text}` is not a `--{name}` between 0 and 100 %",
            hint=f"write it as {100 * otherwise:g}%",
        )
    return value
