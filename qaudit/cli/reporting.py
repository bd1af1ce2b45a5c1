"""What `qaudit report` does once its options are parsed: read, draw, render, print or put in."""

from __future__ import annotations

import os
from pathlib import Path

from qaudit.cli.audits import audit_at
from qaudit.cli.speech import note, print_result
from qaudit.errors import UsageError
from qaudit.report.card import PICTURES
from qaudit.report.card import render as render_card
from qaudit.report.folder import render, write_block, write_plots
from qaudit.saved.audits import read_audit


def carry_out(
    target: str, form: str, *, into: Path | None, plots: Path | None, sparklines: bool
) -> None:
    """Render a saved audit; print it, or put the card into a README."""
    path = audit_at(target)
    audit = read_audit(path)
    if form != "md" and (into is not None or sparklines):
        raise UsageError(
            f"`--into` and `--sparklines` are about the card, and `{form}` is not the card",
            hint="leave `--format` out",
        )
    if plots is not None:
        write_plots(audit, plots)
    if form != "md":
        print_result(render(audit, form))
        return
    folder = path if path.is_dir() else path.parent
    card = render_card(
        audit,
        pictures_at=None if sparklines else _pictures(folder, into, plots),
        has_dark=any((plots or folder / PICTURES).glob("*-dark.svg")),
    )
    if into is None:
        print_result(card)
        return
    write_block(card, into)
    note(f"wrote the card into {into}")


def _pictures(folder: Path, into: Path | None, plots: Path | None) -> str | None:
    """Return where the card finds its pictures, as seen from the file that it will stand in."""
    if into is None:
        return PICTURES if plots is None else plots.as_posix()
    place = plots or folder / PICTURES
    if not place.is_dir():
        note(f"no pictures in {place}, so lines of text stand for them; `--plots` draws them")
        return None
    return Path(os.path.relpath(place.resolve(), into.resolve().parent)).as_posix()
