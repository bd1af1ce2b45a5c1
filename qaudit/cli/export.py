"""`qaudit export`, `soup` and `verify`: what ships as files that runtimes load, and is it that?"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qaudit.cli.options import AsJson, Quiet, Targets, option, with_settings
from qaudit.cli.terminal import print_result, resumable, say
from qaudit.errors import UsageError
from qaudit.settings import EXAMPLE_SCHEME, OUTPUT

if TYPE_CHECKING:
    from qaudit.export.choice import ExportChoice
    from qaudit.export.verify import Verification
    from qaudit.types import Watch


_WHAT = "What to export"
Weights = Annotated[
    str,
    typer.Argument(
        metavar="AUDIT|TARGET",
        help="An audit's folder, to export what ships; or a folder or repository of weights.",
    ),
]
Form = Annotated[
    str, option(OUTPUT, "compressed-tensors, gptq, awq, bnb, mlx or gguf.", "--format")
]
Class = option(_WHAT, "Class of bits of the verdict, as 4.", show_default="the only one")
PullRequest = option(
    OUTPUT, "Open a pull request with the folder, for `org/name` on the Hub.", metavar="REPO"
)
Converter = option(
    OUTPUT, "For gguf: llama.cpp's convert_hf_to_gguf.py, or a .gguf file it made.", metavar="FILE"
)
_SHIPS = {"show_default": "the one that ships"}
NewFolder = Annotated[Path, option(OUTPUT, "The folder to write, which must be new.", "--out")]


@with_settings(
    more=("device", "calibration", "evaluation", "checkpoints", "soups", "allow_pickle"),
    keys=(
        "context", "calibration_documents", "document_tokens", "calibration_seed",
        "dtype", "disk_budget",
    ),
)  # fmt: skip
def export(
    target: Weights,
    out: NewFolder,
    form: Form = "compressed-tensors",
    bits: Annotated[str | None, Class] = None,
    subject: Annotated[str | None, option(_WHAT, "Checkpoint or soup.", **_SHIPS)] = None,
    scheme: Annotated[str | None, option(_WHAT, "Scheme.", **_SHIPS)] = None,
    *,
    push: Annotated[str | None, PullRequest] = None,
    converter: Annotated[Path | None, Converter] = None,
    quiet: Quiet = False,
    **settings: Any,
) -> int:
    """Write a checkpoint or soup, quantized as it was measured, for vLLM and transformers.

    Run the same command again to resume after an interruption, of a push too.

    Example: qaudit export qaudit-out/demo --bits 4 --out soup-w4
    """
    from qaudit.cli.progress import Progress
    from qaudit.cli.report import repository
    from qaudit.core.registry import parse_scheme
    from qaudit.export.choice import audit_file_of
    from qaudit.export.contents import holds, must_be_new, must_take
    from qaudit.export.contents import push as push_folder
    from qaudit.formats.packing import format_named
    from qaudit.hub import open_hub
    from qaudit.saved.exports import read_export
    from qaudit.support.sizes import size

    repo = None if push is None else repository(push)
    is_audit = audit_file_of(target) is not None
    given = {name: value for name, value in settings.items() if value not in (None, [])}
    with resumable(out), Progress(quiet=quiet) as progress:
        # What is wrong by the words of the command alone is refused before any file is read.
        if repo is None:
            must_be_new(out)
        of_any = EXAMPLE_SCHEME if scheme is None or is_audit else scheme
        format_named(form, parse_scheme(of_any)).use(converter)
        if repo is not None:
            hub = open_hub(progress)
            must_take(repo, hub)
        choice = replace(_choice(target, (bits, subject, scheme), given, progress), repo=repo)
        if repo is None or not holds(out, choice, form):
            from qaudit.export.folder import export_quantized

            export_quantized(choice, form, out, converter=converter, watch=progress)
            record, inside = read_export(out), out / "qaudit"
            nbytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
            written = (
                f"wrote {out}: {record.subject} at {record.scheme}, {record.format}, "
                f"{record.bits_per_weight:.3f} bits per quantized weight, {size(nbytes)} in all"
            )
            # Of a file that was measured and judged alone the audit is inside.
            against = inside if (inside / "evidence").is_dir() else target if is_audit else None
            named = ["--audit", str(against)] if against else []
            compared = shlex.join(["qaudit", "verify", str(out), *named])
            if not quiet:
                say(f"{written}\ncompare it with what was measured: {compared}")
        lines = [str(out)]
        if repo is not None:
            pushed = push_folder(out, repo, hub, lambda *count: progress.count("files", *count))
            lines.append(f"{pushed.state}: {pushed.url}")
    print_result("\n".join(lines))
    return 0


def _choice(
    target: str,
    named: tuple[str | None, str | None, str | None],
    given: dict[str, Any],
    watch: Watch,
) -> ExportChoice:
    from qaudit.export.choice import audit_file_of, of_audit, of_target

    bits, subject, scheme = named
    file = audit_file_of(target)
    if file is None:
        if bits is not None:
            raise UsageError(
                f"`--bits` chooses from a verdict, and there is no audit at `{target}`",
                hint=f"audit it first, `qaudit scan {target}`, and export the output folder; or "
                "name a scheme with `--scheme`"
                if Path(target).exists()
                else "name an output folder of `qaudit scan`",
            )
        return of_target(target, subject, scheme, given, watch)
    allow_pickle = bool(given.pop("allow_pickle", False))
    if given:
        name = next(iter(given))
        raise UsageError(
            f"`{target}` is an audit, which fixes `{name}`",
            hint="leave it out, or export the checkpoint itself",
        )
    choice = of_audit(file, bits, subject, scheme, watch)
    return replace(choice, options=replace(choice.options, allow_pickle=allow_pickle))


@with_settings("allow_pickle", keys=("family", "disk_budget"))
def soup(
    targets: Targets,
    out: NewFolder,
    text: Annotated[
        str | None,
        option("What to merge", "The soup, as in scan.", "--soup", show_default="the mean of all"),
    ] = None,
    *,
    quiet: Quiet = False,
    **settings: Any,
) -> int:
    """Write a soup as a checkpoint that loads anywhere: the same bits that a scan measures.

    Example: qaudit soup runs/my-model --soup 'last:4' --out runs/my-soup
    """
    from qaudit.cli.progress import Progress
    from qaudit.export.soup import export_soup
    from qaudit.recipe.table import recipe_and_options

    recipe, options = recipe_and_options(*targets, soups=text, **settings)
    with Progress(quiet=quiet) as progress:
        folder = export_soup(recipe, out, options, watch=progress)
    print_result(str(folder))
    return 0


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
    from qaudit.report.format import wrapped
    from qaudit.report.terminal import columns_of_terminal

    file = None if audit is None else audit_file_of(str(audit)) or audit
    with Progress(quiet=quiet) as progress:
        result = verified(folder, file, runtime, policy, progress)
    if as_json:
        print_result(json.dumps(_rows(result), indent=2))
    else:
        width, lines = columns_of_terminal() - 4, []
        for line in _lines(result):
            indent = "  " if line.startswith(" ") else ""
            lines.append(indent + wrapped(line, width).replace("\n", f"\n{indent}  "))
        print_result("\n".join(lines))
    return {True: 0, False: 1, None: 3}[result.holds]


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
    if run := result.run:
        change = _change(run.difference.estimate)
        if run.difference.low or run.difference.high:
            change += f" [{_change(run.difference.low)}, {_change(run.difference.high)}]"
        audited_kl, running_kl = (
            "-" if kl is None else f"{kl:.6f}" for kl in (run.audited_kl, run.running_kl)
        )
        lines += [
            f"  in {run.runtime}, on the same {run.documents} documents, in nats per token:",
            f"  as audited: loss {run.audited.estimate:.6f}, KL {audited_kl}",
            f"  as it runs: loss {run.running.estimate:.6f}, KL {running_kl}",
            f"  difference: {change}; `{run.policy}` allows {run.limit.loss:g}",
            f"  difference of KL: {_change(run.kl_difference)}; it allows {run.limit.kl:g}",
            f"  why these limits: {run.limit.why}",
        ]
    elif result.why_not_run:
        lines.append(f"  not run: {result.why_not_run}")
    if result.install:
        lines.append(f"  to run it: {result.install}")
    return [*lines, result.sentence]


def _change(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:+.1e}" if value else "0"


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
