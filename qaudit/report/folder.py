"""The card and the page of an audit, and the output folder that has them beside `audit.json`.

One first screen, then what it is based on. The card is short: verdict, picture and command, and
folded what it is based on. As Markdown it is between two markers, so that a later card can replace
it inside a README (`report/markdown.py`). The page has everything, each section folded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from html import escape
from importlib.util import find_spec
from pathlib import Path

from qaudit.diagnostics.diagnostic import parts
from qaudit.errors import MachineError, QauditError, UsageError, not_written
from qaudit.report import document as doc
from qaudit.report import html, markdown, terminal
from qaudit.report.chart import Chart, dark, drawing
from qaudit.report.format import listing, renderer_of
from qaudit.report.losses import (
    errors_section,
    fidelity_section,
    mixture_section,
    reference_section,
    schemes_section,
)
from qaudit.report.markdown import BEGIN, END, put_block
from qaudit.report.plots import DRAWERS
from qaudit.report.sections import (
    accuracies_section,
    codes,
    findings_section,
    ignores_section,
    noise_section,
    notes_section,
    policy_section,
    protocol_section,
    reproduce_section,
    skipped_section,
    tasks_section,
)
from qaudit.report.series import picture, pictures, series_picture, series_section, soup_section
from qaudit.report.verdict import evidence, measured, pareto_section, screen, table
from qaudit.report.views import View
from qaudit.saved.audits import to_json
from qaudit.types import AuditRecord
from qaudit.whole import read_regular, write_whole

LIMIT_NBYTES = 12_000
PICTURES = "plots"
LONGEST_TITLE = 200
MOST_CLASSES = 6  # in a README, where a card has 20 lines
LEFT_OUT = f"Left out for length, see `{html.FILE}`"


def render_card(
    audit: AuditRecord,
    *,
    pictures_at: str | None = PICTURES,
    has_dark: bool = True,
    limit_nbytes: int = LIMIT_NBYTES,
) -> str:
    """Render the card; without a place for pictures, lines of text replace them.

    `has_dark`: beside every picture is its variant for dark pages.
    """
    text = markdown.render(
        card(View(audit)),
        pictures_at=pictures_at,
        has_dark=has_dark,
        limit_nbytes=limit_nbytes - len(BEGIN) - len(END) - 4,
        left_out_as=LEFT_OUT,
    )
    return f"{BEGIN}\n\n{text}\n{END}\n"


def render_block(audit: AuditRecord, folder: str, *, has_page: bool) -> str:
    """Render what a README holds of a card that is beside it in a folder: at most 20 lines."""
    view = View(audit)
    blocks: list[doc.Block] = []
    if view.classes:
        blocks.append(table(view.classes[:MOST_CLASSES]))
    runs, before = list[doc.TextRun](), "The whole report: "
    pages = [("card", "card.md"), *([("page", html.FILE)] * has_page), ("data", "audit.json")]
    for name, file in pages:
        runs += [doc.TextRun(before), doc.TextRun(name, href=f"{folder}/{file}")]
        before = ", "
    blocks.append(doc.paragraph((*runs, *doc.words("."))))
    text = markdown.render(doc.Page(name_of(view), doc.prose(measured(view)), tuple(blocks)))
    return f"{BEGIN}\n\n{text}\n{END}\n"


def render_page(audit: AuditRecord, figures: Mapping[str, str] = html.NO_FIGURES) -> str:
    """Render `report.html` with figures by their names."""
    version = f" {audit.qaudit}" if audit.qaudit else ""
    footer = f"Drawn from audit.json (schema {audit.schema}) of qaudit{version}. "
    return html.render(document(View(audit)), figures, footer)


def render_notebook(audit: AuditRecord, figures: Mapping[str, str] = html.NO_FIGURES) -> str:
    """Render the page inside of a frame, so that its style stays its own and nothing leaves it."""
    source = escape(render_page(audit, figures))
    return (
        f'<iframe srcdoc="{source}" title="Report" sandbox="allow-scripts" '
        'allow="clipboard-write" width="100%" height="800"></iframe>'
    )


def render_terminal(audit: AuditRecord, width: int | None = None, folder: str | None = None) -> str:
    """Render the first screen, the accuracies of what ships, and what is missing."""
    view = View(audit)
    sections = (
        doc.Section("Tasks", accuracies_section(view)),
        doc.Section("Not measured", skipped_section(view)),
    )
    blocks = (*first_screen(view, folder), *sections)
    return terminal.render(doc.Page(name_of(view), doc.prose(measured(view)), blocks), width)


def card(view: View) -> doc.Page:
    """Return the first screen, how to measure it again, and folded what it is based on."""
    sections = (
        doc.Section("Evidence for the verdict", evidence(view), 1),
        doc.Section("Policy checks", policy_section(view), 2),
        doc.Section("Not measured", skipped_section(view), 3),
    )
    page = f"Every subject, scheme and number is on the page, `{html.FILE}`."
    again = (doc.paragraph("Measured by:"), *reproduce_section(view)[:1])
    blocks: list[doc.Block] = [*first_screen(view), *again, doc.paragraph(page)]
    blocks += (section for section in sections if section.blocks)
    return doc.Page(name_of(view), doc.prose(measured(view)), tuple(blocks), is_folded=True)


def document(view: View) -> doc.Page:
    """Return everything, as the page has it; of diagnostics, a section for each title."""
    items = [
        f"`{skipped.subject}` went without {skipped.diagnostic}: {skipped.reason}."
        for skipped in view.audit.diagnostics.skipped
    ]
    built: list[doc.Section] = [section(view) for section in parts("section")]
    built.append(doc.Section("Why", doc.bullets_of(items), 4))
    diagnoses: dict[str, tuple[doc.Block, ...]] = {}
    for section in sorted(built, key=lambda section: section.expendable):  # needed most first
        diagnoses[section.title] = diagnoses.get(section.title, ()) + section.blocks
    sections = (
        doc.Section("Evidence for the verdict", evidence(view)),
        doc.Section("Policy checks", policy_section(view)),
        doc.Section("Added loss", errors_section(view)),
        doc.Section("KL divergence", fidelity_section(view)),
        doc.Section("Against the reference", reference_section(view)),
        doc.Section("Along the series", series_section(view)),
        doc.Section("Soup against ingredients", soup_section(view)),
        doc.Section("What fewer bits cost", pareto_section(view)),
        doc.Section("Bits of each linear", mixture_section(view)),
        doc.Section("Tasks", tasks_section(view)),
        *(doc.Section(title, blocks) for title, blocks in diagnoses.items()),
        doc.Section("Noise", noise_section(view)),
        doc.Section("Findings", (*findings_section(view), *codes(view))),
        doc.Section("Not measured", skipped_section(view)),
        doc.Section("Scheme by scheme", schemes_section(view)),
        doc.Section("Notes", notes_section(view)),
        doc.Section("Protocol and environment", protocol_section(view)),
        doc.Section("Ignores applied", ignores_section(view)),
        doc.Section("Reproduce", reproduce_section(view)),
    )
    page = (*first_screen(view), *(section for section in sections if section.blocks))
    return doc.Page(name_of(view), doc.prose(measured(view)), page, is_folded=True)


def first_screen(view: View, folder: str | None = None) -> tuple[doc.Block, ...]:
    blocks = screen(view, folder)
    picture_of_all = series_picture(view) or picture(view, "pareto") or picture(view, "shipped")
    return (*blocks, *picture_of_all)


def name_of(view: View) -> str:
    """Return the name of the card; of many targets, the first ones."""
    targets = listing(list(view.audit.plan.recipe.targets) or ["nothing"])
    if len(targets) > LONGEST_TITLE:
        targets = f"{targets[:LONGEST_TITLE]} ..."
    return f"Quantization audit of {targets}"


# ------------------------------------------------------------------ the folder

MOST_NBYTES, MOST_NBYTES_FIGURE = 16_000_000, 4_000_000
"""A README and a saved figure are never larger."""


def write_folder(audit: AuditRecord, out: Path) -> None:
    """Write the audit, its card, its page and its plots; a file is replaced whole or not at all."""
    write_whole(out / "audit.json", to_json(audit))
    write_whole(out / "card.md", render_card(audit))
    drawn: dict[str, str] = {}
    try:
        drawn = write(audit, out / PICTURES)
    finally:  # all else is there if a picture cannot be drawn
        write_whole(out / html.FILE, render_page(audit, drawn))


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
    places, hint = (out, *out.parents), "name another with `--out`"
    if broken := next((p for p in places if p.is_symlink() and not p.exists()), None):
        raise UsageError(f"`{broken}` is a link that leads nowhere", hint=hint)
    place = next(place for place in places if place.exists())
    if not place.is_dir():
        raise UsageError(f"`{place}` is a file, and results need a folder", hint=hint)
    if not os.access(place, os.W_OK | os.X_OK):
        raise MachineError(f"`{place}` takes no files: permission denied", hint=hint)


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
    names, saved = dict(pictures(View(audit))), {}
    places = [] if folder is None else [folder / f"{name}.svg" for name in names]
    for path in places:
        with suppress(OSError, UnicodeDecodeError, QauditError):
            if not path.is_symlink() and (svg := read_regular(path, MOST_NBYTES_FIGURE).decode()):
                saved[path.stem] = svg
    if saved.keys() == names.keys() or find_spec("matplotlib") is None:
        return saved
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


FORMATS: dict[str, Callable[[AuditRecord], str]] = {
    "md": render_card,
    "html": render_page,
    "terminal": render_terminal,
    "json": to_json,
}
