"""`qaudit pick`: name the one thing to ship, from saved audits or by a race. No torch here."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from qaudit.cli import options as o

_RACE = "Race"
RaceIt = Annotated[
    bool,
    typer.Option(
        "--race",
        help="Measure on more and more documents; who is behind leaves.",
        rich_help_panel=_RACE,
        envvar="QAUDIT_RACE",
    ),
]
Margin = Annotated[
    str | None,
    typer.Option(
        help="A part of the loss that does not matter; default: 0.2%.",
        rich_help_panel=_RACE,
        envvar="QAUDIT_MARGIN",
    ),
]
Share = Annotated[
    str | None,
    typer.Option(
        help="Evaluation tokens at most, of an exhaustive run's; default: 40%. "
        "At 100% only who is shown to be behind leaves.",
        rich_help_panel=_RACE,
        envvar="QAUDIT_SHARE",
    ),
]


def pick(
    context_: typer.Context,
    targets: Annotated[
        list[str],
        typer.Argument(metavar="AUDIT...", help="Output folders; a target is scanned first."),
    ],
    objective: Annotated[
        str,
        typer.Option(
            help="loss, loss@SCHEME, bits@1% (within a margin of full precision) or pareto.",
            envvar="QAUDIT_OBJECTIVE",
        ),
    ] = "loss",
    race: RaceIt = False,
    margin: Margin = None,
    share: Share = None,
    checkpoints: o.Checkpoints = None,
    stage: o.Stage = None,
    last: o.Last = None,
    limit: o.Limit = None,
    family: o.Family = None,
    soup: o.Soup = None,
    calibration: o.Calibration = None,
    evaluation: o.Evaluation = None,
    context: o.Context = None,
    evaluation_documents: o.EvaluationDocuments = None,
    calibration_documents: o.CalibrationDocuments = None,
    document_tokens: o.DocumentTokens = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    stream_memory: o.StreamMemory = None,
    disk_budget: o.DiskBudget = None,
    allow_pickle: o.AllowPickle = False,
    trust_remote_code: o.TrustRemoteCode = False,
    out: o.Out = None,
    as_json: o.AsJson = False,
    quiet: o.Quiet = False,
) -> None:
    """Name one subject and scheme to ship, why, and what would change the answer.

    With --race the options of `scan` say what is raced; run it again to go on after an
    interruption. Exits with 3 when the documents cannot confirm it.

    Example: qaudit pick qaudit-out/demo --objective bits@2%
    """
    given = {k: v for k, v in locals().items() if k != "context_"}
    if not race:
        from qaudit.cli.picking import carry_out

        sys.exit(
            carry_out(
                targets, objective, as_json=as_json, quiet=quiet, unused=_asked_here(context_)
            )
        )
    from qaudit.cli import racing
    from qaudit.cli.scanning import HOW_TO_RUN, Request

    own = {"objective", "race", "margin", "share", *HOW_TO_RUN}
    asked: dict[str, Any] = {k: v for k, v in given.items() if k not in own and v is not None}
    how = {name: given[name] for name in HOW_TO_RUN if name in given}
    sys.exit(racing.carry_out(racing.Race(Request(asked, **how), objective, margin, share)))


_OF_A_PICK = frozenset({"targets", "objective", "race", "as_json", "quiet"})


def _asked_here(context: typer.Context) -> list[str]:
    """Return the options given on the command line that only a race has a use for."""
    found = []
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in _OF_A_PICK and source is not None and source.name == "COMMANDLINE":
            found.append(f"--{name.replace('_', '-')}")
    return found
