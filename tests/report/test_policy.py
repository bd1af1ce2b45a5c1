"""What a policy says on the card: breaches and ignores; and cards of large audits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from qaudit.report.folder import LIMIT_NBYTES, render_page
from qaudit.report.folder import render_card as render
from qaudit.report.losses import shown_rows
from qaudit.report.verdict import measured
from qaudit.report.views import View
from tests.support import sample
from tests.support.cards import STAGE_END, check, held, section, titles, whole


def test_breaches_are_listed_before_doubts_and_passes_are_only_counted() -> None:
    audit = held(
        check("pass", STAGE_END),
        check("inconclusive", message="a doubt", hint="needs about 200 documents to decide"),
        check("fail", message="a breach"),
    )
    lines = section(whole(audit), "Policy checks").splitlines()
    assert lines == [
        "- **QA001** a breach.",
        "- **QA001** a doubt. *needs about 200 documents to decide.*",
    ]
    assert "**QA001**" not in section(whole(audit), "Findings")


def test_an_ignored_breach_is_listed_as_ignored() -> None:
    ignored = check("fail", level="info", message="over the margin (agreed until the next release)")
    audit = held(ignored)
    assert "Policy checks" not in whole(audit)
    assert "agreed until the next release" in section(whole(audit), "Ignores applied")


# ------------------------------------------------------------------ long series


def test_rows_are_in_order_and_spread_over_the_series() -> None:
    view = View(sample.many(100, 2))
    labels = [s.label for s in shown_rows(view)]
    assert labels == [s.label for s in view.subjects if s.label in labels]
    gaps = [int(b[4:]) - int(a[4:]) for a, b in pairwise(labels)]
    assert max(gaps) < 20
    few = View(sample.many(16, 1))
    assert shown_rows(few) == few.subjects


def test_of_a_long_series_the_telling_rows_are_shown() -> None:
    audit = sample.many(200, 4, soups=2)
    shown = {subject.label for subject in shown_rows(View(audit))}
    assert len(shown) == 16
    assert audit.pick is not None
    assert {audit.pick.subject, audit.pick.runner_up, "step199", "step0"} <= shown
    assert render_page(audit).count('class="more"') == 202 - 16


@pytest.mark.parametrize(("subjects", "schemes", "soups"), [(200, 8, 12), (40, 60, 3)])
def test_a_large_audit_keeps_within_the_limit(subjects: int, schemes: int, soups: int) -> None:
    text = render(sample.many(subjects, schemes, soups=soups, name="revision-of-a-long-name-{}"))
    assert len(text.encode()) <= LIMIT_NBYTES
    assert text.count("<details>") == text.count("</details>")


def test_a_card_without_room_for_anything_keeps_its_verdict() -> None:
    text = render(sample.audit(), limit_nbytes=1)
    assert measured(View(sample.audit())) in text
    assert titles(text) == []


# ------------------------------------------------------------------ soups, pictures, reproduction


def test_every_soup_is_shown_the_others_folded() -> None:
    text = section(whole(sample.many(6, 2, soups=5)), "Soup against ingredients")
    assert text.count(" is the mean of ") == 5
    assert text.count("<summary>stepsoup") == 4


def test_pictures_are_linked_where_they_are_or_replaced_by_lines() -> None:
    audit = sample.audit()
    assert 'srcset="plots/trajectory-dark.svg"' in render(audit)
    assert ' src="plots/trajectory.svg">' in render(audit)
    assert "](plots/trajectory.svg)" in render(audit, has_dark=False)
    assert ' src="a%20b/plots/trajectory.svg">' in render(audit, pictures_at="a b/plots")
    bare = render(audit, pictures_at=None)
    assert "<picture>" not in bare
    assert "```text\nAlong the series" in bare


def test_a_lock_reproduces_what_came_from_the_hub() -> None:
    from qaudit.types import Traffic

    audit = sample.audit()
    assert "lock" not in section(whole(audit), "Reproduce")
    traffic = Traffic(1, 1, 1, 1)
    text = section(whole(replace(audit, plan=replace(audit.plan, traffic=traffic))), "Reproduce")
    assert "\nqaudit scan plan.json\n" in text
    assert "pip install qaudit-llm==0.1.0\n" in text
    assert "qaudit scan demo --schemes" in text
    text = section(whole(replace(audit, qaudit="0.2.0.dev1")), "Reproduce")
    assert "# measured with qaudit 0.2.0.dev1, which is no release" in text
    assert "pip install" not in text
