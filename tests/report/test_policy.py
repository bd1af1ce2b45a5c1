"""What a policy says on the card: breaches and ignores; and cards of large audits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from qaudit.report.card import render
from qaudit.report.card.tables import shown_rows
from qaudit.report.verdict import headline
from qaudit.report.views import View
from tests.support import sample
from tests.support.cards import STAGE_END, WHY, check, held, section, table, titles


def test_breaches_are_listed_before_doubts_and_passes_are_only_counted() -> None:
    audit = held(
        check("pass", STAGE_END),
        check("inconclusive", message="a doubt", hint="needs about 200 documents to decide"),
        check("fail", message="a breach"),
    )
    lines = section(render(audit), "Policy checks").splitlines()
    assert lines == [
        "- **QA001** a breach.",
        "- **QA001** a doubt. *needs about 200 documents to decide.*",
    ]
    assert "QA001" not in section(render(audit), "Findings")


def test_an_ignored_breach_is_listed_as_ignored() -> None:
    ignored = check("fail", level="info", message="over the margin (agreed until the next release)")
    audit = held(ignored)
    assert "Policy checks" not in render(audit)
    assert "agreed until the next release" in section(render(audit), "Ignores applied")


# ------------------------------------------------------------------ long series


def test_rows_are_in_order_and_spread_over_the_series() -> None:
    view = View(sample.many(100, 2))
    labels = [s.label for s in shown_rows(view)]
    assert labels == [s.label for s in view.subjects if s.label in labels]
    gaps = [int(b[4:]) - int(a[4:]) for a, b in pairwise(labels)]
    assert max(gaps) < 20


def test_of_a_long_series_the_telling_rows_are_shown_and_all_are_folded() -> None:
    audit = sample.many(200, 4, soups=2)
    text = render(audit)
    head, *rows = table(section(text, "Added loss"))
    assert len(rows) == 16
    assert "16 of 202 rows are shown" in text
    _, *every = table(section(text, "Every subject"))
    assert [row[0] for row in every] == [f"`{s.label}`" for s in audit.subjects]
    shown = {row[0].strip("`") for row in rows}
    assert audit.pick is not None
    assert {audit.pick.subject, audit.pick.runner_up, "step199", "step0"} <= shown
    assert len(head) == 2 + 4


@pytest.mark.parametrize("count", [1, 15, 16])
def test_a_short_series_is_shown_whole(count: int) -> None:
    view = View(sample.many(count, 1))
    assert shown_rows(view) == view.subjects
    assert "Every subject" not in render(view.audit)


@pytest.mark.parametrize(("subjects", "schemes", "soups"), [(200, 8, 12), (40, 60, 3)])
def test_a_large_audit_keeps_within_the_limit_by_leaving_out_whole_sections(
    subjects: int, schemes: int, soups: int
) -> None:
    text = render(sample.many(subjects, schemes, soups=soups, name="revision-of-a-long-name-{}"))
    assert len(text.encode()) <= 60_000
    assert "Left out for length, see `audit.json`: " in text
    left_out = text.rpartition("see `audit.json`: ")[2].partition(".\n")[0].split(", ")
    assert "Scheme by scheme" in left_out
    assert not set(left_out) & set(titles(text))
    assert text.count("<details>") == text.count("</details>")
    assert section(text, WHY)
    assert section(text, "Reproduce")


def test_a_card_without_room_for_anything_keeps_its_verdict() -> None:
    text = render(sample.audit(), limit_nbytes=1)
    assert headline(View(sample.audit())) in text.replace("**", "")
    assert titles(text) == []


# ------------------------------------------------------------------ soups, pictures, reproduction


def test_of_many_soups_the_best_are_shown_in_full_and_the_others_in_a_row() -> None:
    text = section(render(sample.many(6, 2, soups=5)), "Soup against ingredients")
    assert text.count(" is the mean of ") == 3
    folded = text.partition("<summary>2 more soups, at rtn-4bit")[2]
    _, *rows = table(folded)
    assert len(rows) == 2


def test_pictures_are_linked_where_they_are_or_replaced_by_lines() -> None:
    audit = sample.audit()
    assert 'srcset="plots/soups-dark.svg"' in render(audit)
    assert ' src="plots/soups.svg">' in render(audit)
    assert "](plots/soups.svg)" in render(audit, has_dark=False)
    assert ' src="a%20b/plots/trajectory.svg">' in render(audit, pictures_at="a b/plots")
    bare = render(audit, pictures_at=None)
    assert "<picture>" not in bare
    assert "```text\nAlong the series" in bare


def test_a_lock_reproduces_what_came_from_the_hub() -> None:
    from qaudit.types import Traffic

    audit = sample.audit()
    assert "lock" not in section(render(audit), "Reproduce")
    traffic = Traffic(1, 1, 1, 1)
    text = section(render(replace(audit, plan=replace(audit.plan, traffic=traffic))), "Reproduce")
    assert "\nqaudit scan plan.json\n" in text
    assert "pip install qaudit-llm==0.1.0\n" in text
    assert "qaudit scan demo --schemes" in text


def test_a_version_between_releases_is_named_and_not_installed() -> None:
    text = section(render(replace(sample.audit(), qaudit="0.2.0.dev1")), "Reproduce")
    assert "# measured with qaudit 0.2.0.dev1, which is no release" in text
    assert "pip install" not in text
