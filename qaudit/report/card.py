"""The card and the page of an audit: one first screen, then what it is based on.

The card is short: verdict, picture and command, and folded what it is based on. As Markdown it is
between two markers, so that a later card can replace it inside a README (`report/markdown.py`). The
page has everything, each section folded.
"""

from __future__ import annotations

from collections.abc import Mapping

from qaudit.diagnostics.registry import parts
from qaudit.report import document as doc
from qaudit.report import html, markdown, terminal
from qaudit.report.format import listing
from qaudit.report.losses import (
    errors_section,
    fidelity_section,
    mixture_section,
    reference_section,
    schemes_section,
)
from qaudit.report.markdown import BEGIN, END
from qaudit.report.protocol import (
    notes_section,
    protocol_section,
    reproduce_section,
    skipped_section,
)
from qaudit.report.sections import (
    accuracies_section,
    codes,
    findings_section,
    ignores_section,
    noise_section,
    policy_section,
    tasks_section,
)
from qaudit.report.series import picture, series_picture, series_section, soup_section
from qaudit.report.verdict import evidence, measured, pareto_section, screen, table
from qaudit.report.views import View
from qaudit.types import AuditRecord

LIMIT_NBYTES = 12_000
PICTURES = "plots"
LONGEST_TITLE = 200
MOST_CLASSES = 6  # in a README, where a card has 20 lines
LEFT_OUT = f"Left out for length, see `{html.FILE}`"


def render(
    audit: AuditRecord,
    *,
    pictures_at: str | None = PICTURES,
    has_dark: bool = True,
    limit_nbytes: int = LIMIT_NBYTES,
) -> str:
    """Render the card; without a place for pictures, lines of text replace them.

    `has_dark`: beside every picture is its variant for dark pages.
    """
    room = limit_nbytes - len(BEGIN) - len(END) - 4
    text = markdown.render(
        card(View(audit)),
        pictures_at=pictures_at,
        has_dark=has_dark,
        limit_nbytes=room,
        left_out_as=LEFT_OUT,
    )
    return f"{BEGIN}\n\n{text}\n{END}\n"


def render_block(audit: AuditRecord, folder: str, *, has_page: bool) -> str:
    """Render what a README holds of a card that is beside it in a folder: at most 20 lines."""
    view = View(audit)
    blocks: list[doc.Block] = []
    if view.classes:
        blocks.append(table(view.classes[:MOST_CLASSES]))
    pages = [("card", "card.md"), *([("page", html.FILE)] * has_page), ("data", "audit.json")]
    links = [doc.TextRun(name, href=f"{folder}/{file}") for name, file in pages]
    joined = [run for link in links for run in (doc.TextRun(", "), link)][1:]
    more = (*doc.words("The whole report: "), *joined, *doc.words("."))
    blocks.append(doc.paragraph(more))
    text = markdown.render(doc.Page(title(view), doc.prose(measured(view)), tuple(blocks)))
    return f"{BEGIN}\n\n{text}\n{END}\n"


def render_page(audit: AuditRecord, figures: Mapping[str, str] = html.NO_FIGURES) -> str:
    """Render `report.html` with figures by their names."""
    version = f" {audit.qaudit}" if audit.qaudit else ""
    footer = f"Drawn from audit.json (schema {audit.schema}) of qaudit{version}. "
    return html.render(document(View(audit)), figures, footer)


def render_notebook(audit: AuditRecord, figures: Mapping[str, str] = html.NO_FIGURES) -> str:
    """Render the page inside of a frame, so that its style stays its own."""
    return html.frame(render_page(audit, figures))


def render_terminal(audit: AuditRecord, width: int | None = None, folder: str | None = None) -> str:
    """Render the first screen, the accuracies of what ships, and what is missing."""
    view = View(audit)
    sections = (
        doc.Section("Tasks", accuracies_section(view)),
        doc.Section("Not measured", skipped_section(view)),
    )
    blocks = (*first_screen(view, folder), *sections)
    return terminal.render(doc.Page(title(view), doc.prose(measured(view)), blocks), width)


def card(view: View) -> doc.Page:
    """Return the first screen, how to measure it again, and folded what it is based on."""
    sections = (
        doc.Section("Evidence for the verdict", evidence(view), 1),
        doc.Section("Policy checks", policy_section(view), 2),
        doc.Section("Not measured", skipped_section(view), 3),
    )
    page = (*doc.words("Every subject, scheme and number is on the page, "), *doc.code(html.FILE))
    again = (doc.paragraph("Measured by:"), *reproduce_section(view)[:1])
    blocks: list[doc.Block] = [*first_screen(view), *again]
    blocks.append(doc.paragraph((*page, *doc.words("."))))
    blocks += (section for section in sections if section.blocks)
    return doc.Page(title(view), doc.prose(measured(view)), tuple(blocks), is_folded=True)


def document(view: View) -> doc.Page:
    """Return everything, as the page has it."""
    sections = (
        doc.Section("Evidence for the verdict", evidence(view), 0),
        doc.Section("Policy checks", policy_section(view), 1),
        doc.Section("Added loss", errors_section(view), 0),
        doc.Section("KL divergence", fidelity_section(view), 3),
        doc.Section("Against the reference", reference_section(view), 1),
        doc.Section("Along the series", series_section(view), 2),
        doc.Section("Soup against ingredients", soup_section(view), 4),
        doc.Section("What fewer bits cost", pareto_section(view), 3),
        doc.Section("Bits of each linear", mixture_section(view), 6),
        doc.Section("Tasks", tasks_section(view), 5),
        *_diagnostics_sections(view),
        doc.Section("Noise", noise_section(view), 4),
        doc.Section("Findings", (*findings_section(view), *codes(view)), 3),
        doc.Section("Not measured", skipped_section(view), 5),
        doc.Section("Scheme by scheme", schemes_section(view), 9),
        doc.Section("Notes", notes_section(view), 7),
        doc.Section("Protocol and environment", protocol_section(view), 2),
        doc.Section("Ignores applied", ignores_section(view), 1),
        doc.Section("Reproduce", reproduce_section(view), 0),
    )
    blocks = (*first_screen(view), *(section for section in sections if section.blocks))
    return doc.Page(title(view), doc.prose(measured(view)), blocks, is_folded=True)


def first_screen(view: View, folder: str | None = None) -> tuple[doc.Block, ...]:
    blocks = screen(view, folder)
    picture_of_all = series_picture(view) or picture(view, "pareto") or picture(view, "shipped")
    return (*blocks, *picture_of_all)


def title(view: View) -> str:
    """Return the name of the card; of many targets, the first ones."""
    targets = listing(list(view.audit.plan.recipe.targets) or ["nothing"])
    if len(targets) > LONGEST_TITLE:
        targets = f"{targets[:LONGEST_TITLE]} ..."
    return f"Quantization audit of {targets}"


def _diagnostics_sections(view: View) -> list[doc.Section]:
    """Return one section for each title, those needed most first."""
    items = [
        f"`{skipped.subject}` went without {skipped.diagnostic}: {skipped.reason}."
        for skipped in view.audit.diagnostics.skipped
    ]
    built: list[doc.Section] = [section(view) for section in parts("section")]
    built.append(doc.Section("Why", doc.bullets_of(items), 4))
    blocks: dict[str, tuple[doc.Block, ...]] = {}
    for section in sorted(built, key=lambda section: section.expendable):
        blocks[section.title] = blocks.get(section.title, ()) + section.blocks
    expendable = {section.title: section.expendable for section in built}
    return [doc.Section(title, inner, expendable[title]) for title, inner in blocks.items()]
