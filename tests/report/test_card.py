from __future__ import annotations

import re
import shlex
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from qaudit.report.document import Inline, code, name_cell, paragraph, prose, words
from qaudit.report.document import table as table_of
from qaudit.report.folder import LIMIT_NBYTES, render_page, render_terminal
from qaudit.report.folder import render_card as render
from qaudit.report.format import NOT_FINITE, count, percent, plural, size, spread
from qaudit.report.losses import shown_rows
from qaudit.report.markdown import END, render_blocks
from qaudit.report.sections import PERMISSIONS, command
from qaudit.report.series import disagree, soup_reading
from qaudit.report.verdict import measured
from qaudit.report.views import SoupRow, View
from qaudit.settings import settings_of
from qaudit.types import AuditRecord, Comparison, Interval, Measurement, Recipe, Traffic
from tests.support import sample
from tests.support.cards import (
    LAST,
    SOUP,
    STAGE_END,
    WHY,
    check,
    held,
    section,
    table,
    titles,
    whole,
)
from tests.support.items import answered
from tests.support.verdicts import with_verdict


def scaled(scheme: str, factors: dict[str, float]) -> AuditRecord:
    """Return an audit in which a scheme multiplies the losses of subjects by given factors."""
    found = sample.measurements()
    full = {m.subject: m.evidence.nll_sum for m in found if m.scheme == "fp"}

    def change(m: Measurement) -> Measurement:
        if m.scheme != scheme or m.subject not in factors:
            return m
        return sample.with_loss(m, full[m.subject] * factors[m.subject])

    return sample.assemble(tuple(map(change, found)), sample.series())


# ------------------------------------------------------------------ the table


def test_every_cell_is_the_score_it_stands_for() -> None:
    view = View(sample.audit())
    head, *rows = table(section(whole(sample.audit()), "Added loss"))
    assert head == ["subject", "loss, full precision", *sample.SCHEMES]
    assert [row[0] for row in rows] == [f"`{s.label}`" for s in sample.series()]
    for row in rows:
        for scheme, text in zip(head[2:], row[2:], strict=True):
            error = view.error(row[0].strip("`"), scheme)
            assert error is not None
            numbers = [float(x) for x in re.findall(r"-?[0-9.]+", text.replace("*", ""))]
            tolerance = 0.06 * 100 * (error.high - error.low)  # two digits of the half-width
            expected = [100 * error.estimate, 100 * error.low, 100 * error.high]
            assert numbers == pytest.approx(expected, abs=tolerance)
    cells = len(sample.SCHEMES) * len(sample.series())
    said = f"for all {cells} to hold at once, read them 1.9 times as wide"
    assert said in whole(sample.audit())
    assert "hold at once" not in whole(sample.audit(documents=8))


def test_what_was_not_measured_is_a_dash_no_change_a_zero_and_no_finite_loss_a_word() -> None:
    audit = scaled("bnb-int8", {STAGE_END: 1.0})
    scores = tuple(s for s in audit.measurements if (s.subject, s.scheme) != (SOUP, "awq-4bit"))
    head, *rows = table(section(whole(replace(audit, measurements=scores)), "Added loss"))
    cells = {row[0].strip("`"): dict(zip(head, row, strict=True)) for row in rows}
    assert cells[SOUP]["awq-4bit"] == "-"
    assert cells[STAGE_END]["bnb-int8"] == "0"
    text = whole(scaled("rtn-3bit", {LAST: np.nan}))
    assert f"loss {NOT_FINITE}" in section(text, "Added loss")
    assert "**QA006**" in text
    assert "nan" not in text


# ------------------------------------------------------------------ sentences


def test_tables_show_the_first_draw_and_every_draw_has_a_row() -> None:
    audit = sample.repeated()
    text = whole(audit)
    first = View(audit).error("stage1-step5000", "gptq-3bit")
    assert first is not None
    shown = percent(first, bounds=False)
    row = next(r for r in table(section(text, "Added loss")) if "stage1-step5000" in r[0])
    assert any(cell.split("<br>")[0] == shown for cell in row[1:])
    _, _, drawn = section(text, "Scheme by scheme").partition("<summary>gptq-3bit: ")
    head, *rows = table(drawn.partition("</details>")[0])
    assert head[-1] == "seed"
    assert len(rows) == sum(score.scheme == "gptq-3bit" for score in audit.measurements)
    assert {row[-1] for row in rows} == {"0", "1", "2"}
    nothing: dict[str, Any] = dict.fromkeys(
        ("measurements", "comparisons", "findings", "tasks"), ()
    )
    bare = replace(sample.audit(), pick=None, **nothing)
    assert "Nothing was measured." in whole(bare)
    assert "Nothing was measured." in render_terminal(bare)


# ------------------------------------------------------------------ soups


def comparison(kind: Any, verdict: Any) -> Comparison:
    return Comparison(kind, "nats per token", "gptq-4bit", "a", "b", Interval(0, 0, 0), verdict, 64)


@pytest.mark.parametrize(
    ("outright", "difference", "reading", "opposite"),
    [
        ("a_better", "a_better", "better, and loses less", False),
        ("a_better", "b_better", "better, although it loses more", True),
        ("b_better", "a_better", "worse, although it loses less", True),
        ("b_better", "b_better", "worse, and loses more", False),
        ("a_better", "inconclusive", "better; what it loses is inconclusive", False),
        ("inconclusive", "a_better", "no detectable difference; loses less", False),
        ("inconclusive", "inconclusive", "indistinguishable", False),
        ("equivalent", "equivalent", "as good; loses as much", False),
    ],
)
def test_a_soup_is_read_by_two_questions(
    outright: str, difference: str, reading: str, opposite: bool
) -> None:
    pair = comparison("outright", outright), comparison("difference_of_differences", difference)
    row = SoupRow("gptq-4bit", "b", *pair, relative=None, is_best=True)
    assert soup_reading(row) == reading
    assert disagree(row) == opposite


def test_each_scheme_has_a_row_against_the_best_ingredient() -> None:
    text = section(whole(sample.audit()), "Soup against ingredients")
    _, *rows = table(text.partition("<details>")[0])
    view = View(sample.audit())
    members = tuple(f"stage2-ingredient{k}-step1000" for k in (1, 2, 3))
    assert [(row[0], row[1].strip("`")) for row in rows] == [
        (scheme, view.best(scheme, members)) for scheme in sample.SCHEMES
    ]
    _, *every = table(text.partition("<details>")[2])
    assert len(every) == 3 * len(sample.SCHEMES)


def test_opposite_answers_are_pointed_out_and_every_soup_is_shown_the_others_folded() -> None:
    # The soup keeps its lower loss and loses more than its ingredients, which lose nothing.
    members = {f"stage2-ingredient{k}-step1000": 1.0 for k in (1, 2, 3)}
    audit = scaled("bnb-int8", {SOUP: 1.001, **members})
    assert "opposite answers under bnb-int8" in whole(audit)
    assert "opposite answers" not in whole(sample.audit())
    text = section(whole(sample.many(6, 2, soups=5)), "Soup against ingredients")
    assert text.count(" is the mean of ") == 5
    assert text.count("<summary>stepsoup") == 4


# ------------------------------------------------------------------ several draws


def test_the_noise_of_each_scheme_is_told_apart_by_where_it_comes_from() -> None:
    plain = section(whole(sample.audit()), "Noise")
    assert "| scheme |" not in plain and "paired on the same 64 documents." in plain
    assert "Arithmetic: `-`, not measured and in no interval." in plain
    said = section(whole(sample.repeated()), "Noise")
    assert "What makes added losses uncertain, in percentage points" in said
    head, *rows = table(said)
    sources = ["documents", "one draw", "arithmetic"]
    assert head == ["subject", "scheme", "draws", "added loss, %", *sources]
    rows = [row for row in rows if row[0] == "`stage2-ingredient3-step1000`"]
    assert [row[1:3] for row in rows] == [["gptq-4bit", "3"], ["gptq-3bit", "3"]]
    calm, wild = (float(row[5]) for row in rows)
    assert wild > 5 * calm
    ce = View(sample.repeated()).score("stage2-ingredient3-step1000")
    assert ce is not None
    assert {row[-1] for row in rows} == {f"{100 * 1e-4 / ce.ce.estimate:.4f}"}
    assert "Calibration: in no interval. Another calibration would write another file." in said
    assert "Arithmetic: in no interval. What enters each block moved" in said


def test_the_documents_that_narrow_each_measure_are_named() -> None:
    audit = sample.audit()
    verdict = audit.verdict
    assert verdict is not None
    one = next(one for one in verdict.classes if one.subject)
    rows = tuple(
        replace(row, documents_for_loss=1234, documents_for_kl=None if row.kl is None else 56)
        if (row.subject, row.scheme) == (one.subject, one.scheme)
        else row
        for row in audit.measurements
    )
    known = section(whole(replace(audit, measurements=rows)), "Noise")
    line = f"Documents that narrow the interval of `{one.subject}` at {one.scheme}"
    line += " to 10 % either way: 1,234 for its added loss"
    assert f"{line}; 64 were measured." in known
    both = tuple(replace(row, documents_for_kl=56, documents_for_loss=1234) for row in rows)
    known = section(whole(replace(audit, measurements=both)), "Noise")
    assert f"{line} and 56 for its KL divergence; 64 were measured." in known
    assert "In four of five cases" not in known
    plan = replace(audit.plan, detectable_relative_error=0.0044)
    detects = "these documents detect an added loss of 0.44 %"
    assert detects in section(whole(replace(audit, plan=plan)), "Noise")


# ------------------------------------------------------------------ names of others


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        (code("a`b"), "`a'b`"),
        (code(""), "`?`"),
        (words("<b> & *c* [d](e)"), "&lt;b> &amp; \\*c\\* [d]\\(e)"),
        (prose("use `x_y` and *z*"), "use `x_y` and \\*z\\*"),
        (prose("an odd ` tick"), "an odd \\` tick"),
    ],
)
def test_names_and_sentences_are_escaped(runs: Inline, text: str) -> None:
    assert render_blocks([paragraph(runs)]) == text


def test_no_name_ends_a_cell_of_a_table() -> None:
    names = {"a-b": "`a-b`", "a|b": "<code>a&#124;b</code>", "a\\b": "<code>a&#92;b</code>"}
    for name, text in names.items():
        shown = render_blocks([table_of(["subject"], [(name_cell(name),)])])
        assert shown.splitlines()[-1] == f"| {text} |"


# ------------------------------------------------------------------ the whole


def test_the_card_is_short_and_the_page_has_the_rest() -> None:
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


@pytest.mark.parametrize(("subjects", "schemes", "soups"), [(200, 8, 12), (40, 60, 3)])
def test_a_large_audit_keeps_within_the_limit(subjects: int, schemes: int, soups: int) -> None:
    text = render(sample.many(subjects, schemes, soups=soups, name="revision-of-a-long-name-{}"))
    assert len(text.encode()) <= LIMIT_NBYTES
    assert text.count("<details>") == text.count("</details>")


def test_what_was_skipped_noted_and_recorded_is_listed() -> None:
    text = whole(sample.audit())
    assert "- `stage1-step250`: `model.safetensors` is truncated" in section(text, "Not measured")
    assert "no scale folds exactly" in section(text, "Notes")
    rows = dict(table(section(text, "Protocol and environment")))
    assert rows["python"] == "3.13.1"
    assert rows["torch"] == "2.13.0"
    assert rows["context"] == "256"
    assert rows["computed in"] == "float32 on cpu"
    assert rows["memory"] == "180.0 MB planned above the libraries, 145.0 MB measured"
    assert rows["evaluated on"].startswith("64 documents, ")


def test_pictures_are_linked_where_they_are_or_replaced_by_lines() -> None:
    audit = sample.audit()
    assert 'srcset="plots/trajectory-dark.svg"' in render(audit)
    assert ' src="plots/trajectory.svg">' in render(audit)
    assert "](plots/trajectory.svg)" in render(audit, has_dark=False)
    assert ' src="a%20b/plots/trajectory.svg">' in render(audit, pictures_at="a b/plots")
    bare = render(audit, pictures_at=None)
    assert "<picture>" not in bare
    assert "```text\nAlong the series" in bare


# ------------------------------------------------------------------ a policy


def test_breaches_are_listed_before_doubts_and_ignored_ones_by_themselves() -> None:
    audit = held(
        check("pass", STAGE_END),
        check("inconclusive", message="a doubt", hint="needs about 200 documents to decide"),
        check("fail", message="a breach"),
    )
    assert section(whole(audit), "Policy checks").splitlines() == [
        "- **QA001** a breach.",
        "- **QA001** a doubt. *needs about 200 documents to decide.*",
    ]
    assert "**QA001**" not in section(whole(audit), "Findings")
    ignored = check("fail", level="info", message="over the margin (agreed until the next release)")
    audit = held(ignored)
    assert "Policy checks" not in whole(audit)
    assert "agreed until the next release" in section(whole(audit), "Ignores applied")


# ------------------------------------------------------------------ reproduce


def test_the_command_asks_for_the_same_recipe() -> None:
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
    options: dict[str, list[str]] = {}
    for option, value in pairwise(words):
        options.setdefault(option, []).append(value)
    assert options["--schemes"] == ["rtn-4bit,gptq-3bit:act_order=true"]
    assert (options["--soup"], options["--shipped"]) == (["stage2-*", "a+b"], ["x", "y"])
    assert options["--checkpoints"] == ["step*", "stage2@.."]
    assert (options["--bits"], options["--tasks"]) == (["4,3"], ["paper-a,arc"])
    assert options["--evaluation"] == ["text.jsonl"]
    assert {"calibration_seed=3", "context=512", "packed=true", "last=9"} <= {*words}
    assert words[-2:] == ["--allow-pickle", "--trust-remote-code"]
    assert "--device" not in words  # defaults are not repeated


def test_what_reproduces_an_audit_permits_and_locks_what_its_checkpoints_needed() -> None:
    audit = sample.audit()
    (first, *rest) = audit.plan.subjects
    needing = replace(first, members=((replace(first.first, requires=("pickle",)), 1.0),))
    plan = replace(audit.plan, subjects=(needing, *rest))
    assert "--allow-pickle" in whole(replace(audit, plan=plan))
    assert "--allow-pickle" not in whole(audit)
    assert "lock" not in section(whole(audit), "Reproduce")
    plan = replace(audit.plan, traffic=Traffic(1, 1, 1, 1))  # from the Hub
    text = section(whole(replace(audit, plan=plan)), "Reproduce")
    assert "\nqaudit scan plan.json\n" in text
    assert "pip install qaudit-llm==0.1.0\n" in text
    assert "qaudit scan demo --schemes" in text
    text = section(whole(replace(audit, qaudit="0.2.0.dev1")), "Reproduce")
    assert "# measured with qaudit 0.2.0.dev1, which is no release" in text
    assert "pip install" not in text


def test_every_option_of_the_command_exists() -> None:
    from typer.main import get_command

    from qaudit.cli.app import app

    known = {opt for p in get_command(app).commands["scan"].params for opt in p.opts}
    odd = Recipe(
        targets=("a",),
        schemes=("rtn-4bit",),
        **{
            field.name: value
            for field in fields(Recipe)
            if field.name not in ("targets", "schemes", "confidence", "schedule")
            for value in [("x",) if isinstance(field.default, tuple) else 3]
        },
    )
    words = shlex.split(command(odd, set(PERMISSIONS)))
    assert {word for word in words if "--" in word} <= known
    keys = {word.partition("=")[0] for word in words if "=" in word}
    assert len(keys) > 12
    assert keys <= settings_of(Recipe).keys()


# ------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(0.00921, 0.0071, 0.0113), "0.92 [0.71, 1.13]"),
        (Interval(0.129, 0.108, 0.158), "12.9 [10.8, 15.8]"),
        (Interval(0.0, 0.0, 0.0), "0"),
        (Interval(-0.00001, -0.002, 0.002), "0.00 [-0.20, 0.20]"),
        (Interval(0.01, -np.inf, np.inf), "1.000 [-inf, inf]"),
        (Interval(np.inf, -np.inf, np.inf), NOT_FINITE),
    ],
)
def test_percents_have_the_digits_their_width_deserves(interval: Interval, text: str) -> None:
    assert percent(interval) == text


def test_numbers_are_printed_for_people() -> None:
    assert spread(Interval(1.0, 0.9, 1.1), unit=" nats") == "1.00 nats [0.90, 1.10]"
    assert [size(n) for n in (900, 2_500_000, 3_000_000_000)] == ["900 bytes", "2.5 MB", "3.0 GB"]
    assert [count(n) for n in (12_000, 1_180_000, 7_000_000_000)] == ["12,000", "1.18M", "7B"]
    assert [plural(n, "document") for n in (1, 2)] == ["1 document", "2 documents"]


def test_a_terminal_shows_the_accuracies_of_what_ships() -> None:
    tasks = sample.judged(tuple(map(answered, sample.measurements()))).tasks
    text = render_terminal(replace(sample.audit(), tasks=tasks))
    assert "\nTasks\n" in text
    accuracies = text.partition("\nTasks\n")[2]
    assert "points" in accuracies
    assert tasks[0].task in accuracies
    assert "\nTasks\n" not in render_terminal(sample.audit())


# ------------------------------------------------------------------ what the whole card rests on


def test_divergence_has_its_tails_and_all_subjects() -> None:
    kl = Interval(0.0123, 0.0101, 0.0146)
    scores = tuple(
        replace(s, kl=kl, kl_p50=kl, kl_p90=kl, kl_p99=Interval(0.5, 0.4, 0.6), kl_max=7.25)
        if s.scheme == "gptq-4bit"
        else s
        for s in sample.audit().measurements
    )
    text = section(whole(replace(sample.audit(), measurements=scores)), "KL divergence")
    head, row, *_ = table(text)
    cells = dict(zip(head, row, strict=True))
    assert cells["scheme"] == "gptq-4bit"
    assert cells["KL"] == "0.0123<br><sub>[0.0101,&nbsp;0.0146]</sub>"
    assert cells["99 %"].startswith("0.50")
    assert (cells["99.9 %"], cells["largest"], cells["agreement, %"]) == ("-", "7.25", "-")
    _, *every = table(text.partition("subjects</summary>")[2])
    assert len(every) == len(sample.series())
    assert "KL divergence" not in titles(whole(sample.audit()))


def test_the_series_is_followed_to_each_of_its_ends() -> None:
    ends = [f"stage2-ingredient{k}-step1000" for k in (1, 2, 3)]
    view = View(sample.audit())
    assert [subject.label for subject in view.ends] == ends
    text = section(whole(sample.audit()), "Along the series")
    assert f"From `{STAGE_END}` to `{ends[0]}`, `{ends[1]}` and `{ends[2]}`, the added loss" in text
    grew = {
        scheme: sum(
            c.verdict == "b_better"
            for end in ends
            if (c := view.compared("relative_error_difference", scheme, end, STAGE_END))
        )
        for scheme in view.schemes
    }
    assert set(grew.values()) == {3}
    assert "it" not in text.partition("added loss ")[2].partition(".")[0].split()
    assert "grew to 3 of 3 under rtn-4bit" in text


# ------------------------------------------------------------------ long series


def test_of_a_long_series_telling_rows_in_order_and_spread_over_it_are_shown() -> None:
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
    assert audit.pick is not None
    assert {audit.pick.subject, audit.pick.runner_up, "step199", "step0"} <= shown
    assert render_page(audit).count('class="more"') == 202 - 16
