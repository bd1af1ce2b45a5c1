"""Whatever a revision, a scheme, a note or a file is called, it stays a name in every format.

The card is held to what a real Markdown reader makes of it, with HTML let through as on the Hub.
"""

from __future__ import annotations

import unicodedata
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from qaudit.report.folder import figures, render_card, render_terminal
from qaudit.report.format import in_ascii, width_of
from qaudit.saved.audits import from_json, to_json
from tests.support.hostile import HARSH, TABLES, TEXT, Page, named, names


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(names, min_size=1, max_size=12))
@example(HARSH)
def test_names_stay_names(words: list[str]) -> None:
    """On a card, where no table breaks; in a terminal, where no cursor moves; and in JSON."""
    audit = named(words)
    assert from_json(to_json(audit)) == audit
    card = render_card(audit, limit_nbytes=10**7)
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs") and c != "\n" for c in card)
    page = Page(card)
    assert page.tags <= TEXT | TABLES
    assert page.comments == ["qaudit:begin", "qaudit:end"]
    allowed = {"source": "media srcset", "img": "src alt", "code": "class", "th": "style"}
    allowed["td"] = "style"
    assert all(name in allowed.get(tag, "").split() for tag, name, _ in page.attributes)
    sources = [value for _, name, value in page.attributes if name in ("src", "srcset")]
    assert sources and all(source.startswith("plots/") for source in sources)
    assert page.rows == Page(render_card(named(["x"]), limit_nbytes=10**7)).rows
    text = render_terminal(audit)
    assert all(c.isprintable() or c == "\n" for c in text)
    commands = ("next  ", "why   ", "page  ")  # whole, to be copied
    lines = [line for line in text.splitlines() if not line.startswith(commands)]
    assert all(width_of(line) <= 80 for line in lines)
    assert in_ascii(text).splitlines()


def test_half_a_character_is_shown_as_a_mark() -> None:
    render_card(named(["\udc80"]), limit_nbytes=10**7).encode()


@pytest.mark.parametrize("words", [HARSH[:6], HARSH[6:], ["\u6aa2\u67e5\u9ede"]])
def test_pictures_hold_names_as_text(words: list[str]) -> None:
    for svg in figures(named(words)).values():
        tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(svg).iter()}
        assert not tags & {"script", "a", "image", "foreignObject"}
