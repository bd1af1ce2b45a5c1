"""An audit from a stranger: refused by the name of what is wrong, or rendered harmlessly.

Every value of an audit is replaced by what no scan writes. What the reader lets through must be
rendered by every format without an error, a control character, or markup of the stranger's.
Whatever anything is called, it stays a name; a card is held to what a Markdown reader makes of it.
"""

import copy
import json
import re
import unicodedata
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from qaudit.errors import AuditError
from qaudit.report.folder import FORMATS, figures, render_card, render_terminal
from qaudit.report.format import in_ascii, width_of
from qaudit.saved.audits import from_json, to_json
from tests.support import cards, sample
from tests.support.hostile import HARSH, TABLES, TEXT, Page, named, names
from tests.support.saved_audits import violations

SMALL = replace(sample.many(3, 2, soups=1), findings=sample.audit().findings[:2])
DOCUMENT = json.loads(to_json(SMALL))
EVIL = "x<script>alert(1)</script><img src=q onerror=z>[a](javascript:b)|`c`\x1b[31m\r\n# h\u202e"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")


def places(value, here=()):
    """Yield where every value stands; of a long list the first three are enough."""
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value[:3]) if isinstance(value, list) else inner
    for key, content in inner:
        yield (*here, key)
        yield from places(content, (*here, key))


def put(document, place, value):
    """Put a value in a place, or take it out; False where there is no such place any more."""
    holder = document
    try:
        for key in place[:-1]:
            holder = holder[key]
        if value is GONE:
            del holder[place[-1]]
        else:
            holder[place[-1]] = value
    except (LookupError, TypeError):
        return False
    return True


GONE = object()
PLACES = list(places(DOCUMENT))
VALUES = st.sampled_from(
    [GONE, None, True, -1, 0, 0.5, 2**70, 10**400, 1e308, "", "x", "\ud800", "\x00", EVIL, "../x",
     "1" * 5000, [], {}, [[]], {"a": 1}, [None]]
)  # fmt: skip


WHOLE = json.loads(to_json(cards.everything()))
PARTS = ("diagnostics", "verdict", "tasks")
WHOLE_PLACES = [place for place in places(WHOLE) if place[0] in PARTS]


def read(document):
    try:
        return from_json(json.dumps(document))
    except AuditError as error:
        assert error.message
        assert error.hint
        return None


def test_every_table_keeps_the_schema_and_comes_back_as_it_was():
    assert violations(WHOLE) == []
    assert from_json(json.dumps(WHOLE)) == cards.everything()


def edited(original, edits):
    document = copy.deepcopy(original)
    for place, value in edits:
        put(document, place, value)
    return read(document)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(PLACES), VALUES), min_size=1, max_size=3))
@example([(("pick", "scheme"), "rtn-2bit")])
@example([(("plan", "nbytes_read"), 10**400)])
@example([(("measurements", 0, "seconds"), 10**400)])
@example([(("plan", "recipe", "confidence"), 0)])
@example([(("plan", "recipe", "confidence"), 5e-324)])
@example([(("plan", "recipe", "confidence"), 1)])
def test_an_edited_audit_is_refused_in_words_or_rendered(edits):
    audit = edited(DOCUMENT, edits)
    if audit is not None:
        for form in ("md", "terminal"):
            FORMATS[form](audit).encode()


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(WHOLE_PLACES), VALUES), min_size=1, max_size=3))
@example([(("verdict", "classes", 0, "scheme"), None)])
@example([(("diagnostics", "noise", 0, "numerical"), 1e308)])
@example([(("diagnostics", "noise", 0, "top1_floor"), None)])
@example([(("diagnostics", "phases", 0, "changes", 0, "at"), None)])
@example([(("diagnostics", "phases", 0, "changes", 0, "at", "high"), 1e308)])
def test_an_edited_part_is_refused_in_words_or_rendered(edits):
    audit = edited(WHOLE, edits)
    if audit is not None:
        text = cards.whole(audit)
        assert not CONTROL.search(text)
        assert "<script>alert" not in text.replace("`x<script>", "`")


@given(st.text() | st.sampled_from(["{}", "[]", "null", "[" * 9999, "NaN", '{"schema": "1"}']))
def test_any_text_is_an_audit_or_refused_in_words(text):
    with pytest.raises(AuditError):
        from_json(text)


def strings():
    """Yield the places that hold a text, or nothing, one for each name."""
    seen = set()
    for place in PLACES:
        holder = DOCUMENT
        for key in place:
            holder = holder[key]
        name = tuple(key for key in place if isinstance(key, str))
        if (holder is None or isinstance(holder, str)) and name not in seen:
            seen.add(name)
            yield place


def test_no_text_of_a_stranger_gets_out_of_its_place():
    """All at once: whatever the reader does not refuse."""
    document, written = copy.deepcopy(DOCUMENT), 0
    for place in strings():
        trial = copy.deepcopy(document)
        put(trial, place, EVIL)
        if read(trial) is not None:
            document, written = trial, written + 1
    assert written > 60
    audit = read(document)
    shown = {form: render(audit) for form, render in FORMATS.items()}
    for form, text in shown.items():
        assert not CONTROL.search(text), form
    page = Page(shown["md"])
    assert page.tags <= TEXT | TABLES
    assert not any("javascript" in value for _, _, value in page.attributes)
    assert "<script>alert" not in shown["html"]
    assert "<img src=q" not in shown["html"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(names, min_size=1, max_size=12))
@example(HARSH)
def test_names_stay_names(words):
    """On a card, where no table breaks; in a terminal, where no cursor moves; and in JSON."""
    audit = named(words)
    assert from_json(to_json(audit)) == audit
    card = render_card(audit, limit_nbytes=10**7)
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs") and c != "\n" for c in card)
    page = Page(card)
    assert page.tags <= TEXT | TABLES
    assert page.comments == ["qaudit:begin", "qaudit:end"]
    allowed = {"source": "media srcset", "img": "src alt", "code": "class"}
    allowed |= {"th": "style", "td": "style"}
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


@pytest.mark.parametrize("words", [HARSH[:6], HARSH[6:], ["\u6aa2\u67e5\u9ede"]])
def test_pictures_hold_names_as_text(words):
    render_card(named(["\udc80"]), limit_nbytes=10**7).encode()  # half a character is a mark
    for svg in figures(named(words)).values():
        tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(svg).iter()}
        assert not tags & {"script", "a", "image", "foreignObject"}
