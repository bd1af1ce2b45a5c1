"""`qaudit soup`: write a soup as a checkpoint of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from qaudit.cli.options import Quiet, Targets, option, with_settings
from qaudit.cli.terminal import print_result
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
    from qaudit.cli.progress import Progress
    from qaudit.export.soup import export_soup
    from qaudit.recipe.table import parse_nbytes, recipe_and_options

    shard_nbytes = parse_nbytes(shard_size)
    recipe, options = recipe_and_options(*targets, soups=text, **settings)
    with Progress(quiet=quiet) as progress:
        folder = export_soup(recipe, out, options, shard_nbytes=shard_nbytes, watch=progress)
    print_result(str(folder))
    return 0
