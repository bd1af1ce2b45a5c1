"""The sections of diagnostics, built by each diagnostic, and the subjects that lack one."""

from __future__ import annotations

from qaudit.diagnostics.registry import parts
from qaudit.report.document import Block, Section, Surface, bullets, code, prose, words
from qaudit.report.views import View


def diagnostics_sections(view: View, only: tuple[Surface, ...]) -> list[Section]:
    """Return one section for each title, those needed most first."""
    built: list[Section] = [part.section(view) for part in parts("section")]
    built.append(Section("Why", _skipped(view), 4))
    blocks: dict[str, tuple[Block, ...]] = {}
    for section in sorted(built, key=lambda section: section.expendable):
        blocks[section.title] = blocks.get(section.title, ()) + section.blocks
    expendable = {section.title: section.expendable for section in built}
    return [Section(title, found, expendable[title], only) for title, found in blocks.items()]


def _skipped(view: View) -> tuple[Block, ...]:
    items = [
        (
            *code(one.subject),
            *words(f" went without {one.diagnostic}: "),
            *prose(one.reason),
            *words("."),
        )
        for one in view.audit.diagnostics.skipped
    ]
    return (bullets(*items),) if items else ()
