"""`qaudit gallery`: many audits as one page and one table. No torch."""

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
    out: Annotated[Path, option(OUTPUT, "The folder of the page.", "--out")],
) -> int:
    """Write a page of many audits, and a Parquet table of all their rows.

    Every number is computed again from evidence, and nothing else is shown. An audit that disagrees
    with its own is left out, and the exit code is that of its error.

    Example: qaudit gallery qaudit-out/demo --out site
    """
    from qaudit.gallery import rows_of, write_gallery

    rows, refused = rows_of(audits, audit_at)
    for error in refused:
        complain(error)
    if rows:
        write_gallery(rows, out)
        print_result(str(out / "index.html"))
    return max((error.code for error in refused), default=0)
