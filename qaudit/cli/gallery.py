"""`qaudit gallery`: many audits as one static site and one table. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qaudit.cli.options import audit_at, option
from qaudit.cli.terminal import complain, print_result
from qaudit.settings import OUTPUT


def gallery(
    audits: Annotated[
        list[str],
        typer.Argument(
            metavar="AUDIT...", help="Output folders, or published audits (`org/name@v1`)."
        ),
    ],
    out: Annotated[Path, option(OUTPUT, "The folder of the site.", "--out")],
) -> int:
    """Write a site of many audits, and a Parquet table of all their rows.

    Every number is recomputed from evidence. An audit that disagrees with its own is left out,
    and the exit code is that of its error.

    Example: qaudit gallery qaudit-out/demo --out site
    """
    from qaudit.gallery import read_audits, write_gallery

    exhibits, refused = read_audits({name: audit_at(name) for name in audits})
    for error in refused:
        complain(error)
    if exhibits:
        write_gallery(exhibits, out)
        print_result(str(out / "index.html"))
    return max((error.code for error in refused), default=0)
