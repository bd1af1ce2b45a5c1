"""An output folder: `audit.json`, and the card, the page and the plots made from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from qaudit.diagnostics.registry import parts
from qaudit.errors import MachineError, QauditError, UsageError, not_written
from qaudit.report.card import PICTURES, render_page, render_terminal
from qaudit.report.card import render as render_card
from qaudit.report.chart import Chart, dark, drawing
from qaudit.report.format import renderer_of
from qaudit.report.html import FILE as PAGE
from qaudit.report.markdown import put_block
from qaudit.report.plots import DRAWERS
from qaudit.report.series import pictures
from qaudit.report.views import View
from qaudit.saved.audits import to_json
from qaudit.types import AuditRecord
from qaudit.whole import read_regular, write_whole

MOST_NBYTES, MOST_NBYTES_FIGURE = 16_000_000, 4_000_000
"""A README and a saved figure are never larger."""

FORMATS: dict[str, Callable[[AuditRecord], str]] = {
    "md": render_card,
    "html": render_page,
    "terminal": render_terminal,
    "json": to_json,
}


def write_folder(audit: AuditRecord, out: Path) -> None:
    """Write the audit, its card, its page and its plots; a file is replaced whole or not at all."""
    write_whole(out / "audit.json", to_json(audit))
    write_whole(out / "card.md", render_card(audit))
    drawn: dict[str, str] = {}
    try:
        drawn = write(audit, out / PICTURES)
    finally:  # all else is there if a picture cannot be drawn
        write_whole(out / PAGE, render_page(audit, drawn))


def write_block(card: str, readme: Path) -> None:
    """Put a card into a README between its markers; the file is made if there is none."""
    place = readme.resolve()  # a link stays a link
    if not place.parent.is_dir():
        raise UsageError(
            f"there is no folder `{readme.parent}` for a README", hint="make it, or fix the path"
        )
    try:
        text = read_regular(place, MOST_NBYTES).decode() if place.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"`{readme}` cannot be read as text: {error}", hint="name a Markdown file in UTF-8"
        ) from error
    write_whole(place, put_block(text, card))


def must_take_files(out: Path) -> None:
    """Refuse an output folder that cannot be written to, before hours go into what is written."""
    must_be_outside(out)
    places = (out, *out.parents)
    if broken := next((p for p in places if p.is_symlink() and not p.exists()), None):
        raise UsageError(
            f"`{broken}` is a link that leads nowhere", hint="name another with `--out`"
        )
    place = next(place for place in places if place.exists())
    if not place.is_dir():
        raise UsageError(
            f"`{place}` is a file, and results need a folder", hint="name another with `--out`"
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise MachineError(
            f"`{place}` takes no files: permission denied", hint="name another with `--out`"
        )


def must_be_outside(out: Path) -> None:
    """Refuse an output folder inside a checkpoint."""
    weights = ("*.safetensors", "pytorch_model*.bin")
    places = (here := out.absolute(), *here.parents)
    models = (p for p in places if (p / "config.json").is_file())
    if model := next((p for p in models if any(any(p.glob(name)) for name in weights)), None):
        raise UsageError(
            f"`{out}` is inside the checkpoint `{model}`, whose files others copy as a whole",
            hint="name a folder outside of it with `--out`",
        )


def render(
    audit: AuditRecord, form: str, plots: Path | None = None, shown_at: str | None = None
) -> str:
    """Render an audit; the page with the pictures that were saved, or that can be drawn.

    Commands of the first screen name the folder that it is `shown_at`.
    """
    if form == "terminal":
        return render_terminal(audit, folder=shown_at)
    if form == "html":
        return render_page(audit, figures(audit, plots))
    return renderer_of(form, FORMATS)(audit)


def figures(audit: AuditRecord, folder: Path | None = None) -> dict[str, str]:
    """Return every figure in light colours: as it was saved, else drawn, if matplotlib is there."""
    names = dict(pictures(View(audit)))
    saved = {} if folder is None else {name: _saved(folder / f"{name}.svg") for name in names}
    known = {name: svg for name, svg in saved.items() if svg}
    if known.keys() == names.keys() or find_spec("matplotlib") is None:
        return known
    return {name: svg for name, svg, _ in _drawn(audit)}


def write(audit: AuditRecord, folder: Path) -> dict[str, str]:
    """Write each figure as `NAME.svg`, `NAME-dark.svg` and `NAME.png`; return the light ones."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise not_written(folder, error) from error
    svgs = {}
    for name, svg, chart in _drawn(audit):
        write_whole(folder / f"{name}.svg", svg)
        write_whole(folder / f"{name}-dark.svg", dark(svg))
        write_whole(folder / f"{name}.png", chart.png())
        svgs[name] = svg
    return svgs


def _drawn(audit: AuditRecord) -> Iterator[tuple[str, str, Chart]]:
    view = View(audit)
    drawers = DRAWERS | {figure.name: figure.draw for figure in parts("FIGURE")}
    for name, alt in pictures(view):
        with drawing():
            chart = drawers[name](view)
            yield name, chart.svg(name, alt), chart


def _saved(path: Path) -> str:
    """Return a saved figure; nothing where there is none, or a link to another place."""
    try:
        return "" if path.is_symlink() else read_regular(path, MOST_NBYTES_FIGURE).decode()
    except (OSError, UnicodeDecodeError, QauditError):
        return ""
