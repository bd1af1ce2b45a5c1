"""The verdict in words, and the screen that a card begins with."""

from __future__ import annotations

import itertools
import shlex
from dataclasses import replace
from typing import Any

from qaudit.report.folder import render_block, render_page, render_terminal
from qaudit.report.folder import render_card as render
from qaudit.report.markdown import put_block
from qaudit.report.verdict import (
    added,
    answer,
    label,
    next_step,
    points,
)
from qaudit.report.views import View
from qaudit.types import AuditRecord, Interval, NextStep
from tests.support import sample
from tests.support.cards import screen
from tests.support.verdicts import class_verdict, three, verdict, with_verdict


def test_the_headline_names_the_status_and_what_ships() -> None:
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
    for name, words in {**named, "w4a4kv4": "w4a4 (cache 4)"}.items():
        assert label(replace(class_verdict("4"), bit_class=name)) == words


def test_what_is_added_is_printed_on_its_side_of_the_margin() -> None:
    for error, margin, words in (
        (Interval(0.0141, 0.0118, 0.0168), 2.0, "1.4 % [1.2, 1.7]"),
        (Interval(-0.0130, -0.0156, -0.0107), 2.0, "-1.3 % [-1.6, -1.1]"),
        (Interval(0.00011, -0.00013, 0.00037), 0.5, "0.01 % [-0.01, 0.04]"),
        (Interval(0.0684, 0.0605, 0.0779), 8.0, "6.8 % [6.0, 7.8]"),
        (Interval(0.0, 0.0, 0.0), 2.0, "0 %"),
        (Interval(0.00036, -0.00002, 0.0007), 0.5, "0.04 % [0.00, 0.07]"),
        # Rounding never puts an end on the other side of the margin.
        (Interval(0.0171, 0.0140, 0.0203), 2.0, "1.71 % [1.40, 2.03]"),
    ):
        assert added(error, margin) == words


def test_the_first_screen_has_60_lines_and_500_words_and_a_readme_20_lines() -> None:
    text, lines = screen(render(with_verdict())), render_terminal(with_verdict(), 80).splitlines()
    assert (len(text.splitlines()) <= 60, len(text.split()) <= 500) == (True, True)
    assert len(lines) <= 50 and max(map(len, lines)) <= 80
    many = verdict(*(class_verdict("4") for _ in range(9)))
    block = render_block(with_verdict(many), "qaudit", has_page=True)
    assert len(put_block("", block).splitlines()) <= 20


def test_the_class_that_decides_is_in_the_table_and_what_ships_highlighted() -> None:
    lenient = (class_verdict("4"), replace(class_verdict("3"), level="warn"))
    both = verdict(class_verdict("8"), class_verdict("4"))
    for classes in (both, three(), verdict(*lenient)):  # 4 bits hold the whole; 3 bits only warn
        main = View(with_verdict(classes)).main
        assert main is not None
        assert main.bit_class == "4"
    page = render_page(with_verdict(verdict(class_verdict("4"))))
    assert page.count('class="chosen"') == 1
    assert "<code>soup</code></th>" in page.partition('class="chosen"')[2][:60]


def step(audit: AuditRecord, **more: Any) -> NextStep | None:
    settings = {"needed_documents": 240, **more}
    return next_step(audit, [class_verdict("8"), class_verdict("4", "undecided", **settings)])


def test_the_command_measures_what_is_undecided_and_nothing_else() -> None:
    audit = sample.audit()
    found = step(audit)
    assert found is not None
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


def test_card_and_terminal_end_the_verdict_in_the_command() -> None:
    audit = sample.audit()
    audit = replace(audit, protocol={**audit.protocol, "evaluation_documents_available": 101})
    found = step(audit)
    assert found is not None
    assert found.available == 101
    undecided = class_verdict("4", "undecided", needed_documents=240)
    shown = with_verdict(replace(verdict(undecided), next_step=found))
    for text in (render(shown), render_terminal(shown, 60)):
        assert found.command in text
        assert "The text has 101 documents" in text


def with_losses(**losses: float) -> View:
    """Return an audit of one subject whose losses are known."""
    audit = sample.audit()
    scores = tuple(
        replace(s, ce=Interval(loss, loss - 0.1, loss + 0.1))
        for s in audit.measurements
        if s.subject == "soup" and (loss := losses.get(s.scheme.replace("-", "_"))) is not None
    )
    return View(replace(audit, measurements=scores))


def test_the_front_is_what_nothing_with_fewer_bits_beats() -> None:
    view = with_losses(fp=2.0, bnb_int8=2.05, gptq_4bit=2.03, awq_4bit=2.02, gptq_3bit=2.2)
    found = [p.scheme + "!" * p.on_front for p in points(view)]
    assert found == ["gptq-3bit!", "awq-4bit!", "gptq-4bit", "bnb-int8", "fp!"]
    broken = with_losses(fp=2.0, gptq_4bit=float("inf"))
    assert [p.scheme for p in points(broken)] == ["fp"]
