"""`qaudit pick`: name the one thing to ship, from saved audits or by a race."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qaudit.cli.options import BITS, AsJson, Quiet, Verbose, classes_named, option, with_settings
from qaudit.cli.terminal import print_result
from qaudit.errors import UsageError

if TYPE_CHECKING:
    from qaudit.saved.evidence import SavedAudit
    from qaudit.types import ClassVerdict, Round

PARETO = "pareto"
_RACE = "Race"
_OF_A_PICK = frozenset(
    {"targets", "objective", "bits", "policy", "race", "as_json", "quiet", "verbose"}
)


@with_settings(
    "checkpoints", "stages", "last", "limit", "family", "soups", "calibration", "evaluation",
    "context", "evaluation_documents", "calibration_documents", "document_tokens", "device",
    "dtype", "stream_memory", "disk_budget", "allow_pickle", "trust_remote_code", "out",
)  # fmt: skip
def pick(
    context_: typer.Context,
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
    race: Annotated[
        bool,
        option(
            _RACE, "Measure on more and more documents; subjects that fall behind leave.", "--race"
        ),
    ] = False,
    margin: Annotated[
        str | None, option(_RACE, "A part of the loss that does not matter.", show_default="0.2%")
    ] = None,
    share: Annotated[
        str | None,
        option(
            _RACE,
            "Evaluation tokens at most, of an exhaustive run's. "
            "At 100% only subjects shown to be behind leave.",
            show_default="40%",
        ),
    ] = None,
    *,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    **settings: Any,
) -> int:
    """Name the subject and scheme to ship of each bit class, why, and what would change it.

    With --race the options of `scan` select what is raced; run it again to resume after an
    interruption. Exits with 3 when the documents cannot confirm a choice, or a class is undecided.

    Example: qaudit pick qaudit-out/demo --objective bits@2%
    """
    if race:
        rules = {"margin": margin, "share": share}
        return _race(
            targets, settings, objective, rules, as_json=as_json, quiet=quiet, verbose=verbose
        )
    _refuse_race_options(context_)
    classes = classes_named(bits)
    return _pick(targets, objective, classes, policy, as_json=as_json, quiet=quiet)


def _refuse_race_options(context: typer.Context) -> None:
    for param in context.command.params:
        source = context.get_parameter_source(str(param.name))
        if param.name not in _OF_A_PICK and source is not None and source.name == "COMMANDLINE":
            raise UsageError(
                f"`{param.opts[0]}` is an option of a race, and this is none",
                hint="add `--race`, or scan with these options and pick from the audit",
            )


def _pick(
    targets: Sequence[str],
    objective: str,
    bits: tuple[str, ...],
    policy: str | None,
    *,
    as_json: bool,
    quiet: bool,
) -> int:
    """Choose and print; return 0 where every class is confirmed and decided, else 3."""
    from qaudit.audit import decide
    from qaudit.judge.objectives import parse_objective
    from qaudit.judge.pick import pick_of
    from qaudit.report.card.protocol import must_claim_alike
    from qaudit.report.pick import pick_to_json, render_pareto, render_pick
    from qaudit.saved.evidence import combine

    wanted = None if objective == PARETO else parse_objective(objective)
    audits = {name: _read(target, quiet) for name, target in _names(targets).items()}
    must_claim_alike(*((name, each.audit) for name, each in audits.items()))
    saved = combine(audits)
    audit = saved.audit
    if not saved.table.documents:
        raise UsageError(
            "there is no loss to choose by: answers alone were imported",
            hint="hold every scheme to rules about tasks with `qaudit gate`, or scan the weights",
        )
    if wanted is None:
        print_result(pick_to_json(audit, None) if as_json else render_pareto(audit))
        return 0
    schemes = dict.fromkeys(m.scheme for m in saved.measurements)
    if wanted.scheme is not None and wanted.scheme not in schemes:
        raise UsageError(
            f"nothing was measured at `{wanted.scheme}`",
            hint=f"measured were: {', '.join(schemes)}",
        )
    verdict = decide(saved, policy or audit.plan.recipe.policy, str(wanted), bits)
    best = pick_of(verdict.classes)
    audit = replace(audit, verdict=verdict, pick=best)
    print_result(pick_to_json(audit, best) if as_json else render_pick(audit, best))
    gated = any(decision.level == "error" for decision in verdict.classes)
    ships = gated and verdict.status == "ship" and wanted.kind != "kl"  # the same as for `gate`
    judged = [decision for decision in verdict.classes if decision.status != "unjudged"]
    return 0 if best and (ships or all(map(_is_sure, judged or verdict.classes))) else 3


def _is_sure(one: ClassVerdict) -> bool:
    """Whether a choice is confirmed, or the only one, and its class decided if it is judged."""
    is_decided = one.status in ("ship", "hold", "unjudged") or one.level == "off"
    return is_decided and one.subject is not None and (not one.lead or one.confirmed_on is not None)


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


def _race(
    targets: Sequence[str],
    settings: dict[str, Any],
    objective: str,
    rules: dict[str, str | None],
    *,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> int:
    """Race and print; return 0 for a winner that other documents confirm, else 3."""
    from qaudit.cli.failures import resumable
    from qaudit.cli.progress import Progress
    from qaudit.cli.scan import output_folder, prepared
    from qaudit.judge.race import MARGIN, SHARE
    from qaudit.report.race import race_to_json, render_race, render_round

    scheme = _race_scheme(objective)
    fractions = {
        "margin": _fraction("margin", rules["margin"], MARGIN),
        "share": _fraction("share", rules["share"], SHARE),
    }
    settings = {**settings, "schemes": [scheme]}
    with (
        resumable(output_folder(targets, settings)),
        Progress(quiet=quiet, verbose=verbose) as progress,
    ):
        work = prepared(targets, settings, progress)
        work.write_plan()
        from qaudit.racing.race import run_race

        def print_round(ended: Round) -> None:
            progress.note(render_round(ended))

        run = run_race(work, progress, print_round, **fractions)
    failed = {label: error.message for label, error in run.failed.items()}
    if as_json:
        print_result(race_to_json(run.race, scheme, fractions, run.cost, failed))
    else:
        print_result(render_race(run.race, scheme, run.cost, failed))
    return 3 if run.race.confirmed_on is None or failed else 0


def _race_scheme(objective: str) -> str:
    """Return the one scheme of an objective, or refuse one that compares several."""
    from qaudit.core.registry import parse_scheme
    from qaudit.judge.objectives import parse_objective
    from qaudit.settings import SEARCHED_AT
    from qaudit.types import FULL_PRECISION

    wanted = None if objective == PARETO else parse_objective(objective)
    if wanted is None or wanted.kind != "loss":
        raise UsageError(
            f"a race is for the lowest loss at one scheme, and `{objective}` compares several",
            hint="write `--objective loss@SCHEME`, or scan the target and pick from the audit",
        )
    if wanted.scheme == FULL_PRECISION:
        raise UsageError(
            "a race compares quantized losses", hint="scan the target for full precision alone"
        )
    return parse_scheme(wanted.scheme or SEARCHED_AT).short


def _fraction(name: str, text: str | None, default: float) -> float:
    """Read `40%` or `0.4`."""
    if text is None:
        return default
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= value <= 1:
        raise UsageError(
            f"`{text}` is not a `--{name}` between 0 and 100 %",
            hint=f"write it as {100 * default:g}%",
        )
    return value
