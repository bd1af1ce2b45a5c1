"""Names that attack terminals, Markdown, HTML and spreadsheets, and a page as parsers read it."""

from dataclasses import replace
from html.parser import HTMLParser

from hypothesis import strategies as st
from markdown_it import MarkdownIt

from qaudit.types import Finding, Interval, Skipped, Subject
from tests.support import sample

TEXT = {"h2", "h3", "h4", "p", "strong", "em", "code", "pre", "br", "sub", "ul", "li", "img"}
TEXT |= {"picture", "source"}


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


def named(words):
    """Return a small audit in which everything that others may name is named by `words`."""
    word = iter(words * 99)
    audit = sample.many(3, 2, soups=1)
    labels = {s.label: f"{next(word)}{k}" for k, s in enumerate(audit.subjects)}
    schemes = {s: f"{next(word)}{k}" for k, s in enumerate(audit.plan.recipe.schemes[:2])}
    schemes["fp"] = "fp"

    def subject(old):
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

    def row(s):
        names = {"subject": labels[s.subject], "scheme": schemes[s.scheme]}
        return replace(s, **names, spec=next(word), notes=(next(word),))

    return replace(
        audit,
        subjects=subjects,
        plan=replace(audit.plan, recipe=recipe, subjects=subjects, notes=(next(word),)),
        measurements=tuple(map(row, audit.measurements)),
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

    def __init__(self, card):
        super().__init__()
        self.tags = set()
        self.attributes = set()
        self.comments = []
        self.rows = []
        self.feed(MarkdownIt("commonmark", {"html": True}).enable("table").render(card))

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {(tag, name, value or "") for name, value in attrs}
        if tag == "tr":
            self.rows.append(0)
        if tag in ("td", "th"):
            self.rows[-1] += 1

    def handle_comment(self, data):
        self.comments.append(data.strip())
