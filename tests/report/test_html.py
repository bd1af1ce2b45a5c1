"""The page as text: what it holds, that it says what the card says, and that nothing can get in."""

import base64
import hashlib
import math
import re
import unicodedata
from collections import Counter
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from importlib import resources

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from qaudit.report.chart import PALETTE
from qaudit.report.folder import figures, render_notebook
from qaudit.report.folder import render_page as render
from qaudit.saved.audits import from_json, to_json
from qaudit.types import Interval
from tests.support import sample
from tests.support.cards import check, held
from tests.support.diagnosed import LAST, WEIGHT, diagnosed, parts_of
from tests.support.hostile import HARSH, named, names

FILES = resources.files("qaudit.report.html")
CSS = FILES.joinpath("page.css").read_text(encoding="ascii")
JS = FILES.joinpath("page.js").read_text(encoding="ascii")
VOID = {"meta", "br"}
TAG_NAMES = """
html head meta title style body a svg defs path header h1 p code strong em nav ul li main section
h2 h3 div table caption thead tbody tr th td span figure g text use rect desc clippath
details summary dl dt dd pre sub script footer
"""
ATTRIBUTE_NAMES = """
lang charset http-equiv content name class href id width height aria-hidden aria-label
aria-labelledby tabindex role scope data-value data-series data-name viewbox title d x y transform
clip-path opacity fill fill-opacity stroke stroke-width stroke-opacity stroke-dasharray
stroke-dashoffset stroke-linecap stroke-linejoin text-anchor font-family font-size font-weight
"""
TAGS, ATTRIBUTES = set(TAG_NAMES.split()) | VOID, set(ATTRIBUTE_NAMES.split())


class Page(HTMLParser):
    """The elements of a page, its texts and its comments."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open = []
        self.found = []
        self.texts = {}
        self.comments = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def handle_comment(self, data):
        self.comments.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


def rich():
    """Return an audit with everything that a page can hold."""
    audit = held(
        check("fail"),
        check("inconclusive", scheme="awq-4bit"),
        check("fail", scheme="rtn-3bit", level="info", message="over (agreed)"),
    )
    return replace(audit, diagnostics=diagnosed((WEIGHT,), parts_of(LAST)).diagnostics)


def test_the_page_loads_nothing_and_runs_only_its_own_script():
    page = Page(render(rich()))
    assert page.texts["script"] == [JS]
    assert page.texts["style"] == [CSS]
    policy = dict(
        part.split(" ", 1)
        for meta in page.all("meta")
        if meta.get("http-equiv") == "Content-Security-Policy"
        for part in (meta["content"] or "").split("; ")
    )
    hashes = {
        name: f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for name, text in (("style-src", CSS), ("script-src", JS))
    }
    nothing = dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    assert policy == nothing | hashes
    links = [value for _, a in page.found for name in ("href", "src") if (value := a.get(name))]
    assert links
    assert all(link.startswith("#") for link in links)
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttp|eval\(|innerHTML", CSS + JS)
    assert "</" not in CSS  # neither ends its element
    assert "</script" not in JS.lower()
    assert "<!--" not in JS


def test_places_are_named_once_every_link_leads_to_one_and_the_page_is_ascii():
    audit = rich()
    text = render(audit)
    page = Page(text)
    places = Counter(a["id"] for _, a in page.found if "id" in a)
    assert set(places.values()) == {1}
    named_by = [a["aria-labelledby"] for _, a in page.found if "aria-labelledby" in a]
    links = [(a["href"] or "").removeprefix("#") for _, a in page.found if "href" in a]
    assert {*links, *named_by} <= set(places)
    assert text == render(from_json(to_json(audit)))
    assert text.isascii()
    assert "\r" not in text
    frame = Page(render_notebook(audit))
    ((tag, attributes),) = frame.found
    assert tag == "iframe"
    assert attributes["srcdoc"] == text
    assert attributes["sandbox"] == "allow-scripts"


@settings(max_examples=3, suppress_health_check=list(HealthCheck))
@given(st.lists(names, min_size=1, max_size=9))
@example(HARSH)
def test_no_name_becomes_an_element_or_an_attribute(words):
    audit = named(words)
    page = Page(render(audit, figures(audit)))
    assert {tag for tag, _ in page.found} <= TAGS
    assert {name for _, a in page.found for name in a} <= ATTRIBUTES
    assert page.comments == []
    assert page.texts["script"] == [JS]
    assert page.texts["style"] == [CSS]
    said = "".join(text for texts in page.texts.values() for text in texts if text not in (CSS, JS))
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs") and c != "\n" for c in said)


changed = partial(replace, sample.audit())


def with_second(**changes):
    first, second, *rest = sample.audit().measurements
    return changed(measurements=(first, replace(second, **changes), *rest))


INFINITE = Interval(math.inf, math.inf, math.inf)
FP = tuple(s for s in sample.audit().measurements if s.scheme == "fp")
AUDITS = {
    "nothing": changed(measurements=(), comparisons=(), findings=(), pick=None, subjects=()),
    "one": sample.many(1, 1),
    "fp": changed(measurements=FP, pick=None),
    "many schemes": sample.many(3, 12, soups=3),
    "not finite": with_second(ce=INFINITE, relative_error=None, absolute_change=None),
    "unbounded": with_second(relative_error=Interval(0.01, -math.inf, math.inf)),
    "zero": with_second(relative_error=Interval(0.0, 0.0, 0.0)),
    "not measured": changed(measurements=sample.audit().measurements[:-3]),
}


@pytest.mark.parametrize("audit", AUDITS.values(), ids=AUDITS)
def test_every_audit_has_a_page(audit):
    text = render(audit)
    assert len(Page(text).all("h1")) == 1
    assert not re.search(r'="[^"]*\b(nan|inf)\b[^"]*"', text.partition("<body>")[2])


def test_a_page_is_small_and_stays_so_for_a_long_series():
    for audit, most in ((rich(), 300_000), (sample.many(100, 4, soups=1), 500_000)):
        assert len(render(audit, figures(audit))) < most


def test_the_colours_are_those_of_the_pictures():
    blocks = CSS, CSS.partition("(prefers-color-scheme: dark)")[2]
    roots = [block.partition(":root {")[2].partition("}")[0] for block in blocks]
    light, dark = (dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", root)) for root in roots)
    assert {name: (light[name], (light | dark)[name]) for name in PALETTE} == PALETTE
