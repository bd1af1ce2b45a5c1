"""Slices in the section `How sharp the loss is`: a sentence each, and the figure."""

from __future__ import annotations

from qaudit.diagnostics.plane.summary import beyond_the_parabola, shown_lines
from qaudit.report.card.series import picture
from qaudit.report.document import Section, paragraph
from qaudit.report.views import View


def section(view: View) -> Section:
    """Return the section, without blocks if no slice was measured."""
    texts = [text for line in shown_lines(view) if (text := beyond_the_parabola(line))]
    blocks = (*map(paragraph, texts), *picture(view, "plane"))
    return Section("How sharp the loss is", blocks, 5)
