"""One document on three surfaces."""

from __future__ import annotations

from dataclasses import replace

from qaudit.report import markdown, terminal
from qaudit.report.document import (
    CodeBlock,
    Figure,
    Lines,
    Page,
    Section,
    bullets,
    cell,
    fold,
    name_cell,
    paragraph,
    prose,
    row,
    table,
    words,
)
from qaudit.report.format import width_of
from qaudit.report.html import Blocks

LINES = Lines((prose("4 bits: `soup`."), prose("Not covered: 1 in 21.")))
ERRORS = table(
    ("subject", "gptq-4bit", "rtn-3bit"),
    (
        (name_cell("step1"), cell("0.52", value=0.52, small="[0.40, 0.64]"), "-"),
        row(
            name_cell("soup"),
            cell("0.69", value=0.69, small="[0.61, 0.77]"),
            cell("3.11", value=3.11, small="[2.90, 3.30]"),
            chosen=True,
        ),
        row(name_cell("step0"), "-", "-", minor=True),
    ),
    caption="Added loss",
)
DOCUMENT = Page(
    "An audit",
    prose("Ship `soup` at gptq-4bit."),
    (
        paragraph("64 documents."),
        Section("Errors", (ERRORS,)),
        Section("More", (fold("2 notes", bullets("one", "`two`")),), expendable=2),
        Section("Along", (Figure("course", "The course", lines=("rtn  _.:",)),), expendable=1),
        Section("Again", (CodeBlock("qaudit scan demo", "sh"),)),
    ),
)


def test_markdown_has_every_part() -> None:
    text = markdown.render(DOCUMENT, pictures_at="plots")
    assert text.startswith("## An audit\n\n**Ship `soup` at gptq-4bit.**\n\n64 documents.\n")
    assert "| `soup` | 0.69<br><sub>[0.61,&nbsp;0.77]</sub> | 3.11<br><sub>" in text
    assert "<details><summary>2 notes</summary>\n\n- one\n- `two`\n\n</details>" in text
    assert "![The course](plots/course.svg)" in text
    assert "```sh\nqaudit scan demo\n```" in text


def test_a_picture_has_a_variant_for_dark_pages_where_there_is_one() -> None:
    text = markdown.render(DOCUMENT, pictures_at="plots", has_dark=True)
    assert 'srcset="plots/course-dark.svg"' in text
    assert '<img alt="The course" src="plots/course.svg">' in text


def test_sections_are_left_out_whole_the_most_expendable_first() -> None:
    text = markdown.render(DOCUMENT, limit_nbytes=len(markdown.render(DOCUMENT).encode()) - 1)
    assert "### More" not in text
    assert text.endswith("Left out for length, see `audit.json`: More.\n")
    assert "### Along" in text


def test_the_terminal_shows_intervals_where_there_is_room() -> None:
    narrow, wide = (terminal.render(DOCUMENT, width) for width in (30, 80))
    assert "0.69 [0.61, 0.77]" in wide
    assert "[0.61" not in narrow
    assert "3.11" in narrow
    assert max(map(width_of, narrow.splitlines())) <= 30


def test_a_table_that_is_too_wide_goes_on_in_another() -> None:
    names = tuple(f"gptq-3bit:group={k}" for k in range(12))
    wide = table(("", *names), [(name_cell("\u6aa2\u67e5"), *["1.00"] * 12)])
    text = terminal.render(Page("t", words("x"), (wide,)), 60)
    assert text.count("\u6aa2\u67e5") > 1
    assert all(width_of(line) <= 60 for line in text.splitlines())


def test_lines_stay_lines_on_every_surface() -> None:
    document = Page("An audit", prose("SHIP."), (LINES,))
    assert markdown.render(document).endswith("4 bits: `soup`.<br>\nNot covered: 1 in 21.\n")
    assert terminal.render(document).endswith("\n\n4 bits: soup.\nNot covered: 1 in 21.\n")
    page = Blocks({}).block(LINES, "An audit")
    assert page == "<p>4 bits: <code>soup</code>.<br>Not covered: 1 in 21.</p>"


def test_markdown_folds_the_sections_of_a_card() -> None:
    text = markdown.render(replace(DOCUMENT, is_folded=True))
    assert "<details><summary>Errors</summary>\n\n| subject |" in text
    assert "###" not in text
    assert text.count("<details>") == text.count("</details>") == 5


def test_two_harmless_pieces_of_text_make_no_link() -> None:
    assert "](" not in markdown.render(Page("t", prose("`a`[x]``(javascript:y)`b`"), ()))
    assert "](" not in markdown.render(Page("t", (*words("[x]"), *words("(javascript:y)")), ()))


def test_a_fence_is_longer_than_any_inside() -> None:
    text = markdown.render(Page("t", words("x"), (CodeBlock("```\n# no heading"),)))
    assert "````text\n```\n# no heading\n````" in text
