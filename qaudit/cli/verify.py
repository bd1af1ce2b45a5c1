"""`qaudit verify`: is an exported folder what was audited?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qaudit.cli.options import AsJson, Quiet, option
from qaudit.cli.terminal import print_result

if TYPE_CHECKING:
    from qaudit.export.runs import AsItRuns
    from qaudit.export.verify import Verification

_SHOWN = 5
_WITH = "What to compare with"
_LIMITS = "A policy whose `verify` says how far losses may differ."
Runtime = option(
    _WITH, "transformers, gptqmodel, llama.cpp, mlx or vllm.", show_default="by the format"
)


def verify(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that `qaudit export` wrote.")
    ],
    audit: Annotated[Path | None, option(_WITH, "The audit it was exported from.")] = None,
    runtime: Annotated[str | None, Runtime] = None,
    policy: Annotated[str | None, option(_WITH, _LIMITS, show_default="the audit's")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Compare exported files with the weights, and the losses, that were measured.

    Exits with 0 if they are what was audited, with 1 if not, and with 3 without an audit or a
    signature: files and record could have been changed together.

    Example: qaudit verify demo-w4 --audit qaudit-out/demo
    """
    from qaudit.cli.progress import Progress
    from qaudit.export.choice import audit_file_of
    from qaudit.export.verify import verify as verified

    file = None if audit is None else audit_file_of(str(audit)) or audit
    with Progress(quiet=quiet) as progress:
        result = verified(folder, file, runtime, policy, progress)
    print_result(json.dumps(_rows(result), indent=2) if as_json else _text(result))
    return {True: 0, False: 1, None: 3}[result.holds]


def _text(result: Verification) -> str:
    from qaudit.report.format import wrapped
    from qaudit.report.terminal import columns_of_terminal

    def line(text: str) -> str:
        indent = "  " if text.startswith(" ") else ""
        return indent + wrapped(text, width).replace("\n", f"\n{indent}  ")

    width = columns_of_terminal() - 4
    return "\n".join(map(line, _lines(result)))


def _lines(result: Verification) -> list[str]:
    record, differences = result.record, result.differences
    lines = [f"{record.subject} at {record.scheme}, {record.format}"]
    lines += [f"  {difference}" for difference in differences[:_SHOWN]]
    if (more := len(differences) - _SHOWN) > 0:
        lines.append(f"  and {more} more differences")
    if not differences:
        what = "that were measured" if result.trusted else "of the record"
        lines += [
            f"  all {len(record.dense)} quantized linears are, bit for bit, the weights {what}",
            f"  {len(record.rest)} other tensors and {len(record.files)} files are as they were",
        ]
    if result.unhashed:
        lines.append(
            "  the audit has no hashes of linears, so that files and record could have been "
            "changed together: scan again"
        )
    if result.run:
        lines += _run_lines(result.run)
    elif result.why_not_run:
        lines.append(f"  not run: {result.why_not_run}")
    if result.install:
        lines.append(f"  to run it: {result.install}")
    return [*lines, result.sentence]


def _run_lines(run: AsItRuns) -> list[str]:
    difference = run.difference
    change = _change(difference.estimate)
    if difference.low or difference.high:
        change += f" [{_change(difference.low)}, {_change(difference.high)}]"
    return [
        f"  in {run.runtime}, on the same {run.documents} documents, in nats per token:",
        f"  as audited: loss {run.audited.estimate:.6f}, KL {_nats(run.audited_kl)}",
        f"  as it runs: loss {run.running.estimate:.6f}, KL {_nats(run.running_kl)}",
        f"  difference: {change}; `{run.policy}` allows {run.limit.loss:g}",
        f"  difference of KL: {_change(run.kl_difference)}; it allows {run.limit.kl:g}",
        f"  why these limits: {run.limit.why}",
    ]


def _change(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:+.1e}" if value else "0"


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"


def _rows(result: Verification) -> dict[str, Any]:
    run = result.run
    return {
        "verified": result.holds,
        "conclusion": result.sentence,
        "subject": result.record.subject,
        "scheme": result.record.scheme,
        "format": result.record.format,
        "linears": len(result.record.dense),
        "other_tensors": len(result.record.rest),
        "differences": list(result.differences),
        "not_run": result.why_not_run,
        "install": result.install,
        "run": run
        and {
            "runtime": run.runtime,
            "documents": run.documents,
            "policy": run.policy,
            "tolerance": run.limit.loss,
            "kl_tolerance": run.limit.kl,
            "why_tolerated": run.limit.why,
            "ce_audited": run.audited.estimate,
            "ce_running": run.running.estimate,
            "difference": run.difference.estimate,
            "difference_low": run.difference.low,
            "difference_high": run.difference.high,
            "kl_audited": run.audited_kl,
            "kl_running": run.running_kl,
            "kl_difference": run.kl_difference,
            "agrees": run.agrees,
        },
    }
