"""What the codes of findings mean, for those that the card names."""

from __future__ import annotations

from qaudit.report.elements import EMPTY, Html, element, text
from qaudit.report.views import View
from qaudit.types.codes import CODES


def codes_part(view: View) -> Html:
    """Return a folded list of the codes that were found, with what is behind each."""
    found = sorted({f.rule for f in view.audit.findings if f.rule in CODES})
    items = [
        part
        for rule in found
        for part in (
            element("dt", element("code", text(rule)), text(f" {CODES[rule].title}")),
            element("dd", text(CODES[rule].help)),
        )
    ]
    summary = element("summary", text("What the codes mean"))
    return element("details", summary, element("dl", *items)) if items else EMPTY
