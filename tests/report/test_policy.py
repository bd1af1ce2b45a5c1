"""What a policy says, on the card and in the terminal: marks, sentences, breaches, ignores."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from qaudit.report.card import render, render_terminal
from qaudit.report.card.errors import shown_rows
from qaudit.report.verdict import standing, verdict
from qaudit.report.views import View, marks
from qaudit.types import AuditRecord
from tests.support import sample
from tests.support.cards import SHIP, SOUP, STAGE_END, check, held, section, table


def cells(audit: AuditRecord) -> dict[str, dict[str, str]]:
    head, *rows = table(section(render(audit), "Relative error"))
    return {row[0].strip("`"): dict(zip(head, row, strict=True)) for row in rows}


def test_a_breach_and_a_doubt_are_marked_in_their_cells_and_explained() -> None:
    audit = held(check("fail"), check("inconclusive", scheme="awq-4bit"), check("pass", STAGE_END))
    found = cells(audit)
    assert found[SOUP]["gptq-4bit"].startswith("**0.688 !**<br>")
    assert found[SOUP]["awq-4bit"].split("<br>")[0].strip("*").endswith(" ?")
    assert not set(found[STAGE_END]["gptq-4bit"]) & set("!?")
    legend = section(render(audit), "Relative error").partition("\n|")[0]
    assert "`!`: over the margin that the policy sets." in legend
    assert "`?`: inconclusive, these documents do not decide whether it is over" in legend
    assert (
        "Of 3 checks of the policy `release`: 1 within its margin, 1 over it (`!`) and 1"
        in render(audit)
    )


def test_without_a_policy_there_are_no_marks_and_no_words_for_them() -> None:
    text = render(sample.audit())
    assert marks(View(sample.audit())) == {}
    for word in ("policy", "`!`", "`?`", "Policy checks"):
        assert word not in text


def test_a_finding_that_is_no_check_leaves_no_mark() -> None:
    audit = sample.audit()
    assert any(f.outcome == "fail" and f.margin is not None for f in audit.findings)
    assert marks(View(audit)) == {}


def test_a_breach_outweighs_a_doubt() -> None:
    for order in ((check("fail"), check("inconclusive")), (check("inconclusive"), check("fail"))):
        assert marks(View(held(*order))) == {(SOUP, "gptq-4bit"): "!"}


def test_what_breaches_its_policy_is_not_called_shippable() -> None:
    said = verdict(View(held(check("fail"))))
    assert said.startswith(f"Nothing to ship by this policy: `{SOUP}` at gptq-4bit")
    assert "Ship `" not in said
    assert verdict(View(held(check("fail", scheme="rtn-3bit")))).startswith("Ship `soup`")
    warned = check("fail", level="warn")
    assert verdict(View(held(warned))).startswith("Ship `soup`")
    assert "is inconclusive" in verdict(View(held(check("inconclusive"))))


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


def test_an_ignored_breach_keeps_its_mark_and_is_listed_as_ignored() -> None:
    ignored = check("fail", level="info", message="over the margin (agreed until the next release)")
    audit = held(ignored)
    assert "Policy checks" not in render(audit)
    assert "1 over it (`!`); 1 ignored, with a reason." in render(audit)
    assert "agreed until the next release" in section(render(audit), "Ignores applied")
    assert cells(audit)[SOUP]["gptq-4bit"].startswith("**0.688 !**")


def test_the_terminal_marks_the_same_cells_in_straight_columns() -> None:
    text = render_terminal(held(check("fail"), check("inconclusive", scheme="awq-4bit")))
    assert "! over the margin that the policy sets; ? inconclusive" in " ".join(text.split())
    soups = "".join(line for line in text.splitlines() if line.startswith("soup "))
    assert "0.688!" in soups
    assert (soups.count("!"), soups.count("?")) == (1, 1)
    assert max(map(len, text.splitlines())) <= 80
    assert not set(render_terminal(sample.audit())) & set("!?")


def test_what_was_missed_is_said_at_once() -> None:
    assert standing(View(sample.audit()))[-1].endswith("Planned and not measured: 1.")


# ------------------------------------------------------------------ long series


def test_of_a_long_series_the_telling_rows_are_shown_and_all_are_folded() -> None:
    audit = sample.many(200, 4, soups=2)
    text = render(audit)
    head, *rows = table(section(text, "Relative error"))
    assert len(rows) == 16
    assert "16 of 202 rows are shown" in text
    _, *every = table(section(text, "Every subject"))
    assert [row[0] for row in every] == [f"`{s.label}`" for s in audit.subjects]
    shown = {row[0].strip("`") for row in rows}
    assert audit.pick is not None
    assert {audit.pick.subject, audit.pick.runner_up, "step199", "step0"} <= shown
    bold = [row[0].strip("`") for row in rows for cell in row if cell.startswith("**")]
    assert len(bold) == len(head) - 1
    assert "16 of 202 rows are shown" in " ".join(render_terminal(audit).split())


def test_rows_stand_in_order_and_breaches_are_among_them() -> None:
    audit = sample.many(100, 2)
    over = [check("fail", f"step{k}", "rtn-4bit") for k in (31, 57)]
    view = View(replace(audit, findings=tuple(over)))
    labels = [s.label for s in shown_rows(view)]
    assert labels == [s.label for s in audit.subjects if s.label in labels]
    assert {"step31", "step57"} <= set(labels)
    gaps = [int(b[4:]) - int(a[4:]) for a, b in pairwise(labels)]
    assert max(gaps) < 20  # and the others are spread over the series


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
    assert not any(f"### {title}\n" in text for title in left_out)
    assert text.count("<details>") == text.count("</details>")
    assert section(text, SHIP)
    assert section(text, "Reproduce")


def test_a_card_without_room_for_anything_keeps_its_verdict() -> None:
    text = render(sample.audit(), limit_nbytes=1)
    assert verdict(View(sample.audit())) in text.replace("**", "")
    assert "### " not in text


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
    assert "\nqaudit scan plan.lock.json\n" in text
    assert "pip install qaudit-llm==0.1.0\n" in text
    assert "qaudit scan demo --schemes" in text


def test_a_version_between_releases_is_named_and_not_installed() -> None:
    text = section(render(replace(sample.audit(), qaudit="0.2.0.dev1")), "Reproduce")
    assert "# measured with qaudit 0.2.0.dev1, which is no release" in text
    assert "pip install" not in text
