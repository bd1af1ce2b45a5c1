"""The verdict in words, and the screen that a card begins with."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from qaudit.report.card import render, render_block, render_page, render_terminal
from qaudit.report.markdown import BEGIN, put_block
from qaudit.report.verdict import answer, headline, label
from qaudit.report.views import NEEDS, View
from qaudit.types import Finding, Interval
from tests.support import sample
from tests.support.cards import SOUP, WHY, screen, section, titles, whole
from tests.support.verdicts import RIVAL, class_verdict, three, verdict, with_verdict


def notice(**more: Any) -> str:
    """Return the row of a class in the banner of a card."""
    return next(
        line
        for line in whole(with_verdict(verdict(class_verdict("4", **more)))).splitlines()
        if line.startswith("| 4 bits")
    )


# ------------------------------------------------------------------ sentences


def test_the_headline_names_the_status_and_what_ships() -> None:
    assert answer(three()) == (
        "UNDECIDED by the policy `release`: ship `soup` at bnb-int8; hold 3 bits; 4 bits undecided."
    )
    both = verdict(class_verdict("8"), class_verdict("4"))
    assert answer(both) == (
        "SHIP by the policy `release`: ship `soup` at bnb-int8 and `soup` at gptq-4bit."
    )


def test_a_policy_that_only_warns_ships_nothing() -> None:
    warned = replace(verdict(class_verdict("4", level="warn", status="hold")), status="ship")
    assert answer(warned) == "WARNINGS ONLY by the policy `release`: hold 4 bits."
    beside = replace(warned, classes=(class_verdict("8"), *warned.classes))
    assert answer(beside).startswith("SHIP by the policy")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("4", "4 bits"),
        ("1", "1 bit"),
        ("w4a4", "w4a4"),
        ("4kv8", "4 bits (cache 8)"),
        ("w4a4kv4", "w4a4 (cache 4)"),
    ],
)
def test_a_class_is_named_with_its_cache(name: str, words: str) -> None:
    assert label(replace(class_verdict("4"), bit_class=name)) == words


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Interval(0.0130, 0.0107, 0.0156), "adds 1.30 % [1.07, 1.56] to its loss"),
        (Interval(-0.0130, -0.0156, -0.0107), "takes 1.30 % [1.07, 1.56] off its loss"),
        (Interval(0.001, -0.002, 0.004), "no detectable change (0.10 % [-0.20, 0.40]) to its loss"),
        (Interval(0.0, 0.0, 0.0), "changes nothing in its loss"),
    ],
)
def test_a_cost_has_a_direction_where_its_interval_has_one(error: Interval, words: str) -> None:
    assert f"| {words}; the margin is 2 %<br>" in notice(relative_error=error)


def test_a_margin_of_another_metric_is_not_set_beside_the_added_loss() -> None:
    assert "the margin is 2 %" in notice(metric="relative_error")
    assert "the margin" not in notice(metric="top1_agreement")


@pytest.mark.parametrize(
    ("lead", "words"),
    [
        (Interval(-0.05, -0.07, -0.03), f"ahead of `{RIVAL}`"),
        (Interval(-0.01, -0.07, 0.03), f"no detectable difference from `{RIVAL}`"),
    ],
)
def test_a_lead_that_noise_explains_is_none(lead: Interval, words: str) -> None:
    assert f"<br>{words}" in notice(lead=lead)


def test_a_rival_at_another_scheme_is_named_with_it() -> None:
    assert f"ahead of `{RIVAL}` at awq-4bit" in notice(runner_up_scheme="awq-4bit")


def test_a_breach_and_what_would_decide_are_in_the_banner() -> None:
    text = screen(whole(with_verdict()))
    assert "<br>gptq-3bit raises the loss of `soup` by 6.5 % and the margin is 5 %<br>" in text
    assert "<br>about 322 documents, where 64 were measured<br>" in text
    assert "<br>the policy only warns about it |" in text


def test_nothing_of_a_class_measured_is_said() -> None:
    row = notice(
        status="undecided", subject=None, scheme=None, relative_error=None, lead=None,
        needs=("a scheme of 4 bits",),
    )  # fmt: skip
    assert row == "| 4 bits: **UNDECIDED**<br>not measured | a scheme of 4 bits |"


def test_divergence_is_not_a_rank_near_zero() -> None:
    near = class_verdict("4", kl=Interval(0.00039, 0.00037, 0.00041))
    text = section(whole(with_verdict(verdict(near))), WHY)
    assert "Below 0.005 nats KL divergence does not rank models" in text
    assert "Neither tasks nor rollouts were measured" in text
    far = class_verdict("4", kl=Interval(0.0368, 0.0346, 0.0393))
    assert "does not rank" not in section(whole(with_verdict(verdict(far))), WHY)


def test_losing_least_and_being_best_are_told_apart() -> None:
    assert "`stage1-step500` loses least to gptq-4bit" in section(whole(with_verdict()), WHY)


def test_every_surface_has_the_same_headline_and_statuses() -> None:
    audit = with_verdict()
    bare = headline(View(audit)).replace("`", "")
    texts = [render(audit), render_terminal(audit, 200), render_block(audit, "q", has_page=True)]
    texts.append(re.sub(r"<[^>]*>", "", render_page(audit)))
    for text in texts:
        flat = " ".join(text.replace("`", "").replace("&#160;", " ").split())
        assert bare in flat
        assert all(word in flat for word in ("SHIP", "UNDECIDED", "HOLD"))


def test_an_audit_without_a_verdict_shows_its_pick_undecided() -> None:
    audit = sample.audit()
    assert audit.verdict is None
    assert audit.pick is not None
    text = screen(whole(audit))
    assert f"| {audit.pick.scheme}: **UNDECIDED**<br>`{audit.pick.subject}` at" in text
    assert NEEDS in text


def test_nothing_quantized_has_no_verdict() -> None:
    scores = tuple(s for s in sample.audit().measurements if s.scheme == "fp")
    bare = replace(sample.audit(), measurements=scores, pick=None)
    assert "No quantized loss was measured: no verdict." in whole(bare)


# ------------------------------------------------------------------ one screen


def test_the_first_screen_has_60_lines_and_500_words() -> None:
    text = screen(render(with_verdict()))
    assert len(text.splitlines()) <= 60
    assert len(text.split()) <= 500
    assert text.count("<picture>") == 1
    assert titles(render(with_verdict()))[0] == WHY


def test_the_class_that_decides_is_in_the_table() -> None:
    view = View(with_verdict(verdict(class_verdict("8"), class_verdict("4"))))
    assert view.main is not None
    assert view.main.bit_class == "4"
    view = View(with_verdict(three()))
    assert view.main is not None
    assert view.main.bit_class == "4"  # it holds the whole; 8 bits ship
    lenient = verdict(class_verdict("4"), replace(class_verdict("3"), level="warn"))
    view = View(with_verdict(lenient))
    assert view.main is not None
    assert view.main.bit_class == "4"  # of 3 bits the policy only warns


def test_the_page_highlights_what_ships() -> None:
    page = render_page(with_verdict(verdict(class_verdict("4"))))
    assert page.count('class="chosen"') == 1
    assert "<code>soup</code></th>" in page.partition('class="chosen"')[2][:60]


def test_a_readme_gets_20_lines_and_links() -> None:
    many = verdict(*(class_verdict("4") for _ in range(9)))
    block = render_block(with_verdict(many), "qaudit", has_page=True)
    assert len(put_block("", block).splitlines()) <= 20
    assert block.startswith(BEGIN)
    for file in ("card.md", "report.html", "audit.json"):
        assert f"(qaudit/{file})" in block
    assert "report.html" not in render_block(with_verdict(), "qaudit", has_page=False)


def test_the_terminal_shows_one_screen() -> None:
    lines = render_terminal(with_verdict(), 80).splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 80
    assert WHY not in lines


def test_damage_that_one_document_carries_is_on_the_first_screen() -> None:
    rare = Finding(
        rule="QA029",
        level="warn",
        subject=SOUP,
        scheme="gptq-4bit",
        message="1 of 64 documents carries 41 % of what gptq-4bit adds to the loss of `soup`",
        hint="",
    )
    audit = with_verdict()
    shown = replace(audit, findings=(rare, replace(rare, scheme="rtn-4bit", message="elsewhere")))
    text = screen(whole(shown))
    assert "1 of 64 documents carries 41 % of what gptq-4bit adds to the loss of `soup`." in text
    assert "elsewhere" not in text


def test_the_noise_section_says_what_the_documents_detect() -> None:
    audit = with_verdict()
    plan = replace(audit.plan, detectable_relative_error=0.0044)
    text = section(whole(replace(audit, plan=plan)), "Noise")
    assert "these documents detect an added loss of 0.44 %" in text
    assert "In four of five cases" not in section(whole(audit), "Noise")
