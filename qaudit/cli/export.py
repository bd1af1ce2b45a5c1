"""`qaudit export`: write what ships as files that runtimes load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qaudit.cli.failures import resumable
from qaudit.cli.options import Quiet, option, with_settings
from qaudit.cli.terminal import print_result
from qaudit.errors import UsageError
from qaudit.settings import OUTPUT

_WHAT = "What to export"


@with_settings(
    "checkpoints",
    "soups",
    "calibration",
    "context",
    "calibration_documents",
    "document_tokens",
    "calibration_seed",
    "device",
    "dtype",
    "disk_budget",
    "allow_pickle",
)
def export(
    target: Annotated[
        str,
        typer.Argument(
            metavar="AUDIT|TARGET",
            help="An audit's folder, to export what ships; or a folder or repository of weights.",
        ),
    ],
    out: Annotated[Path, option(OUTPUT, "The folder to write, which must be new.", "--out")],
    form: Annotated[
        str, option(OUTPUT, "compressed-tensors, gptq, awq, bnb, mlx or gguf.", "--format")
    ] = "compressed-tensors",
    bits: Annotated[
        str | None,
        option(_WHAT, "Class of bits of the verdict, as 4.", show_default="the only one"),
    ] = None,
    subject: Annotated[
        str | None,
        option(_WHAT, "Checkpoint or soup.", "--subject", show_default="the one that ships"),
    ] = None,
    scheme: Annotated[
        str | None, option(_WHAT, "Scheme.", "--scheme", show_default="the one that ships")
    ] = None,
    *,
    shard_size: Annotated[
        str, option(OUTPUT, "Size of a file of weights at most.", metavar="SIZE")
    ] = "2GB",
    converter: Annotated[
        Path | None,
        option(
            OUTPUT,
            "For gguf: llama.cpp's convert_hf_to_gguf.py, or a .gguf file it made.",
            metavar="FILE",
        ),
    ] = None,
    quiet: Quiet = False,
    **settings: Any,
) -> int:
    """Write a checkpoint or soup, quantized as it was measured, for vLLM and transformers.

    Run the same command again to resume after an interruption.

    Example: qaudit export qaudit-out/demo --bits 4 --out soup-w4
    """
    from qaudit.cli.progress import Progress
    from qaudit.export.choice import audit_file_of, of_audit, of_target, with_options
    from qaudit.export.quantized import export_quantized
    from qaudit.recipe.table import parse_nbytes

    shard_nbytes = parse_nbytes(shard_size)
    options = {name: value for name, value in settings.items() if value not in (None, [])}
    with resumable(out), Progress(quiet=quiet) as progress:
        file = audit_file_of(target)
        if file is None:
            if bits is not None:
                raise UsageError(
                    f"`--bits` chooses from a verdict, and `{target}` is no audit",
                    hint="name a scheme of so many bits with `--scheme`",
                )
            choice = of_target(target, subject, scheme, options, progress)
        else:
            allow_pickle = bool(options.pop("allow_pickle", False))
            if options:
                name = next(iter(options))
                raise UsageError(
                    f"`{target}` is an audit, which fixes `{name}`",
                    hint="leave it out, or export the checkpoint itself",
                )
            choice = of_audit(file, bits, subject, scheme, progress)
            choice = with_options(choice, allow_pickle=allow_pickle)
        folder = export_quantized(
            choice,
            form,
            out,
            shard_nbytes=shard_nbytes,
            converter=converter,
            watch=progress,
        )
    print_result(str(folder))
    return 0
