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
from qaudit.report.folder import render_card as render
from qaudit.report.folder import render_terminal
from qaudit.report.format import NOT_FINITE, count, percent, plural, size, spread
from qaudit.report.markdown import END, render_blocks
from qaudit.report.sections import PERMISSIONS, command
from qaudit.report.series import disagree, soup_reading
from qaudit.report.views import SoupRow, View
from qaudit.settings import settings_of
from qaudit.types import AuditRecord, Comparison, Interval, Measurement, Recipe
from tests.support import sample
from tests.support.cards import LAST, SOUP, STAGE_END, WHY, section, table, titles, whole
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
            score = view.score(row[0].strip("`"), scheme)
            assert score is not None
            assert score.relative_error is not None
            numbers = [float(x) for x in re.findall(r"-?[0-9.]+", text.replace("*", ""))]
            error = score.relative_error
            tolerance = 0.06 * 100 * (error.high - error.low)  # two digits of the half-width
            expected = [100 * error.estimate, 100 * error.low, 100 * error.high]
            assert numbers == pytest.approx(expected, abs=tolerance)


def test_what_was_not_measured_is_a_dash_and_no_change_a_zero() -> None:
    audit = scaled("bnb-int8", {STAGE_END: 1.0})
    scores = tuple(s for s in audit.measurements if (s.subject, s.scheme) != (SOUP, "awq-4bit"))
    head, *rows = table(section(whole(replace(audit, measurements=scores)), "Added loss"))
    cells = {row[0].strip("`"): dict(zip(head, row, strict=True)) for row in rows}
    assert cells[SOUP]["awq-4bit"] == "-"
    assert cells[STAGE_END]["bnb-int8"] == "0"


def test_a_loss_that_is_not_finite_says_so() -> None:
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


def test_nothing_measured_says_so() -> None:
    bare = replace(
        sample.audit(), measurements=(), comparisons=(), findings=(), pick=None, tasks=()
    )
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


def test_opposite_answers_are_pointed_out() -> None:
    # The soup keeps its lower loss and loses more than its ingredients, which lose nothing.
    members = {f"stage2-ingredient{k}-step1000": 1.0 for k in (1, 2, 3)}
    audit = scaled("bnb-int8", {SOUP: 1.001, **members})
    assert "opposite answers under bnb-int8" in whole(audit)
    assert "opposite answers" not in whole(sample.audit())


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
    line = (
        f"Documents that narrow the interval of `{one.subject}` at {one.scheme} to 10 % either way"
    )
    line += ": 1,234 for its added loss"
    assert f"{line}; 64 were measured." in known
    both = tuple(replace(row, documents_for_kl=56, documents_for_loss=1234) for row in rows)
    assert f"{line} and 56 for its KL divergence; 64 were measured." in section(
        whole(replace(audit, measurements=both)), "Noise"
    )


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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a-b", "`a-b`"),
        ("a|b", "<code>a&#124;b</code>"),
        ("a\\b", "<code>a&#92;b</code>"),
    ],
)
def test_no_name_ends_a_cell_of_a_table(name: str, text: str) -> None:
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


def test_a_card_that_is_too_long_loses_whole_sections_and_says_so() -> None:
    most = len(render(with_verdict()).encode()) - 1
    text = render(with_verdict(), limit_nbytes=most)
    assert len(text.encode()) <= most
    assert titles(text) == [WHY]
    assert "Left out for length, see `report.html`: Not measured." in text
    assert text.endswith(END + "\n")


def test_skipped_subjects_and_notes_are_listed() -> None:
    text = whole(sample.audit())
    assert "- `stage1-step250`: `model.safetensors` is truncated" in section(text, "Not measured")
    assert "no scale folds exactly" in section(text, "Notes")


def test_protocol_and_environment_are_listed() -> None:
    rows = dict(table(section(whole(sample.audit()), "Protocol and environment")))
    assert rows["python"] == "3.13.1"
    assert rows["torch"] == "2.13.0"
    assert rows["context"] == "256"
    assert rows["computed in"] == "float32 on cpu"
    assert rows["memory"] == "180.0 MB planned above the libraries, 145.0 MB measured"
    assert rows["evaluated on"].startswith("64 documents, ")


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


def test_a_card_permits_what_its_checkpoints_needed() -> None:
    audit = sample.audit()
    (first, *rest) = audit.plan.subjects
    needing = replace(first, members=((replace(first.first, requires=("pickle",)), 1.0),))
    plan = replace(audit.plan, subjects=(needing, *rest))
    assert "--allow-pickle" in whole(replace(audit, plan=plan))
    assert "--allow-pickle" not in whole(audit)


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
    table = text.partition("\nTasks\n")[2]
    assert "points" in table
    assert tasks[0].task in table
    assert "\nTasks\n" not in render_terminal(sample.audit())


def test_the_table_says_how_wide_its_intervals_are_together() -> None:
    cells = len(sample.SCHEMES) * len(sample.series())
    said = f"for all {cells} to hold at once, read them 1.9 times as wide"
    assert said in whole(sample.audit())
    assert "hold at once" not in whole(sample.audit(documents=8))


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
