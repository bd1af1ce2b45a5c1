"""The card: its cells, its verdict in words, its size and the command that it ends in."""

import itertools
import re
import shlex
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest

from qaudit.report.document import code, name_cell, paragraph, prose, words
from qaudit.report.document import table as table_of
from qaudit.report.folder import LIMIT_NBYTES, render_block, render_page, render_terminal
from qaudit.report.folder import render_card as render
from qaudit.report.format import NOT_FINITE, count, percent, plural, size, spread
from qaudit.report.losses import shown_rows
from qaudit.report.markdown import END, put_block, render_blocks
from qaudit.report.sections import PERMISSIONS, command
from qaudit.report.series import disagree, soup_reading
from qaudit.report.verdict import added, answer, label, measured, next_step, points
from qaudit.report.views import SoupRow, View
from qaudit.settings import settings_of
from qaudit.types import Comparison, Interval, Recipe
from tests.support import sample
from tests.support.cards import WHY, screen, section, table, titles, whole
from tests.support.verdicts import class_verdict, three, verdict, with_verdict


# ------------------------------------------------------------------ tables
def test_every_cell_is_the_score_it_stands_for():
    view = View(sample.audit())
    head, *rows = table(section(whole(sample.audit()), "Added loss"))
    assert head == ["subject", "loss, full precision", *sample.SCHEMES]
    assert [row[0] for row in rows] == [f"`{s.label}`" for s in sample.series()]
    for row in rows:
        for scheme, text in zip(head[2:], row[2:], strict=True):
            error = view.error(row[0].strip("`"), scheme)
            numbers = [float(x) for x in re.findall(r"-?[0-9.]+", text.replace("*", ""))]
            tolerance = 0.06 * 100 * (error.high - error.low)  # two digits of the half-width
            expected = [100 * error.estimate, 100 * error.low, 100 * error.high]
            assert numbers == pytest.approx(expected, abs=tolerance)
    cells = len(sample.SCHEMES) * len(sample.series())
    said = f"for all {cells} to hold at once, read them 1.9 times as wide"
    assert said in whole(sample.audit())
    assert "hold at once" not in whole(sample.audit(documents=8))


SAID = {
    "a_better a_better": "better, and loses less",
    "a_better b_better": "better, although it loses more",
    "b_better a_better": "worse, although it loses less",
    "b_better b_better": "worse, and loses more",
    "a_better inconclusive": "better; what it loses is inconclusive",
    "inconclusive a_better": "no detectable difference; loses less",
    "inconclusive inconclusive": "indistinguishable",
    "equivalent equivalent": "as good; loses as much",
}


def test_a_soup_is_read_by_two_questions():
    for verdicts, reading in SAID.items():
        pair = [
            Comparison(kind, "nats per token", "gptq-4bit", "a", "b", Interval(0, 0, 0), said, 64)
            for kind, said in zip(
                ("outright", "difference_of_differences"), verdicts.split(), strict=True
            )
        ]
        row = SoupRow("gptq-4bit", "b", *pair, relative=None, is_best=True)
        assert soup_reading(row) == reading
        assert disagree(row) == ("although" in reading)


def test_names_and_sentences_are_escaped_and_none_ends_a_cell():
    for runs, text in (
        (code("a`b"), "`a'b`"),
        (code(""), "`?`"),
        (words("<b> & *c* [d](e)"), "&lt;b> &amp; \\*c\\* [d]\\(e)"),
        (prose("use `x_y` and *z*"), "use `x_y` and \\*z\\*"),
        (prose("an odd ` tick"), "an odd \\` tick"),
    ):
        assert render_blocks([paragraph(runs)]) == text
    names = {"a-b": "`a-b`", "a|b": "<code>a&#124;b</code>", "a\\b": "<code>a&#92;b</code>"}
    for name, text in names.items():
        shown = render_blocks([table_of(["subject"], [(name_cell(name),)])])
        assert shown.splitlines()[-1] == f"| {text} |"


def test_the_card_is_short_and_the_page_has_the_rest():
    text = render(with_verdict())
    assert titles(text) == [WHY, "Not measured"]
    assert len(text.partition("<details>")[2].split()) < 600
    assert "Every subject, scheme and number is on the page, `report.html`." in text
    assert text.count("<picture>") == 1
    assert "qaudit scan demo" in text.partition("<details>")[0]
    most = len(text.encode()) - 1  # whole sections are left out
    text = render(with_verdict(), limit_nbytes=most)
    assert len(text.encode()) <= most
    assert titles(text) == [WHY]
    assert "Left out for length, see `report.html`: Not measured." in text
    assert text.endswith(END + "\n")
    text = render(sample.audit(), limit_nbytes=1)
    assert measured(View(sample.audit())) in text
    assert titles(text) == []

    for large in (
        sample.many(200, 8, soups=12, name="revision-of-a-long-name-{}"),
        sample.many(40, 60, soups=3, name="revision-of-a-long-name-{}"),
    ):
        text = render(large)
        assert len(text.encode()) <= LIMIT_NBYTES
        assert text.count("<details>") == text.count("</details>")


# ------------------------------------------------------------------ reproduce


def test_the_command_asks_for_the_same_recipe():
    recipe = Recipe(
        targets=("my models", "other"),
        schemes=("rtn-4bit", "gptq-3bit:act_order=true"),
        soups=("stage2-*", "a+b"),
        checkpoints=("step*", "stage2@.."),
        bits=("4", "3"),
        tasks=("paper-a", "arc"),
        shipped=("x", "y"),
        last=9,
        context=512,
        packed=True,
        calibration_seed=3,
        evaluation="text.jsonl",
    )
    words = shlex.split(command(recipe, {"pickle", "remote_code"}))
    assert words[:4] == ["qaudit", "scan", "my models", "other"]
    options = {}
    for option, value in pairwise(words):
        options.setdefault(option, []).append(value)
    assert (
        options.items()
        >= {
            "--schemes": ["rtn-4bit,gptq-3bit:act_order=true"],
            "--soup": ["stage2-*", "a+b"],
            "--shipped": ["x", "y"],
            "--checkpoints": ["step*", "stage2@.."],
            "--bits": ["4,3"],
            "--tasks": ["paper-a,arc"],
            "--evaluation": ["text.jsonl"],
        }.items()
    )
    assert {"calibration_seed=3", "context=512", "packed=true", "last=9"} <= {*words}
    assert words[-2:] == ["--allow-pickle", "--trust-remote-code"]
    assert "--device" not in words  # defaults are not repeated


def test_every_option_of_the_command_exists():
    from typer.main import get_command

    from qaudit.cli.app import app

    known = {opt for p in get_command(app).commands["scan"].params for opt in p.opts}
    left = {"targets", "schemes", "confidence", "schedule"}
    more = {
        one.name: ("x",) if isinstance(one.default, tuple) else 3
        for one in fields(Recipe)
        if one.name not in left
    }
    odd = Recipe(targets=("a",), schemes=("rtn-4bit",), **more)
    words = shlex.split(command(odd, set(PERMISSIONS)))
    assert {word for word in words if "--" in word} <= known
    keys = {word.partition("=")[0] for word in words if "=" in word}
    assert len(keys) > 12
    assert keys <= settings_of(Recipe).keys()


def test_numbers_are_printed_for_people():
    for interval, text in (
        (Interval(0.00921, 0.0071, 0.0113), "0.92 [0.71, 1.13]"),
        (Interval(0.129, 0.108, 0.158), "12.9 [10.8, 15.8]"),
        (Interval(0.0, 0.0, 0.0), "0"),
        (Interval(-0.00001, -0.002, 0.002), "0.00 [-0.20, 0.20]"),
        (Interval(0.01, -np.inf, np.inf), "1.000 [-inf, inf]"),
        (Interval(np.inf, -np.inf, np.inf), NOT_FINITE),
    ):
        assert percent(interval) == text
    assert spread(Interval(1.0, 0.9, 1.1), unit=" nats") == "1.00 nats [0.90, 1.10]"
    assert [size(n) for n in (900, 2_500_000, 3_000_000_000)] == ["900 bytes", "2.5 MB", "3.0 GB"]
    assert [count(n) for n in (12_000, 1_180_000, 7_000_000_000)] == ["12,000", "1.18M", "7B"]
    assert [plural(n, "document") for n in (1, 2)] == ["1 document", "2 documents"]


def test_of_a_long_series_telling_rows_in_order_and_spread_over_it_are_shown():
    view = View(sample.many(100, 2))
    labels = [s.label for s in shown_rows(view)]
    assert labels == [s.label for s in view.subjects if s.label in labels]
    gaps = [int(b[4:]) - int(a[4:]) for a, b in pairwise(labels)]
    assert max(gaps) < 20
    few = View(sample.many(16, 1))
    assert shown_rows(few) == few.subjects
    audit = sample.many(200, 4, soups=2)
    shown = {subject.label for subject in shown_rows(View(audit))}
    assert len(shown) == 16
    assert {audit.pick.subject, audit.pick.runner_up, "step199", "step0"} <= shown
    assert render_page(audit).count('class="more"') == 202 - 16


def test_the_headline_names_the_status_and_what_ships():
    assert answer(three()) == (
        "UNDECIDED by the policy `release`: ship `soup` at bnb-int8; hold 3 bits; 4 bits undecided."
    )
    both = verdict(class_verdict("8"), class_verdict("4"))
    assert answer(both) == (
        "SHIP by the policy `release`: ship `soup` at bnb-int8 and `soup` at gptq-4bit."
    )
    warned = replace(verdict(class_verdict("4", level="warn", status="hold")), status="ship")
    assert answer(warned) == "WARNINGS ONLY by the policy `release`: hold 4 bits."
    beside = replace(warned, classes=(class_verdict("8"), *warned.classes))
    assert answer(beside).startswith("SHIP by the policy")
    named = {"4": "4 bits", "1": "1 bit", "w4a4": "w4a4", "4kv8": "4 bits (cache 8)"}
    for name, said in {**named, "w4a4kv4": "w4a4 (cache 4)"}.items():
        assert label(replace(class_verdict("4"), bit_class=name)) == said


def test_what_is_added_is_printed_on_its_side_of_the_margin():
    for error, margin, said in (
        (Interval(0.0141, 0.0118, 0.0168), 2.0, "1.4 % [1.2, 1.7]"),
        (Interval(-0.0130, -0.0156, -0.0107), 2.0, "-1.3 % [-1.6, -1.1]"),
        (Interval(0.00011, -0.00013, 0.00037), 0.5, "0.01 % [-0.01, 0.04]"),
        (Interval(0.0684, 0.0605, 0.0779), 8.0, "6.8 % [6.0, 7.8]"),
        (Interval(0.0, 0.0, 0.0), 2.0, "0 %"),
        (Interval(0.00036, -0.00002, 0.0007), 0.5, "0.04 % [0.00, 0.07]"),
        # Rounding never puts an end on the other side of the margin.
        (Interval(0.0171, 0.0140, 0.0203), 2.0, "1.71 % [1.40, 2.03]"),
    ):
        assert added(error, margin) == said


def test_the_first_screen_has_60_lines_and_500_words_and_a_readme_20_lines():
    text, lines = screen(render(with_verdict())), render_terminal(with_verdict(), 80).splitlines()
    assert (len(text.splitlines()) <= 60, len(text.split()) <= 500) == (True, True)
    assert len(lines) <= 50 and max(map(len, lines)) <= 80
    many = verdict(*(class_verdict("4") for _ in range(9)))
    block = render_block(with_verdict(many), "qaudit", has_page=True)
    assert len(put_block("", block).splitlines()) <= 20


def test_the_class_that_decides_is_in_the_table_and_what_ships_highlighted():
    lenient = (class_verdict("4"), replace(class_verdict("3"), level="warn"))
    both = verdict(class_verdict("8"), class_verdict("4"))
    for classes in (both, three(), verdict(*lenient)):  # 4 bits hold the whole; 3 bits only warn
        main = View(with_verdict(classes)).main
        assert main.bit_class == "4"
    page = render_page(with_verdict(verdict(class_verdict("4"))))
    assert page.count('class="chosen"') == 1
    assert "<code>soup</code></th>" in page.partition('class="chosen"')[2][:60]


def step(audit, **more):
    settings = {"needed_documents": 240, **more}
    return next_step(audit, [class_verdict("8"), class_verdict("4", "undecided", **settings)])


def test_the_command_measures_what_is_undecided_and_nothing_else():
    audit = sample.audit()
    found = step(audit)
    words = shlex.split(found.command)
    options = dict(itertools.pairwise(words))
    schemes = options["--schemes"].split(",")
    assert words[:2] == ["qaudit", "scan"]
    assert all("4bit" in name or name == "bnb-nf4" for name in schemes)
    assert options["--bits"] == "4"
    assert "evaluation_documents=240" in words
    assert options["--out"].endswith("-4bit")
    undecided = class_verdict("4", "undecided", needed_documents=240)
    found = next_step(audit, [undecided, replace(undecided, bit_class="w4a4")])
    assert found is not None and found.command.endswith("-4bit-w4a4")
    assert step(audit, needed_documents=None) is None
    assert next_step(audit, [class_verdict("4")]) is None


def test_card_and_terminal_end_the_verdict_in_the_command():
    audit = sample.audit()
    audit = replace(audit, protocol={**audit.protocol, "evaluation_documents_available": 101})
    found = step(audit)
    assert found.available == 101
    undecided = class_verdict("4", "undecided", needed_documents=240)
    shown = with_verdict(replace(verdict(undecided), next_step=found))
    for text in (render(shown), render_terminal(shown, 60)):
        assert found.command in text
        assert "The text has 101 documents" in text


def with_losses(**losses):
    """Return an audit of one subject whose losses are known."""
    audit = sample.audit()
    scores = tuple(
        replace(s, ce=Interval(loss, loss - 0.1, loss + 0.1))
        for s in audit.measurements
        if s.subject == "soup" and (loss := losses.get(s.scheme.replace("-", "_"))) is not None
    )
    return View(replace(audit, measurements=scores))


def test_the_front_is_what_nothing_with_fewer_bits_beats():
    view = with_losses(fp=2.0, bnb_int8=2.05, gptq_4bit=2.03, awq_4bit=2.02, gptq_3bit=2.2)
    found = [p.scheme + "!" * p.on_front for p in points(view)]
    assert found == ["gptq-3bit!", "awq-4bit!", "gptq-4bit", "bnb-int8", "fp!"]
    broken = with_losses(fp=2.0, gptq_4bit=float("inf"))
    assert [p.scheme for p in points(broken)] == ["fp"]
