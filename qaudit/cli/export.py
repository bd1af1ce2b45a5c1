"""`qaudit export` and `qaudit soup`: what ships, or a soup, as files that runtimes load."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qaudit.cli.options import Quiet, Targets, option, with_settings
from qaudit.cli.terminal import print_result, resumable, say
from qaudit.errors import UsageError
from qaudit.settings import EXAMPLE_SCHEME, OUTPUT

if TYPE_CHECKING:
    from qaudit.export.choice import ExportChoice
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
    from qaudit.cli.publish import repository
    from qaudit.export.choice import audit_file_of
    from qaudit.export.contents import holds, must_take
    from qaudit.export.contents import push as push_folder
    from qaudit.hub import open_hub

    repo = None if push is None else repository(push)
    given = {name: value for name, value in settings.items() if value not in (None, [])}
    with resumable(out), Progress(quiet=quiet) as progress:
        _check(target, form, scheme, converter, None if repo else out)
        if repo is not None:
            hub = open_hub(progress)
            must_take(repo, hub)
        choice = replace(_choice(target, (bits, subject, scheme), given, progress), repo=repo)
        if repo is None or not holds(out, choice, form):
            from qaudit.export.folder import export_quantized

            export_quantized(choice, form, out, converter=converter, watch=progress)
            if not quiet:
                _say_written(out, None if audit_file_of(target) is None else target)
        lines = [str(out)]
        if repo is not None:
            pushed = push_folder(out, repo, hub, lambda *count: progress.count("files", *count))
            lines.append(f"{pushed.state}: {pushed.url}")
    print_result("\n".join(lines))
    return 0


def _check(
    target: str, form: str, scheme: str | None, converter: Path | None, out: Path | None
) -> None:
    """Refuse what is wrong by the words of the command alone, before any file is read for it."""
    from qaudit.core.registry import parse_scheme
    from qaudit.export.choice import audit_file_of
    from qaudit.export.contents import must_be_new
    from qaudit.formats.packing import format_named

    if out is not None:
        must_be_new(out)
    if scheme is None or audit_file_of(target) is not None:
        scheme = EXAMPLE_SCHEME
    format_named(form, parse_scheme(scheme)).use(converter)


def _say_written(out: Path, audit: str | None) -> None:
    """Say what an export wrote, and how to compare it with its audit."""
    from qaudit.saved.exports import read_export
    from qaudit.support.sizes import size

    record = read_export(out)
    nbytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    say(
        f"wrote {out}: {record.subject} at {record.scheme}, {record.format}, "
        f"{record.bits_per_weight:.3f} bits per quantized weight, {size(nbytes)} in all"
    )
    inside = out / "qaudit"  # of a file that was measured and judged alone
    against = inside if (inside / "evidence").is_dir() else audit
    named = ["--audit", str(against)] if against else []
    say(f"compare it with what was measured: {shlex.join(['qaudit', 'verify', str(out), *named])}")


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
