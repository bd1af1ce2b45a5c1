"""`qaudit gate`: hold a saved audit to a policy. Imports no torch.

A failure of the tool is no finding. It goes to stderr, into the exit code, and into every
format that can express it, so that the report of an earlier run is not taken for this one's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from qaudit.cli.options import BITS, AuditPlace, Quiet, classes_named, option
from qaudit.cli.terminal import print_result, say
from qaudit.errors import QauditError, UsageError, not_written
from qaudit.settings import OUTPUT

if TYPE_CHECKING:
    from qaudit.tables import Audit
    from qaudit.types import Gate

_JUDGE = "What to judge by"


def gate(
    audit: AuditPlace,
    policy: Annotated[
        str, option(_JUDGE, "explore, release, strict, or a YAML file of your own.")
    ] = "release",
    baseline: Annotated[
        str | None,
        option(_JUDGE, "The audit of the previous release: a folder, or `org/name@revision`."),
    ] = None,
    bits: Annotated[
        str | None,
        option(_JUDGE, BITS, show_default="those of the scan, or all that were measured"),
    ] = None,
    form: Annotated[
        list[str] | None,
        option(
            OUTPUT,
            "terminal, md, json, junit, sarif, github, badge or shields; "
            "`junit=FILE` writes it there. Repeatable.",
            "--format",
            show_default="terminal",
        ),
    ] = None,
    signed: Annotated[
        bool,
        option(_JUDGE, "Refuse audits that are not signed with QAUDIT_SIGNING_KEY.", "--signed"),
    ] = False,
    quiet: Quiet = False,
) -> int:
    """Hold an audit to a policy, by its saved evidence: no GPU, no model, no torch.

    Exits with 0 if it holds, 1 if it is breached, 3 if documents or measurements are missing
    to decide. No format changes that.

    Example: qaudit gate qaudit-out/demo --policy strict --format junit=gate.xml
    """
    outputs = outputs_of(form or ())
    from qaudit.report.gate import (
        headline,
        render,
        render_failure,
        step_summary,
        step_summary_of_failure,
    )

    try:
        result = _judge(audit, policy, baseline, classes_named(bits), signed, quiet)
    except QauditError as error:
        failure = error  # `error` is unbound after this block
        files = [output for output in outputs if output != Output(TERMINAL, None)]
        _put(
            files,
            lambda form: render_failure(failure, form),
            lambda: step_summary_of_failure(failure),
        )
        raise
    texts = {TERMINAL: headline(result)} if quiet else {}
    _put(
        outputs, lambda form: texts.get(form) or render(result, form), lambda: step_summary(result)
    )
    for output in outputs:
        if output.file is not None and not quiet:
            say(f"wrote {output.file}")
    return result.exit_code


def _judge(
    audit: str, policy: str, baseline: str | None, bits: tuple[str, ...], signed: bool, quiet: bool
) -> Gate:
    from qaudit.audit import gate as judge
    from qaudit.audit import load
    from qaudit.cli.options import audit_at
    from qaudit.policy import policy_named

    policy_named(policy)  # a wrong one is refused before anything is downloaded

    def opened(target: str) -> Audit:
        return replace(load(audit_at(target, quiet=quiet)), name=target)

    held_to = opened(baseline) if baseline else None
    return judge(opened(audit), policy, held_to, bits, signed=signed)


TERMINAL, GITHUB = "terminal", "github"
STEP_SUMMARY = "GITHUB_STEP_SUMMARY"


@dataclass(frozen=True)
class Output:
    """A format, and the file it goes to; None is stdout."""

    form: str
    file: Path | None


def outputs_of(forms: Sequence[str]) -> tuple[Output, ...]:
    """Read `NAME` and `NAME=FILE`; exactly one format goes to stdout."""
    from qaudit.report.gate import FORMATS
    from qaudit.support.keys import nearest

    outputs = []
    for text in forms:
        form, equals, file = text.partition("=")
        if form not in FORMATS:
            raise UsageError(f"there is no format `{form}`", hint=nearest(form, FORMATS))
        if equals and not Path(file).name:
            raise UsageError(f"`{text}` names no file", hint=f"write `{form}=FILE`")
        outputs.append(Output(form, Path(file) if file else None))
    printed = [output.form for output in outputs if output.file is None]
    if len(printed) > 1:
        raise UsageError(
            f"`{printed[0]}` and `{printed[1]}` would both be printed",
            hint=f"write one into a file: `--format {printed[1]}=FILE`",
        )
    return tuple(outputs) if printed else (Output(TERMINAL, None), *outputs)


def _put(outputs: Sequence[Output], text: Callable[[str], str], summary: Callable[[], str]) -> None:
    """Render everything first, then write: a failure to render leaves nothing half done."""
    from qaudit.whole import write_whole

    ready = [(output, text(output.form)) for output in outputs]
    summaries = os.environ.get(STEP_SUMMARY)
    if summaries and any(output.form == GITHUB for output in outputs):
        _append(Path(summaries), summary())
    for output, content in ready:
        if output.file is not None:
            write_whole(output.file, content)
    for output, content in ready:
        if output.file is None:
            print_result(content, workflow_commands=output.form == GITHUB)


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise not_written(path, error) from error
