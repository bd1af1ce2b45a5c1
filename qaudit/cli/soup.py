"""`qaudit soup`: write a soup as a checkpoint of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from qaudit.cli import options as o

Text = Annotated[
    str | None,
    typer.Option(
        "--soup", help="Which soup, as in scan; default: the mean of all.", envvar="QAUDIT_SOUP"
    ),
]
Folder = Annotated[
    Path, typer.Option("--out", help="The folder to write, which must be new.", envvar="QAUDIT_OUT")
]
ShardSize = Annotated[
    str, typer.Option(help="Size of a file of weights at most.", envvar="QAUDIT_SHARD_SIZE")
]


def soup(
    targets: o.Targets,
    out: Folder,
    text: Text = None,
    family: o.Family = None,
    shard_size: ShardSize = "2GB",
    disk_budget: o.DiskBudget = None,
    allow_pickle: o.AllowPickle = False,
    quiet: o.Quiet = False,
) -> None:
    """Write a soup as a checkpoint that loads anywhere: the same bits that a scan measures.

    Example: qaudit soup runs/my-model --soup 'last:4' --out runs/my-soup
    """
    from qaudit.cli.souping import Request, carry_out

    request = Request(
        targets=tuple(targets),
        text=text,
        family=family,
        out=out,
        shard_size=shard_size,
        disk_budget=disk_budget,
        allow_pickle=allow_pickle,
        quiet=quiet,
    )
    sys.exit(carry_out(request))
