"""A document as one page that needs nothing else.

Figures answer to a pointer and to the keyboard, tables can be sorted, long ones fold. Style and
script are files beside this one, written into the page; its policy names them by their hashes,
so that a browser loads nothing and runs nothing else, whatever a document contains. Without the
script everything can be read, and only the controls are missing.

Characters that are not ASCII are spelled, so that no encoding can be the wrong one.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from itertools import takewhile

from qaudit.report.document import Block, Document, Section, shown_on
from qaudit.report.elements import EMPTY, Html, element, text
from qaudit.report.figures.drawing import Drawing
from qaudit.report.figures.style import page_css
from qaudit.report.figures.svg import definitions, figure
from qaudit.report.html.blocks import Blocks, line, place_of

FILE = "report.html"


def render(document: Document, figures: Iterable[Drawing] = (), footer: str = "") -> str:
    """Render a page with its figures drawn into it."""
    blocks = shown_on("html", document.blocks)
    lead = list(takewhile(lambda block: not isinstance(block, Section), blocks))
    rest = blocks[len(lead) :]
    shown = Blocks({drawing.name: figure(drawing) for drawing in figures})
    body = element(
        "body",
        element("a", text("Skip to the verdict"), class_="skip", href="#verdict"),
        definitions(),
        element(
            "header",
            element("h1", text(document.title)),
            element("p", line(document.headline), class_="verdict", id="verdict", tabindex=-1),
            shown.all(lead, document.title),
        ),
        _contents(rest),
        element("main", shown.all(rest, document.title), id="main"),
        element("footer", element("p", text(f"{footer}This page loads nothing from anywhere."))),
        element("script", _file("page.js")),
    )
    whole = f"<!DOCTYPE html>\n{element('html', _head(document.title), body, lang='en')}\n"
    return whole.encode("ascii", "xmlcharrefreplace").decode()


def frame(page: str) -> str:
    """Return a page as an element of another one, which cannot reach out of its frame."""
    source = html.escape(page)
    return (
        f'<iframe srcdoc="{source}" title="Report" sandbox="allow-scripts" '
        'allow="clipboard-write" width="100%" height="800"></iframe>'
    )


@cache
def _file(name: str) -> Html:
    """Return a file beside this one, and with the style that of figures."""
    text = resources.files(__name__).joinpath(name).read_text(encoding="ascii")
    return Html(text + page_css() if name == "page.css" else text)


def _hash(name: str) -> str:
    digest = hashlib.sha256(_file(name).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _head(title: str) -> Html:
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
        element("title", text(title)),
        element("style", _file("page.css")),
    )


def _contents(blocks: Sequence[Block]) -> Html:
    titles = [block.title for block in blocks if isinstance(block, Section)]
    links = [element("a", text(title), href=f"#{place_of(title)}") for title in titles]
    items = [element("li", link) for link in links]
    return element("nav", element("ul", *items), aria_label="Contents") if items else EMPTY
