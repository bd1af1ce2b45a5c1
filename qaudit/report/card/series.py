"""Error along the series: the pictures, or lines of text where there are none."""

from __future__ import annotations

from urllib.parse import quote

from qaudit.report import sentences
from qaudit.report.markdown import prose
from qaudit.report.series import pictures
from qaudit.report.sparkline import sparklines
from qaudit.report.views import View

ALONG = ("trajectory", "quantized")


def series_section(view: View, pictures_at: str | None) -> str:
    """Say how the error moved, and show it."""
    said = prose(sentences.trajectory(view))
    drawn = [picture(view, name, pictures_at) for name in ALONG]
    lines = sparklines(view) if pictures_at is None else []
    block = "\n".join(["```text", *lines, "```"]) if lines else ""
    return "\n\n".join(filter(None, [said, *drawn, block]))


def picture(view: View, name: str, pictures_at: str | None) -> str:
    """Link a picture, if it can be drawn and there is a place for it."""
    alt = dict(pictures(view)).get(name)
    if alt is None or pictures_at is None:
        return ""
    return f"![{alt}]({quote(f'{pictures_at}/{name}.svg')})"
