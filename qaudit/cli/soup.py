"""`qaudit soup`: write a soup as a checkpoint of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from qaudit.cli.options import Quiet, Targets, option, with_settings
from qaudit.settings import OUTPUT


@with_settings("family", "disk_budget", "allow_pickle")
def soup(
    targets: Targets,
    out: Annotated[Path, option(OUTPUT, "The folder to write, which must be new.", "--out")],
    text: Annotated[
        str | None,
        option("What to merge", "The soup, as in scan.", "--soup", show_default="the mean of all"),
    ] = None,
    *,
    shard_size: Annotated[
        str, option(OUTPUT, "Size of a file of weights at most.", metavar="SIZE")
    ] = "2GB",
    quiet: Quiet = False,
    **settings: Any,
) -> int:
    """Write a soup as a checkpoint that loads anywhere: the same bits that a scan measures.

    Example: qaudit soup runs/my-model --soup 'last:4' --out runs/my-soup
    """
    from qaudit.cli.souping import Request, carry_out
    from qaudit.recipe import split_settings
    from qaudit.recipe.arguments import parse_nbytes

    keys, options = split_settings(settings)
    return carry_out(
        Request(
            targets=tuple(targets),
            text=text,
            family=keys.get("family"),
            out=out,
            shard_nbytes=parse_nbytes(shard_size),
            disk_budget=options.disk_budget,
            allow_pickle=options.allow_pickle,
            quiet=quiet,
        )
    )
