import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from qaudit.core import statistics
from qaudit.errors import AuditError
from qaudit.judge import judge
from qaudit.judge.gate import GateInput
from qaudit.judge.scores import judge_difference
from qaudit.judge.table import Measurements, Moved
from qaudit.types import Interval
from tests.support import sample
from tests.support.items import items_of

SOUP, LAST, END = "soup", "stage2-ingredient3-step1000", "stage1-step5000"


def judged(*, documents=64, **changes):
    if not changes:
        return judged_plainly(documents)
    found = sample.measurements(documents)
    table = Measurements.of(sample.series(), found, changes.pop("confidence", 0.95))
    return judge(table, sample.files(found), **changes)


@cache
def judged_plainly(documents):
    """Judge the sample once for all tests that change nothing."""
    return sample.judged(sample.measurements(documents))


def measured(subject, scheme, documents=64):
    return next(
        m for m in sample.measurements(documents) if (m.subject, m.scheme) == (subject, scheme)
    )


def edited(subject, scheme, **changes):
    """Return the sample with the evidence of one measurement changed."""
    return tuple(
        replace(m, evidence=replace(m.evidence, **changes))
        if (m.subject, m.scheme) == (subject, scheme)
        else m
        for m in sample.measurements()
    )


def comparison(found, kind, scheme, a, b):
    (one,) = [c for c in found.comparisons if (c.kind, c.scheme, c.a, c.b) == (kind, scheme, a, b)]
    return one


def findings(found, rule):
    return [f for f in found.findings if f.rule == rule]


def score(found, subject, scheme):
    """Return the first row of a subject under a scheme."""
    return next(s for s in found.measurements if (s.subject, s.scheme) == (subject, scheme))


def of_soup(change):
    """Return the sample with another loss of the soup at three bits, made of its two losses."""
    full, nll = (measured(SOUP, scheme).evidence.nll_sum for scheme in ("fp", "gptq-3bit"))
    return edited(SOUP, "gptq-3bit", nll_sum=change(full, nll))


# ------------------------------------------------------------------ scores


def test_every_measurement_becomes_a_score_with_its_evidence():
    found = judged()
    assert len(found.measurements) == len(sample.measurements())
    for score, m in zip(found.measurements, sample.measurements(), strict=True):
        assert (score.subject, score.spec) == (m.subject, m.spec)
        assert score.ce.estimate == pytest.approx(m.evidence.nll_sum.sum() / score.tokens)
        assert score.perplexity == pytest.approx(math.exp(score.ce.estimate))
        assert (score.relative_error is None) == (m.scheme == "fp")
        assert score.evidence.endswith(f"{m.subject}--{m.scheme}.npz")


def test_changes_are_measured_against_the_same_subject_in_full_precision():
    q, fp = measured(SOUP, "rtn-3bit").evidence, measured(SOUP, "fp").evidence
    row = score(judged(), SOUP, "rtn-3bit")
    assert row.relative_error == statistics.relative_error(q.nll_sum, fp.nll_sum)
    assert row.absolute_change == statistics.absolute_change(q.nll_sum, fp.nll_sum, q.tokens)
    found = sample.judged(sample.without(sample.measurements(), SOUP, "fp"))
    row = score(found, SOUP, "rtn-3bit")
    assert row.relative_error is None
    assert math.isfinite(row.ce.estimate)


def test_documents_without_a_scored_token_do_not_count():
    def longer(e):
        columns = {name: np.append(getattr(e, name), 0) for name in ("tokens", "nll_sum", "nbytes")}
        return replace(e, document_sha256=(*e.document_sha256, "0" * 64), **columns)

    found = tuple(replace(m, evidence=longer(m.evidence)) for m in sample.measurements())
    assert sample.judged(found).measurements == judged().measurements


def test_what_cannot_be_compared_or_judged_is_refused():
    found, series = sample.measurements(), sample.series()
    under = f"`{SOUP}` under `gptq-4bit`.*different"
    for made, said in (
        (edited(SOUP, "gptq-4bit", document_sha256=("x",) * 64), f"{under} documents"),
        (edited(SOUP, "gptq-4bit", tokens=np.full(64, 7)), f"{under} tokens"),
        (
            (*found, replace(found[0], subject="another")),
            "`another` was measured and is no subject",
        ),
        ((*found, found[0]), "measured twice under `fp`"),
    ):
        with pytest.raises(AuditError, match=said) as refusal:
            sample.judged(made)
        assert refusal.value.hint
    with pytest.raises(AuditError, match="two subjects are named"):
        sample.judged(found, (*series, series[0]))
    with pytest.raises(AuditError, match="there is no evidence for `stage1-step500`"):
        judge(Measurements.of(series, found, 0.95), {})
    for confidence in (0.0, 1.0, 95.0):
        with pytest.raises(AuditError, match="not between 0 and 1"):
            judged(confidence=confidence)


# ------------------------------------------------------------------ comparisons


def test_a_soup_is_compared_with_every_member_under_every_scheme():
    pairs = {(c.b, c.scheme) for c in judged().comparisons if c.a == SOUP}
    members = {f"stage2-ingredient{k}-step1000" for k in (1, 2, 3)}
    assert pairs == {(b, s) for b in members for s in ("fp", *sample.SCHEMES)}
    assert {c.b for c in judged().comparisons if c.a == LAST} == {END}

    series = sample.series()  # and with the last checkpoint, which it may have left out
    smaller = replace(series[-1], members=series[-1].members[:2])
    found = sample.judged(sample.measurements(), (*series[:-1], smaller))
    assert LAST in {c.b for c in found.comparisons if c.a == SOUP}


def test_the_three_kinds_answer_three_questions():
    found = judged()
    aq, af = (measured(SOUP, s).evidence.nll_sum for s in ("gptq-3bit", "fp"))
    bq, bf = (measured(LAST, s).evidence.nll_sum for s in ("gptq-3bit", "fp"))
    tokens = measured(SOUP, "fp").evidence.tokens.sum()
    expected = {
        "outright": (aq.sum() - bq.sum()) / tokens,
        "difference_of_differences": ((aq - af).sum() - (bq - bf).sum()) / tokens,
        "relative_error_difference": aq.sum() / af.sum() - bq.sum() / bf.sum(),
    }
    for kind, value in expected.items():
        one = comparison(found, kind, "gptq-3bit", SOUP, LAST)
        assert one.interval.estimate == pytest.approx(value)
    assert {c.kind for c in found.comparisons if c.scheme == "fp"} == {"outright"}


def test_verdicts_compare_the_interval_with_zero_and_few_documents_give_none():
    for interval, verdict in (
        (Interval(-2, -3, -1), "a_better"),
        (Interval(2, 1, 3), "b_better"),
        (Interval(0.5, -1, 2), "inconclusive"),
        (Interval(0, 0, 0), "equivalent"),
        (Interval(2, 0, 4), "inconclusive"),
    ):
        assert judge_difference(interval, 64) == verdict
    found = judged(documents=9)
    assert {c.verdict for c in found.comparisons} == {"inconclusive"}
    assert findings(found, "QA004")[0].outcome == "inconclusive"
    assert not findings(found, "QA005")


def test_the_pick_has_the_lowest_quantized_loss_of_four_bits_or_else_of_the_most():
    pick = judged().pick
    losses = {
        (s.subject, s.scheme): s.ce.estimate
        for s in judged().measurements
        if s.scheme.endswith("4bit") or s.scheme == "bnb-nf4"
    }
    first, second, *_ = sorted(losses, key=losses.__getitem__)
    assert (pick.subject, pick.scheme) == first
    assert (pick.runner_up, pick.runner_up_scheme) == second
    assert pick.interval.estimate == pytest.approx(losses[first] - losses[second])

    def picked(*names):
        found = tuple(m for m in sample.measurements() if m.scheme in ("fp", *names))
        pick = sample.judged(found).pick
        return pick and pick.scheme

    assert picked("bnb-int8", "awq-3bit", "bnb-nf4") == "bnb-nf4"
    assert picked("awq-3bit", "bnb-int8") == "bnb-int8"
    assert picked() is None


def test_a_broken_model_is_not_picked_and_one_that_ignores_the_text_is_named():
    best = judged().pick
    nll = measured(best.subject, "gptq-4bit").evidence.nll_sum * np.nan
    found = sample.judged(edited(best.subject, "gptq-4bit", nll_sum=nll))
    assert found.pick is not None and found.pick.subject == best.runner_up
    (finding,) = findings(found, "QA006")
    assert (finding.level, finding.subject, finding.scheme) == ("error", best.subject, "gptq-4bit")
    tokens = measured(LAST, "fp").evidence.tokens
    found = sample.judged(edited(LAST, "fp", nll_sum=tokens * 8.0))
    (finding,) = findings(found, "QA028")
    assert (finding.level, finding.subject) == ("error", LAST)
    assert "8.0000 nats per token on each of 64 documents" in finding.message
    assert not findings(judged(), "QA028")


# ------------------------------------------------------------------ findings


def test_a_close_runner_up_is_said_with_the_documents_that_would_settle_it():
    best = judged().pick
    winner = measured(best.subject, "gptq-4bit").evidence
    wobble = np.where(np.arange(64) % 2, 0.02, -0.019) * winner.tokens
    found = sample.judged(edited(best.runner_up, "gptq-4bit", nll_sum=winner.nll_sum + wobble))
    (finding,) = findings(found, "QA002")
    assert finding.outcome == "inconclusive"
    assert "documents to decide; 64 were measured" in finding.hint
    assert not findings(judged(), "QA002")


def test_notes_are_said_once_and_losing_least_and_growth_are_found():
    found = judged()
    notes = findings(found, "QA003")
    assert [f.scheme for f in notes] == ["awq-4bit", "awq-3bit"]
    assert "and 14 more" in notes[0].message
    (least,) = findings(found, "QA007")  # told from being best
    errors = {
        s.subject: s.relative_error.estimate
        for s in found.measurements
        if s.scheme == "gptq-4bit" and s.relative_error
    }
    assert least.subject == min(errors, key=errors.__getitem__)
    grown = {f.scheme for f in findings(found, "QA008")}  # since the stage before
    assert grown == {
        c.scheme
        for c in found.comparisons
        if c.a == LAST and c.kind == "relative_error_difference" and c.interval.low > 0
    }
    assert "gptq-3bit" in grown


def test_the_last_checkpoint_is_named_when_another_is_clearly_better():
    ahead = 0.97 * measured(SOUP, "gptq-4bit").evidence.nll_sum
    found = sample.judged(edited(SOUP, "gptq-4bit", nll_sum=ahead))
    (finding,) = findings(found, "QA005")
    ends = [f"stage2-ingredient{k}-step1000" for k in (1, 2, 3)]
    last = min(ends, key=lambda label: measured(label, "gptq-4bit").evidence.nll_sum.sum())
    assert finding.subject == last  # the best of those that the series ends in
    wide = finding.interval
    assert wide.low > 0
    alone = comparison(found, "outright", "gptq-4bit", SOUP, last).interval
    assert wide.high - wide.low > alone.high - alone.low  # all subjects were compared at once
    nll = measured(LAST, "gptq-4bit").evidence.nll_sum * 0.9
    assert not findings(sample.judged(edited(LAST, "gptq-4bit", nll_sum=nll)), "QA005")


# ------------------------------------------------------------------ choices


def with_choices(scheme, likeliest):
    """Return a measurement of the soup whose likeliest option of each three is as given."""
    nll = np.concatenate([np.where(np.arange(3) == best, 1.0, 2.0) for best in likeliest])
    m = measured(SOUP, scheme)
    return replace(m, evidence=replace(m.evidence, tasks=(items_of(nll, options=3),)))


def test_choices_are_scored_by_the_likeliest_option_and_paired_with_full_precision():
    full, quantized = [0, 0, 0, 1, 2] * 4, [0, 0, 1, 1, 2] * 4
    found = sample.judged((with_choices("fp", full), with_choices("gptq-4bit", quantized)))
    by_scheme = {t.scheme: t for t in found.tasks}
    assert by_scheme["fp"].accuracy.estimate == pytest.approx(0.6)
    assert by_scheme["fp"].accuracy_drop is None
    drop = by_scheme["gptq-4bit"].accuracy_drop.estimate
    assert (drop, by_scheme["gptq-4bit"].items) == (pytest.approx((0.6 - 0.4) / 0.4), 20)


def test_a_row_names_the_documents_for_an_interval_of_a_tenth():
    """Between the normal formula, which is too few, and the square of widths, which is too many."""
    found = judged(documents=200)
    sums = {(m.subject, m.scheme): m.evidence for m in sample.measurements(200)}
    rows = [s for s in found.measurements if s.documents_for_loss is not None]
    assert rows
    for row in rows:
        change = row.relative_error
        needed = row.documents_for_loss
        own, full = (sums[row.subject, scheme] for scheme in (row.scheme, "fp"))
        residual = own.nll_sum - full.nll_sum * (1 + change.estimate)
        scatter = np.std(residual, ddof=1) / full.nll_sum.mean()
        assert needed >= (1.96 * scatter / (0.1 * change.estimate)) ** 2 * 0.98
        reach = max(change.high - change.estimate, change.estimate - change.low)
        # Ten documents are the least, and below a hundred t is wider than with 200.
        assert needed <= 200 * (reach / (0.1 * change.estimate)) ** 2 * 1.1 + 12


def test_the_intervals_of_several_soups_and_of_all_that_a_search_tried_hold_at_once():
    found, series = sample.measurements(), sample.series()
    twin = tuple(replace(m, subject="other") for m in found if m.subject == SOUP)
    table = Measurements.of((*series, replace(series[-1], label="other")), (*found, *twin), 0.95)
    several = judge(table, sample.files((*found, *twin)))
    where = ("outright", "gptq-4bit", SOUP, LAST)
    a, b = (measured(label, "gptq-4bit").evidence for label in (SOUP, LAST))
    for judgement, level in ((judged(), 0.95), (several, 1 - 0.05 / 2)):
        alone = statistics.absolute_change(a.nll_sum, b.nll_sum, a.tokens.astype(float), level)
        assert comparison(judgement, *where).interval == alone
    ends = ("outright", "gptq-4bit", LAST, END)
    assert comparison(several, *ends).interval == comparison(judged(), *ends).interval
    table = Measurements.of(series, found, 0.95)
    searched = judge(table, sample.files(found), GateInput(table, searched={SOUP: 5}))
    wide, alone = (comparison(found, *where).interval for found in (searched, judged()))
    assert wide.high - wide.low > alone.high - alone.low


def test_a_document_that_carries_much_of_the_damage_is_named_and_none_of_almost_none():
    rarely = np.where(np.arange(64) == 7, 50, 1)
    found = sample.judged(of_soup(lambda full, nll: full + rarely * (nll - full)))
    (finding,) = findings(found, "QA029")
    assert (finding.subject, finding.scheme) == (SOUP, "gptq-3bit")
    row = score(found, SOUP, "gptq-3bit")
    q, fp = (measured(SOUP, scheme).evidence for scheme in ("gptq-3bit", "fp"))
    added = rarely * (q.nll_sum - fp.nll_sum)
    assert row.worst_share == pytest.approx(added[7] / added.sum())
    assert f"carries {100 * row.worst_share:.0f} %" in finding.message
    assert q.document_sha256[7][:12] in finding.hint
    assert not findings(judged(), "QA029")

    # As with 8 bits, where gains and losses cancel: 63 % of nothing.
    def nearly(added_of_one):
        def lost(full, _):
            added = 1e-4 * full * np.where(np.arange(len(full)) % 2, 1.0, -1.0)
            added -= added.sum() / len(added)
            added[7] += added_of_one * full.sum()
            return full + added

        return sample.judged(of_soup(lost))

    found = nearly(1e-6)
    share = score(found, SOUP, "gptq-3bit").worst_share
    assert share is not None and share > 0.5
    assert not findings(found, "QA029")
    assert not findings(nearly(9e-4), "QA029")
    (finding,) = findings(nearly(2e-3), "QA029")
    assert finding.scheme == "gptq-3bit"


# ------------------------------------------------------------------ repeats


def drawn(*scales):
    """Return the sample with more draws of one scheme: the first one's damage, scaled."""
    found = sample.measurements()
    full = {m.subject: m.evidence.nll_sum for m in found if m.scheme == "fp"}

    def damage(m, scale):
        return full[m.subject] + scale * (m.evidence.nll_sum - full[m.subject])

    more = tuple(
        replace(sample.with_loss(m, damage(m, scale)), calibration_seed=seed)
        for seed, scale in enumerate(scales, start=1)
        for m in found
        if m.scheme == "gptq-4bit"
    )
    return (*found, *more)


def noise_of(found, subject, scheme):
    (one,) = [n for n in found.noise if (n.subject, n.scheme) == (subject, scheme)]
    return one


def test_every_draw_has_its_row_and_the_first_is_judged():
    first, more = judged(), sample.judged(drawn(1.5, 0.8))
    assert all(row in more.measurements for row in first.measurements)
    assert len(more.measurements) == len(first.measurements) + 2 * len(sample.series())
    assert (more.comparisons, more.pick, more.verdict) == (
        first.comparisons, first.pick, first.verdict
    )  # fmt: skip
    row, cell = noise_of(more, LAST, "gptq-4bit"), (LAST, "gptq-4bit")
    rows = [m for m in more.measurements if (m.subject, m.scheme) == cell]
    errors = [m.relative_error.estimate for m in rows]
    assert row.draws == len(errors) == 3
    assert row.draw == pytest.approx(np.std(errors, ddof=1))
    assert row.interval == score(first, LAST, "gptq-4bit").relative_error


def test_the_floor_stands_in_the_units_of_the_loss_and_of_the_error():
    found = drawn(1.01)
    floor = {(LAST, "gptq-4bit"): Moved(0.002, 0.01, 0.1), (LAST, "fp"): Moved(0.0, 1e-12)}
    table = Measurements.of(sample.series(), found, 0.95)
    judgement = judge(table, sample.files(found), floor=floor)
    row, full = noise_of(judgement, LAST, "gptq-4bit"), noise_of(judgement, LAST, "fp")
    ce = score(judgement, LAST, "fp").ce.estimate
    assert row.numerical_nats == 0.002
    assert row.numerical == pytest.approx(0.002 / ce)
    assert (full.numerical, full.interval, full.draw) == (0.0, None, None)
    assert (row.kl_floor, row.top1_floor) == (0.01, 0.1)
    assert (full.kl_floor, full.top1_floor) == (1e-12, None)
    assert noise_of(judgement, SOUP, "gptq-4bit").numerical is None


def test_documents_with_equal_losses_everywhere_are_a_finding():
    def copied(*schemes):
        made = []
        for m in sample.measurements():
            names = ("nll_sum", "tokens", "nbytes")
            columns = {name: getattr(m.evidence, name).copy() for name in names}
            for name in names if m.scheme in schemes else names[1:]:
                columns[name][5] = columns[name][2] * (1 + 1e-8 * (name == "nll_sum"))
            made.append(replace(m, evidence=replace(m.evidence, **columns)))
        return findings(sample.judged(tuple(made)), "QA046")

    (finding,) = copied("fp", *sample.SCHEMES)
    assert "1 of 64 documents have the losses of another" in finding.message
    assert not copied("fp")  # by chance
