"""`qaudit gate` and `pick`: a saved audit held to a policy, and picked from. They import no torch.

A failure of the tool is no finding. It goes to stderr, into the
exit code, and into every format that can express it, so that the report of an earlier run is not
taken for this one's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qaudit.cli.options import BITS, AsJson, AuditPlace, Quiet, audit_at, classes_named, option
from qaudit.cli.terminal import print_result, say
from qaudit.errors import QauditError, UsageError, not_written
from qaudit.settings import OUTPUT

if TYPE_CHECKING:
    from qaudit.saved.evidence import SavedAudit
    from qaudit.tables import Audit
    from qaudit.types import Gate


_JUDGE, _PICK = "What to judge by", "What to pick by"
PolicyToHold = option(_JUDGE, "explore, release, strict, or a YAML file of your own.")
Baseline = option(_JUDGE, "The audit of the previous release: a folder, or `org/name@revision`.")
Classes = option(_JUDGE, BITS, show_default="those of the scan, or all that were measured")
Forms = option(
    OUTPUT,
    "terminal, md, json, junit, sarif, github, badge or shields; "
    "`junit=FILE` writes it there. Repeatable.",
    "--format",
    show_default="terminal",
)
Signed = option(_JUDGE, "Refuse audits that are not signed with QAUDIT_SIGNING_KEY.", "--signed")


def gate(
    audit: AuditPlace,
    policy: Annotated[str, PolicyToHold] = "release",
    baseline: Annotated[str | None, Baseline] = None,
    bits: Annotated[str | None, Classes] = None,
    form: Annotated[list[str] | None, Forms] = None,
    signed: Annotated[bool, Signed] = False,
    quiet: Quiet = False,
) -> int:
    """Hold an audit to a policy, by its saved evidence: no GPU, no model, no torch.

    Exits with 0 if it holds, 1 if it is breached, 3 if documents or measurements are missing
    to decide. No format changes that.

    Example: qaudit gate qaudit-out/demo --policy strict --format junit=gate.xml
    """
    from qaudit.audit import gate as judge
    from qaudit.audit import load
    from qaudit.policy import policy_named

    def opened(target: str) -> Audit:
        return replace(load(audit_at(target, quiet=quiet)), name=target)

    outputs = outputs_of(form or ())
    try:
        classes = classes_named(bits)
        policy_named(policy)  # a wrong one is refused before anything is downloaded
        held_to = opened(baseline) if baseline else None
        result = judge(opened(audit), policy, held_to, classes, signed=signed)
    except QauditError as error:
        _put([output for output in outputs if output != (TERMINAL, None)], error, quiet)
        raise
    _put(outputs, result, quiet)
    for _, file in () if quiet else outputs:
        if file is not None:
            say(f"wrote {file}")
    return result.exit_code


TERMINAL, GITHUB = "terminal", "github"
STEP_SUMMARY = "GITHUB_STEP_SUMMARY"


Output = tuple[str, Path | None]
"""A format, and the file it goes to; None is stdout."""


def outputs_of(forms: Sequence[str]) -> tuple[Output, ...]:
    """Read `NAME` and `NAME=FILE`; exactly one format goes to stdout."""
    from qaudit.report.gate import FORMATS
    from qaudit.support.keys import nearest

    outputs: list[Output] = []
    for text in forms:
        form, equals, file = text.partition("=")
        if form not in FORMATS:
            raise UsageError(f"there is no format `{form}`", hint=nearest(form, FORMATS))
        if equals and not Path(file).name:
            raise UsageError(f"`{text}` names no file", hint=f"write `{form}=FILE`")
        outputs.append((form, Path(file) if file else None))
    printed = [form for form, place in outputs if place is None]
    if len(printed) > 1:
        raise UsageError(
            f"`{printed[0]}` and `{printed[1]}` would both be printed",
            hint=f"write one into a file: `--format {printed[1]}=FILE`",
        )
    return tuple(outputs) if printed else ((TERMINAL, None), *outputs)


def _put(outputs: Sequence[Output], answer: Gate | QauditError, quiet: bool) -> None:
    """Render everything first, then write: a failure to render leaves nothing half done."""
    from qaudit.report.gate import render, step_summary
    from qaudit.report.gate.checks import headline
    from qaudit.whole import write_whole

    def text(form: str) -> str:
        if quiet and form == TERMINAL and not isinstance(answer, QauditError):
            return headline(answer)
        return render(answer, form)

    ready = [(text(form), form, place) for form, place in outputs]
    summaries = os.environ.get(STEP_SUMMARY)
    if summaries and any(form == GITHUB for form, _ in outputs):
        content = step_summary(answer)
        try:
            with Path(summaries).open("a", encoding="utf-8") as file:
                file.write(content)
        except OSError as error:
            raise not_written(Path(summaries), error) from error
    for content, form, place in sorted(ready, key=lambda each: each[2] is None):
        if place is not None:
            write_whole(place, content)
        else:
            print_result(content, workflow_commands=form == GITHUB)


PARETO = "pareto"


def pick(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="AUDIT...", help="Output folders; a target is scanned first."),
    ],
    objective: Annotated[
        str,
        option(
            _PICK, "loss, loss@SCHEME, kl, bits@1% (within a margin of full precision) or pareto."
        ),
    ] = "loss",
    bits: Annotated[str | None, option(_PICK, BITS, show_default="all that were measured")] = None,
    policy: Annotated[
        str | None, option(_PICK, "A preset or a file.", show_default="that of the audit")
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
    print_result(pick_to_json(audit, best) if as_json else render_pick(audit))
    gated = any(decision.level == "error" for decision in verdict.classes)
    ships = gated and verdict.status == "ship" and wanted.kind != "kl"  # the same as for `gate`
    judged = [decision for decision in verdict.classes if decision.status != "unjudged"]
    sure = all(
        (decision.status in ("ship", "hold", "unjudged") or decision.level == "off")
        and decision.subject is not None
        and not (wanted.kind == "kl" and decision.contenders)  # a tie by KL divergence
        for decision in judged or verdict.classes
    )
    return 0 if best and (ships or sure) else 3


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
