"""`report.html`: the card as one page that needs nothing else, a pure function of the audit.

It says what the card says, made of the card's own sections; what a page can do better is made
anew from the same numbers: a table that can be sorted, and figures that answer to a pointer and
to the keyboard. Style and script are files beside this one, written into the page; its policy
names them by their hashes, so that a browser loads nothing and runs nothing else, whatever an
audit holds. Without the script everything can be read, and only the controls are missing.

Characters that are not ASCII are spelled, so that no encoding can be the wrong one.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources

from qaudit.report.card import ERRORS, EVERY_SUBJECT, FINDINGS, PICTURES, sections, title
from qaudit.report.card.section import Section
from qaudit.report.elements import EMPTY, Html, element, joined, text
from qaudit.report.figures import figures
from qaudit.report.figures.style import page_css
from qaudit.report.figures.svg import definitions, figure
from qaudit.report.html.errors import errors_part
from qaudit.report.html.findings import codes_part
from qaudit.report.html.reading import page_part, words
from qaudit.report.markdown import prose
from qaudit.report.verdict import standing, verdict
from qaudit.report.views import View
from qaudit.types import Audit

FILE = "report.html"


def render(audit: Audit) -> str:
    """Render the page."""
    view = View(audit)
    shown = [s for s in sections(view, PICTURES) if s.body and s.title != EVERY_SUBJECT]
    drawn = {drawing.name: figure(drawing) for drawing in figures(audit)}
    parts = [_part(view, section, drawn) for section in shown]
    body = element(
        "body",
        element("a", text("Skip to the verdict"), class_="skip", href="#verdict"),
        definitions(),
        _header(view),
        _contents(shown),
        element("main", *parts, id="main"),
        _footer(audit),
        element("script", _file("page.js")),
    )
    page = f"<!DOCTYPE html>\n{element('html', _head(view), body, lang='en')}\n"
    return page.encode("ascii", "xmlcharrefreplace").decode()


@cache
def _file(name: str) -> Html:
    """Return a file beside this one, and with the style that of figures."""
    text = resources.files(__name__).joinpath(name).read_text(encoding="ascii")
    return Html(text + page_css() if name == "page.css" else text)


def _hash(name: str) -> str:
    digest = hashlib.sha256(_file(name).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _head(view: View) -> Html:
    policy = (
        f"default-src 'none'; style-src {_hash('page.css')}; script-src {_hash('page.js')}; "
        "base-uri 'none'; form-action 'none'"
    )
    size = "width=device-width, initial-scale=1"
    return element(
        "head",
        element("meta", charset="utf-8"),
        # Apostrophes need no spelling inside of quotes, and people read this line.
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        element("meta", name="viewport", content=size),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", text(title(view))),
        element("style", _file("page.css")),
    )


def _header(view: View) -> Html:
    """Return title, verdict, and what it stands on."""
    stands = joined((words(prose(sentence)) for sentence in standing(view)), " ")
    return element(
        "header",
        element("h1", text(title(view))),
        element("p", words(prose(verdict(view))), class_="verdict", id="verdict", tabindex=-1),
        element("p", stands) if stands else EMPTY,
    )


def _contents(shown: list[Section]) -> Html:
    links = [element("a", text(s.title), href=f"#{_place(s.title)}") for s in shown]
    items = [element("li", link) for link in links]
    return element("nav", element("ul", *items), aria_label="Contents") if items else EMPTY


def _part(view: View, section: Section, drawn: Mapping[str, Html]) -> Html:
    """Return a section: read from the card, or made anew where the page has more."""
    place = _place(section.title)
    if section.title == ERRORS:
        body = errors_part(view)
    else:
        body = page_part(section.body, section.title, drawn)
    if section.title == FINDINGS:
        body = joined([body, codes_part(view)])
    heading = element("h2", text(section.title), id=f"{place}-title")
    return element("section", heading, body, id=place, aria_labelledby=f"{place}-title")


def _place(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _footer(audit: Audit) -> Html:
    version = f" {audit.qaudit}" if audit.qaudit else ""
    said = f"Drawn from audit.json (schema {audit.schema}) of qaudit{version}. "
    return element("footer", element("p", text(f"{said}This page loads nothing from anywhere.")))
