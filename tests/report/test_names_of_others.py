"""Whatever a revision, a scheme, a note or a file is called, it stays a name in every format.

The card is held to what a real Markdown reader makes of it, with HTML let through as on the Hub.
"""

from __future__ import annotations

import unicodedata
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from qaudit.report import plots
from qaudit.report.card import render as render_card
from qaudit.report.sparkline import in_ascii
from qaudit.report.summary import render_terminal
from qaudit.report.width import width_of
from qaudit.saved.json import from_json, to_json
from qaudit.types import Audit, Finding, Interval, Skipped, Subject
from tests.support import sample

TEXT = {"h2", "h3", "p", "strong", "em", "code", "pre", "br", "sub", "ul", "li", "img"}
TABLES = {"table", "thead", "tbody", "tr", "th", "td", "details", "summary"}
HARSH = [
    "<script>alert(1)</script>",
    "a|b\\|c\\\\|d",
    "`</code>`<img src=x onerror=y>",
    "[x](javascript:y) ![z](http://q)",
    "line\nbreak\r\x1b[31m\x00\u2028",
    "<!-- qaudit:end -->",
    "```\n# heading\n- item",
    "\u202ereversed <http://example.org>",
    "../../etc/passwd",
    "&lt;b&gt; &amp; &#96;",
    "| --- | $x$ ~~y~~ <details>",
    "\\",
    "   ",
    "1. one",
]
pieces = st.sampled_from([*HARSH, "-", "+", "1.", "#", ">", "*", "_", "\t", "|", "`", "\\", "<"])
names = st.lists(pieces | st.text(max_size=8), max_size=4).map("".join)


def named(words: list[str]) -> Audit:
    """Return a small audit in which everything that others may name is named by `words`."""
    word = iter(words * 99)
    audit = sample.many(3, 2, soups=1)
    labels = {s.label: f"{next(word)}{k}" for k, s in enumerate(audit.subjects)}
    schemes = {s: f"{next(word)}{k}" for k, s in enumerate(audit.plan.recipe.schemes[:2])}
    schemes["fp"] = "fp"

    def subject(old: Subject) -> Subject:
        members = tuple(
            (replace(c, label=labels[c.label], stage=next(word), family=next(word)), weight)
            for c, weight in old.members
        )
        return Subject(labels[old.label], members, old.merge and next(word))

    finding = Finding(
        rule="QA001",
        level="error",
        subject=labels["step0"],
        scheme=schemes["rtn-4bit"],
        message=f"`{next(word)}` costs {next(word)}",
        hint=next(word),
        interval=Interval(0.03, 0.02, 0.04),
        margin=0.01,
    )
    assert audit.pick is not None
    subjects = tuple(map(subject, audit.subjects))
    recipe = replace(audit.plan.recipe, targets=(next(word), next(word)), soups=(next(word),))
    return replace(
        audit,
        subjects=subjects,
        plan=replace(audit.plan, recipe=recipe, subjects=subjects, notes=(next(word),)),
        measurements=tuple(
            replace(
                s,
                subject=labels[s.subject],
                scheme=schemes[s.scheme],
                spec=next(word),
                notes=(next(word),),
            )
            for s in audit.measurements
        ),
        comparisons=tuple(
            replace(c, a=labels[c.a], b=labels[c.b], scheme=schemes[c.scheme])
            for c in audit.comparisons
        ),
        findings=(finding, replace(finding, level="info"), replace(finding, rule="QA005")),
        pick=replace(
            audit.pick,
            subject=labels[audit.pick.subject],
            runner_up=labels["step0"],
            scheme=schemes["rtn-4bit"],
            changes=(f"without soups it would be `{next(word)}`",),
        ),
        skipped=(Skipped(next(word), next(word), next(word)),),
        environment={
            "platform": next(word),
            next(word): next(word),
            "libraries": {"a": next(word)},
        },
        protocol={"bos": next(word), "sources": [[next(word), next(word)]]},
    )


class Page(HTMLParser):
    """What a reader of Markdown made of a card."""

    def __init__(self, card: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str, str]] = set()
        self.comments: list[str] = []
        self.rows: list[int] = []
        self.feed(MarkdownIt("commonmark", {"html": True}).enable("table").render(card))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {(tag, name, value or "") for name, value in attrs}
        if tag == "tr":
            self.rows.append(0)
        if tag in ("td", "th"):
            self.rows[-1] += 1

    def handle_comment(self, data: str) -> None:
        self.comments.append(data.strip())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(names, min_size=1, max_size=12))
@example(HARSH)
@example(["\udc80"])
def test_no_name_becomes_markup_in_a_card(words: list[str]) -> None:
    card = render_card(named(words), limit_nbytes=10**7)
    card.encode()
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs") and c != "\n" for c in card)
    page = Page(card)
    assert page.tags <= TEXT | TABLES
    assert page.comments == ["qaudit:begin", "qaudit:end"]
    allowed = {("img", "src"), ("img", "alt"), ("code", "class"), ("th", "style"), ("td", "style")}
    assert {(tag, name) for tag, name, _ in page.attributes} <= allowed
    sources = [value for tag, name, value in page.attributes if name == "src"]
    assert sources
    assert all(source.startswith("plots/") for source in sources)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(names, min_size=1, max_size=12))
@example(HARSH)
def test_no_name_breaks_a_table(words: list[str]) -> None:
    plain, strange = (
        Page(render_card(named(given), limit_nbytes=10**7)).rows for given in (["x"], words)
    )
    assert strange == plain


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(names, min_size=1, max_size=12))
@example(HARSH)
def test_no_name_moves_a_cursor_or_leaves_the_columns(words: list[str]) -> None:
    text = render_terminal(named(words))
    assert all(c.isprintable() or c == "\n" for c in text)
    assert all(width_of(line) <= 80 for line in text.splitlines())
    assert in_ascii(text).splitlines()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(names, min_size=1, max_size=12))
@example(HARSH)
def test_every_name_comes_back_from_json(words: list[str]) -> None:
    audit = named(words)
    assert from_json(to_json(audit)) == audit


@pytest.mark.parametrize("words", [HARSH[:6], HARSH[6:], ["\u6aa2\u67e5\u9ede"]])
def test_pictures_hold_names_as_text(words: list[str], tmp_path: Path) -> None:
    for path in plots.draw(named(words), tmp_path):
        if path.suffix == ".svg":
            tree = ElementTree.fromstring(path.read_text(encoding="utf-8"))
            tags = {element.tag.rpartition("}")[2] for element in tree.iter()}
            assert not tags & {"script", "a", "image", "foreignObject"}
