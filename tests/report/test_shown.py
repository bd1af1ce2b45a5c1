"""What people and programs are shown, as text: cards, gates, differences, plans and series.

    python -m tests.report.test_shown

writes the texts anew into `shown/`; read the difference before it is committed.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from difflib import unified_diff
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text

from qaudit.core.course import NO_WEIGHTS, bad_report
from qaudit.errors import AuditError, MachineError
from qaudit.judge.gate import verdict_of
from qaudit.report import diff, gate, markdown, terminal
from qaudit.report.chart import drawing
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
)
from qaudit.report.folder import render_block, render_card, render_terminal
from qaudit.report.format import width_of
from qaudit.report.html import Blocks
from qaudit.report.plan import Catalog, catalog_to_json, render_catalog, render_plan
from qaudit.report.plots import DRAWERS
from qaudit.report.verdict import render_pareto, render_pick
from qaudit.report.views import View
from qaudit.tables import Audit
from qaudit.types import (
    Changed,
    Checkpoint,
    Delta,
    Difference,
    Finding,
    GreedyCandidate,
    GreedySearch,
    GreedyTrial,
    Interval,
    Pick,
    Ref,
    Subject,
    Traffic,
    WeightFile,
)
from tests.support import cards, sample, verdicts
from tests.support import gate_sample as gates
from tests.support.items import answered

FOLDER = Path(__file__).with_name("shown")
GB = 10**9
Texts = Iterator[tuple[str, str]]


def scaled(scheme, factors):
    """Return an audit in which a scheme multiplies the losses of subjects by given factors."""
    found = sample.measurements()
    full = {m.subject: m.evidence.nll_sum for m in found if m.scheme == "fp"}
    changed = (
        sample.with_loss(m, full[m.subject] * factors[m.subject])
        if m.scheme == scheme and m.subject in factors
        else m
        for m in found
    )
    return sample.assemble(tuple(changed), sample.series())


def audits():
    """Return audits that differ from the sample in one thing each."""
    made = {}
    plain, soup = sample.audit(), cards.SOUP
    made["many soups"] = sample.many(3, 2, soups=2)
    ingredients = {f"stage2-ingredient{k}-step1000": 1.0 for k in (1, 2, 3)}
    made["opposite answers"] = scaled("bnb-int8", {soup: 1.001, **ingredients})
    made["not finite"] = scaled("rtn-3bit", {cards.LAST: np.nan})
    made["nothing added"] = scaled("bnb-int8", {cards.STAGE_END: 1.0})
    kept = tuple(m for m in plain.measurements if (m.subject, m.scheme) != (soup, "awq-4bit"))
    made["not measured"] = replace(plain, measurements=kept)
    kl, far = Interval(0.0123, 0.0101, 0.0146), Interval(0.5, 0.4, 0.6)
    known = {"kl": kl, "kl_p50": kl, "kl_p90": kl, "kl_p99": far, "kl_max": 7.25}
    known |= {"documents_for_loss": 1234, "documents_for_kl": 56}
    scores = (replace(m, **known) if "gptq-4" in m.scheme else m for m in plain.measurements)
    made["divergence and documents"] = replace(plain, measurements=tuple(scores))
    scores = (replace(m, documents_for_loss=1234) for m in plain.measurements)
    made["documents for the loss"] = replace(plain, measurements=tuple(scores))
    made["checks"] = cards.held(
        cards.check("pass", cards.STAGE_END),
        cards.check("inconclusive", message="a doubt", hint="needs about 200 documents to decide"),
        cards.check("fail", message="a breach"),
        cards.check("fail", level="info", message="over (agreed until the next release)"),
    )
    first, *rest = plain.plan.subjects
    pickled = replace(first, members=((replace(first.first, requires=("pickle",)), 1.0),))
    plan = replace(plain.plan, subjects=(pickled, *rest), traffic=Traffic(1, 1, 1, 1))
    plan = replace(plan, detectable_relative_error=0.0044)
    made["from the Hub"] = replace(plain, plan=plan)
    made["no release"] = replace(plain, qaudit="0.2.0.dev1")
    trials = (GreedyTrial("b", 1.9, True), GreedyTrial("c", None, False))
    found = GreedySearch(soup, "gptq-4bit", 8, (GreedyCandidate("a", 2.0),), trials, ("a",), 1.9)
    searches = (found, replace(found, label="another", documents=9))
    made["searched"] = replace(plain, diagnostics=replace(plain.diagnostics, greedy=searches))
    full = tuple(m for m in plain.measurements if m.scheme == "fp")
    made["nothing quantized"] = replace(plain, measurements=full, pick=None, verdict=None)
    for name, more in {
        "near": {"kl": Interval(0.00039, 0.00037, 0.00041), "metric": "top1_agreement"},
        "far": {"kl": Interval(0.0368, 0.0346, 0.0393), "metric": "relative_error"},
    }.items():
        one = verdicts.verdict(verdicts.class_verdict("4", **more))
        made[f"divergence, {name}"] = verdicts.with_verdict(one)
    return made


def unmeasured():
    nothing = dict.fromkeys(("measurements", "comparisons", "findings", "tasks"), ())
    return replace(sample.audit(), pick=None, **nothing)  # type: ignore[arg-type]


def pages():
    plain = cards.whole(sample.audit())
    yield "plain", plain
    yield "everything", cards.whole(cards.everything())
    yield "nothing measured", cards.whole(unmeasured())
    for name, audit in audits().items():
        lines = (text.splitlines() for text in (plain, cards.whole(audit)))
        yield name, "\n".join(list(unified_diff(*lines, lineterm="", n=0))[2:])


def screens():
    verdict = verdicts.with_verdict()
    yield "card", render_card(verdict)
    yield "card without pictures", render_card(sample.audit(), pictures_at=None)
    yield "card with others", render_card(sample.audit(), has_dark=False, pictures_at="a b/plots")
    for has_page in (True, False):
        yield f"block {has_page}", render_block(verdict, "qaudit", has_page=has_page)
    for width in (60, 80, 120):
        yield f"terminal {width}", render_terminal(verdict, width)
    yield "terminal, everything", render_terminal(cards.everything(), 80)
    yield "terminal, nothing", render_terminal(unmeasured(), 80)
    yield "pick", render_pick(verdict)
    yield "pick without a verdict", render_pick(replace(verdict, verdict=None))
    yield "pareto", render_pareto(verdict)
    made = Audit(verdict, Path()).verdict
    pick = Pick("soup", "gptq-4bit", "lowest loss", "other", Interval(-1, -2, -0.5), "32")
    views = (str(made), made._repr_markdown_(), made._repr_html_(), pick._repr_markdown_())
    yield "views of a notebook", "\n\n".join(views)
    said = "1 of 64 documents carries 41 % of what gptq-4bit adds to the loss of `soup`"
    rare = Finding("QA029", "warn", cards.SOUP, "gptq-4bit", said, "")
    far = replace(rare, scheme="rtn-4bit", message="elsewhere")
    yield "warned", cards.screen(cards.whole(replace(verdict, findings=(rare, far))))


def of_gates():
    undecided = verdicts.class_verdict("4", "undecided", needs=("more documents",))
    shipped = (verdicts.class_verdict("8"), undecided)
    plain = gates.gate()
    answers = {
        "every": plain,
        "classes": replace(gates.gate(gates.INCONCLUSIVE), classes=shipped),
        "hostile": gates.hostile(),
        "refused": AuditError("`a%b` is not\nwhole JSON", hint="run `qaudit scan` again"),
        "failed": MachineError("no", hint=""),
    }
    for name, answer in answers.items():
        yield from ((f"{name}, {form}", gate.render(answer, form)) for form in gate.FORMATS)
    yield "every, summary", gate.step_summary(plain)
    crowd = gates.crowd(12)
    yield from (
        (f"crowd, {form}", gate.render(crowd, form)) for form in ("github", "md", "terminal")
    )
    badges = [
        ({"4": "ship"}, (gates.PASSES,)),
        ({"4": "hold"}, (gates.FAILS,)),
        ({"4": "ship"}, (gates.PASSES, gates.IGNORED)),
        ({"4": "ship"}, (gates.MISSING,)),
        ({}, (gates.WARNS, gates.IGNORED, gates.PASSES)),
    ]
    for classes, checks in badges:
        made = tuple(verdicts.class_verdict(bits, status) for bits, status in classes.items())
        answer = gates.gate(*checks, classes=made)
        yield f"{classes}", f"{gate.render(answer, 'shields')}{gate.render(answer, 'github')}"
    card = render_card(verdicts.with_verdict(verdict_of(answers["classes"], "loss")))
    yield "card", cards.screen(card)


def differences():
    made = {}
    row = Delta(
        "soup", "gptq-4bit", Interval(0.01, 0.004, 0.016), "worse",
        Interval(-0.002, -0.004, 0.0), "unclear", 64,
    )  # fmt: skip
    nothing = Interval(0, 0, 0)
    same = replace(row, subject="quiet", loss=nothing, loss_reading="same")
    same = replace(same, relative_error_reading="same")
    better = replace(row, scheme="rtn-3bit", loss=Interval(-0.2, -0.3, -0.1), loss_reading="better")
    fine = replace(row, loss=None, loss_reading=None, scheme="bnb-nf4")
    fine = replace(fine, relative_error_reading="better")
    pick = Pick("soup", "gptq-4bit", "loss", None, None, None)
    plain = Difference(
        a="old",
        b="new",
        paired=True,
        shared_documents=64,
        documents=(64, 80),
        unit="nats per token",
        confidence=0.95,
        at_once=8,
        deltas=(same, better, fine, row),
        notes=("compared on the 64 documents that both have",),
        protocol=(Changed("corpus_sha256", "a" * 64, "b" * 64),),
        software=(Changed("torch", "2.13.0", None),),
        weights=("soup",),
        specs=(),
        subjects=(Changed("gone", "gone", None), Changed("new", None, "new")),
        schemes=(),
        picks=(pick, replace(pick, scheme="awq-4bit")),
    )
    made["plain"] = plain
    made["pick stays"] = replace(plain, picks=(pick, pick))
    made["no pick"] = replace(plain, picks=(None, None))
    made["nothing in common"] = replace(plain, deltas=())
    wide = replace(row, subject="\u6aa2\u67e5\u9ede" * 20, scheme="\u6aa2" * 9)
    made["wide"] = replace(plain, deltas=(wide, row))
    name = gates.HOSTILE
    bad = Changed(name, name, name + "2")
    changes = {"protocol": (bad,), "software": (bad,), "specs": (bad,), "weights": (name,)}
    evil = replace(plain, a=name, b=name, picks=(replace(pick, subject=name), None), **changes)
    made["hostile"] = replace(evil, deltas=(replace(row, subject=name, scheme=name),))
    many = (replace(row, subject=f"s{k}") for k in range(202))
    made["many"] = replace(plain, deltas=tuple(many))
    return made


def of_differences():
    for name, found in differences().items():
        for form in diff.FORMATS if name in ("plain", "hostile") else ("terminal", "md"):
            text = diff.FORMATS[form](found)
            yield f"{name}, {form}", text.rpartition("s199")[2]


def plans():
    plain = sample.audit().plan
    asked = replace(plain.recipe, evaluation="hf://datasets/a/b/c.txt", reference="stage1-step500")
    twice = Finding("QA009", "warn", "soup", None, "`a` and `b` are the same" * 4, "take one")
    soups = tuple(s for s in sample.series() if s.kind == "soup")
    changes = {
        "plain": {},
        "cached": {"traffic": Traffic(0, 61 * GB, 0, 212 * GB, 100 * GB)},
        "cuda": {"device": "cuda", "seconds_low": 1800.0, "seconds_high": 7200.0},
        "hub": {"traffic": Traffic(350 * GB, 2 * GB, 61 * GB, 212 * GB, 100 * GB)},
        "told": {"recipe": asked, "findings": (twice,), "notes": ("a long " * 20, "16 of 965")},
        "soup": {"subjects": soups},
        "checkpoint": {"subjects": sample.series()[:1]},
        "two": {"subjects": sample.series()[:2]},
    }
    yield from ((name, render_plan(replace(plain, **more))) for name, more in changes.items())


def checkpoint(label, sha=None, **known):
    files = (WeightFile("w", 5_000_000, sha),) if sha else ()
    return Checkpoint(Ref("o/n", label), label, files, **known)


def series():
    made = {}

    def steps(*numbers):
        return [checkpoint(f"step{n}", step=n, stage="s") for n in numbers]

    def catalog(*checkpoints, selected=(), **more):
        return Catalog(("o/n",), checkpoints, frozenset(selected), **more)

    every = steps(*range(1000, 9001, 1000))
    zero = {"step": 0, "tokens": 0, "learning_rate": 0.0, "stage": "s", "ingredient": 2}
    bad = checkpoint("step4500", step=4500, stage="s", suspect=(bad_report("why"),))
    some = (bad_report("why", some=True),)
    long = "stage2-ingredient1-step11931-tokens50B-with-a-long-tail-that-goes-on"
    made["unknown, empty and zero"] = catalog(
        checkpoint("a"), checkpoint("b", suspect=(NO_WEIGHTS,)), checkpoint("c", "1", **zero)
    )
    made["folded"] = catalog(*every, selected=("step6000",))
    made["without numbers"] = catalog(*(checkpoint(f"name-{k}") for k in "abcdefgh"))
    made["a gap"] = catalog(*(c for c in every if c.step != 4000))
    made["uneven"] = catalog(*steps(1, 2, 4, 8, 16))
    made["odd"] = catalog(*every[:4], bad, *every[4:])
    made["one defect"] = catalog(*(checkpoint(f"s{n}", step=n, suspect=some) for n in range(99)))
    made["sentences"] = catalog(
        checkpoint("a", "1", step=1, notes=("inferred",)),
        checkpoint("b", "1", step=2, suspect=("odd",)),
        checkpoint("c", "2", step=3, notes=("not shown",), suspect=("odd",)),
        selected=("a",),
        findings=(
            Finding("QA015", "warn", "c", None, "`c` is a mix", "leave it"),
            Finding("QA009", "warn", "a", None, "told in the table", ""),
        ),
        remarks=("a remark",),
    )
    made["one commit"] = catalog(*(checkpoint(n, commit="0" * 40) for n in ("step9", "main")))
    made["a size"] = catalog(checkpoint("a"), nbytes={"a": 7_000_000})
    made["long"] = catalog(checkpoint(long, step=1))
    return made


def catalogs():
    for name, found in series().items():
        yield name, render_catalog(found)
        if name in ("folded", "long"):
            yield f"{name}, whole", render_catalog(found, everything=True, width=80)
            yield f"{name}, json", catalog_to_json(found)


def documents():
    errors = table(
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
    page = Page(
        "An audit",
        prose("Ship `soup` at gptq-4bit."),
        (
            paragraph("64 documents."),
            Section("Errors", (errors,)),
            Section("More", (fold("2 notes", bullets("one", "`two`")),), expendable=2),
            Section("Along", (Figure("course", "The course", lines=("rtn  _.:",)),), expendable=1),
            Section("Again", (CodeBlock("qaudit scan demo", "sh"),)),
        ),
    )
    yield "markdown", markdown.render(page, pictures_at="plots")
    yield "dark", markdown.render(page, pictures_at="plots", has_dark=True)
    least = len(markdown.render(page).encode()) - 1  # the most expendable is left out, whole
    yield "cut", markdown.render(page, limit_nbytes=least)
    yield "folded", markdown.render(replace(page, is_folded=True))
    yield from ((f"terminal {width}", terminal.render(page, width)) for width in (30, 80))
    names = tuple(f"gptq-3bit:group={k}" for k in range(12))
    wide = table(("", *names), [(name_cell("\u6aa2\u67e5"), *["1.00"] * 12)])
    yield "wide", terminal.render(Page("t", prose("x"), (wide,)), 60)
    lines = Lines((prose("4 bits: `soup`."), prose("Not covered: 1 in 21.")))
    page = Page("An audit", prose("SHIP."), (lines,))
    yield "lines", f"{markdown.render(page)}\n{terminal.render(page)}"
    yield "lines, html", Blocks({}).block(lines, "An audit")


# ------------------------------------------------------------------ figures


def charts():
    margins = {"8": 0.005, "4": 0.02, "3": 0.08}
    made = [verdicts.class_verdict(bits, margin=margin) for bits, margin in margins.items()]
    tasks = sample.judged(tuple(map(answered, sample.measurements()))).tasks
    whole = replace(verdicts.with_verdict(verdicts.verdict(*made)), tasks=tasks)
    plain, apart = sample.many(6, 2), []
    for k, subject in enumerate(plain.subjects):
        place = {"step": k % 3, "tokens": 8192 * (k % 3), "stage": ("half", "tenth")[k // 3]}
        again = replace(subject.first, **place, ingredient=None, family=None)  # type: ignore[arg-type]
        apart.append(replace(subject, members=((again, 1.0),)))
    runs = replace(plain, subjects=tuple(apart))
    for audit, names in ((whole, [*DRAWERS]), (runs, ["trajectory"])):
        for name in names:
            with drawing():
                chart = DRAWERS[name](View(audit))
            words = [text.get_text() for text in chart.figure.findobj(Text)]
            lines = [
                f"{line.get_color()} {line.get_linestyle()} {line.get_marker()} "
                + " ".join(f"{x:.4g},{y:.4g}" for x, y in line.get_xydata())  # type: ignore[union-attr]
                for axes in chart.figure.axes
                for line in axes.lines
            ]
            tips = [f"{group} {' | '.join(said)}" for group, said in chart.tips.items()]
            yield name, "\n".join([chart.note, *dict.fromkeys(filter(None, words)), *lines, *tips])


SHOWN = {
    "charts": charts,
    "pages": pages,
    "screens": screens,
    "gates": of_gates,
    "differences": of_differences,
    "plans": plans,
    "series": catalogs,
    "documents": documents,
}


def shown(name):
    return "".join(f"======== {title}\n{text}\n" for title, text in SHOWN[name]())


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_shown_is_as_written(name):
    assert shown(name) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_no_name_brings_a_control_character_or_markup_and_terminals_are_80_wide():
    for title, text in (*of_gates(), *of_differences()):
        assert all(c.isprintable() or c == "\n" for c in text), title
        if title.endswith("terminal"):
            assert max(map(width_of, text.splitlines())) <= 80, title
        if title.endswith("md"):
            outside = re.sub(r"`[^`\n]*`", "", text)
            assert "<script" not in outside and "](" not in outside, title


@given(st.text(), st.text())
def test_no_name_in_a_plan_moves_the_cursor(label, note):
    subject = Subject(label, sample.series()[0].members)
    text = render_plan(replace(sample.audit().plan, subjects=(subject,), notes=(note,)))
    assert all(c.isprintable() or c == "\n" for c in text)


LABELS = st.text(st.characters(codec="utf-8"), max_size=200)


@given(st.lists(LABELS, min_size=1, max_size=8, unique=True), st.integers(80, 120))
def test_whatever_the_names_no_line_is_wider(names, width):
    found = tuple(checkpoint(name, step=k, stage="stage1") for k, name in enumerate(names))
    catalog = Catalog(("o/n",), found, frozenset(names))
    text = render_catalog(catalog, width=width, everything=True)
    assert max(map(len, text.split("\n"))) <= width
    assert all(c.isprintable() for c in text if c != "\n")
    assert len(text.split("\n\n")[1].split("\n")) == 1 + len(names)


def main():
    for name in SHOWN:
        (FOLDER / f"{name}.txt").write_text(shown(name), encoding="utf-8")


if __name__ == "__main__":
    main()
