"""What changed between two audits: paired on what both have, in a unit that means the same."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qaudit.core import statistics
from qaudit.errors import AuditError
from qaudit.judge.diff import Side, diff
from qaudit.types import FULL_PRECISION, Fidelity, Interval
from tests.support import sample
from tests.support.filled import filled

LABELS = ("stage1-step5000", "soup")
SCHEMES = ("fp", "gptq-4bit", "gptq-3bit")
COLUMNS = ("nll_sum", "tokens", "nbytes")


@cache
def found(documents=40, seed=0):
    every = sample.measurements(documents, seed)
    return tuple(m for m in every if m.subject in LABELS and m.scheme in SCHEMES)


def side(measurements, name="a", *, confidence=0.95):
    audit = sample.audit()
    recipe = replace(audit.plan.recipe, confidence=confidence)
    subjects = tuple(s for s in audit.subjects if s.label in LABELS)
    audit = replace(audit, subjects=subjects, plan=replace(audit.plan, recipe=recipe))
    return Side(name, audit, measurements)


def each(measurements, change):
    return tuple(replace(m, evidence=change(m)) for m in measurements)


def part(evidence, keep, prefix=""):
    """Return some documents, in another order if asked for."""
    names = tuple(prefix + evidence.document_sha256[k] for k in keep)
    columns = {name: getattr(evidence, name)[keep] for name in COLUMNS}
    return replace(evidence, document_sha256=names, **columns)


def worse(measurements, scheme, by):
    return tuple(
        sample.with_loss(m, m.evidence.nll_sum * (1 + by)) if m.scheme == scheme else m
        for m in measurements
    )


def delta(difference, subject, scheme):
    (one,) = [d for d in difference.deltas if (d.subject, d.scheme) == (subject, scheme)]
    return one


def loss_of(measurements, subject, scheme):
    (one,) = [m for m in measurements if (m.subject, m.scheme) == (subject, scheme)]
    return one


def near(interval, other):
    ends = [[getattr(i, n) for n in ("estimate", "low", "high")] for i in (interval, other)]
    return ends[0] == pytest.approx(ends[1], rel=1e-9, abs=1e-12)


def test_an_audit_does_not_differ_from_itself():
    same = diff(side(found()), side(found(), "b"))
    assert {d.loss_reading for d in same.deltas} == {"same"}
    assert {d.relative_error_reading for d in same.deltas} == {"same", None}
    assert same.protocol == same.software == same.specs == same.subjects == same.schemes == ()
    assert not same.pick_changed
    turned = each(found(), lambda m: part(m.evidence, list(reversed(range(40)))))
    difference = diff(side(found()), side(turned, "b"))  # the same documents in another order
    assert difference.paired
    assert {d.loss_reading for d in difference.deltas} == {"same"}
    assert diff(side(found()), side(found(), "b", confidence=0.9)).confidence == 0.9
    with pytest.raises(AuditError, match="`b` measured nothing"):
        diff(side(found()), side((), "b"))


def test_numbers_are_those_of_the_paired_statistics_at_a_level_for_all():
    """Two routes to one number: a difference of ratios here, a ratio of differences there."""
    after = worse(found(), "gptq-4bit", 0.02)
    difference = diff(side(found()), side(after, "b"))
    assert difference.at_once == 6 + 4  # losses, and relative errors of what is quantized
    level = 1 - 0.05 / 10
    for subject in LABELS:
        q, f, n, w = (
            loss_of(which, subject, scheme).evidence
            for which in (found(), after)
            for scheme in ("gptq-4bit", FULL_PRECISION)
        )
        got = delta(difference, subject, "gptq-4bit")
        assert near(got.loss, statistics.absolute_change(n.nll_sum, q.nll_sum, q.tokens, level))
        four = (n.nll_sum, w.nll_sum, q.nll_sum, f.nll_sum)
        plain = statistics.interval(four, statistics.excess_difference, level)
        assert near(got.relative_error, plain)
        assert (got.loss_reading, got.relative_error_reading) == ("worse", "worse")
    assert delta(difference, "soup", "fp").loss_reading == "same"
    assert delta(difference, "soup", "fp").relative_error_reading is None


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_to_turn_the_two_around_turns_the_sign(seed, paired):
    draw = np.random.default_rng(seed)
    after = tuple(
        sample.with_loss(m, m.evidence.nll_sum * np.exp(0.05 * draw.standard_normal(40)))
        for m in found()
    )
    if not paired:
        after = each(after, lambda m: part(m.evidence, list(range(40)), "other "))
    one, two = side(found()), side(after, "b")
    for there, back in filled(zip(diff(one, two).deltas, diff(two, one).deltas, strict=True)):
        for got, turned in ((there.loss, back.loss), (there.relative_error, back.relative_error)):
            if got is not None and turned is not None:
                assert near(got, Interval(-turned.estimate, -turned.high, -turned.low))


def test_what_both_have_is_compared_where_one_has_more():
    fewer = each(found(), lambda m: part(m.evidence, list(range(5, 30))))
    after = worse(found(), "gptq-3bit", 0.01)
    difference = diff(side(fewer), side(after, "b"))
    assert (difference.paired, difference.shared_documents) == (True, 25)
    assert difference.documents == (25, 40)
    assert "25 documents that both have" in difference.notes[0]
    whole = each(after, lambda m: part(m.evidence, list(range(5, 30))))
    assert difference.deltas == diff(side(fewer), side(whole, "b")).deltas

    tokens = np.where(np.arange(40) < 2, np.arange(40), 20)
    short = each(found(), lambda m: replace(m.evidence, tokens=tokens))
    assert diff(side(short), side(short, "b")).shared_documents == 39  # one has no token


def test_fewer_than_ten_documents_are_not_paired_and_give_no_reading():
    apart = each(found(), lambda m: part(m.evidence, [*range(31, 40)]))
    rest = each(found(80), lambda m: part(m.evidence, list(range(40, 80)), "other "))
    mixed = tuple(
        replace(m, evidence=_joined(m.evidence, n.evidence))
        for m, n in zip(apart, rest, strict=True)
    )
    difference = diff(side(found()), side(mixed, "b"))
    assert not difference.paired
    assert difference.shared_documents == 9
    assert "too few to pair on" in difference.notes[0]
    few = each(found(), lambda m: part(m.evidence, list(range(6))))
    difference = diff(side(few), side(worse(few, "gptq-3bit", 0.5), "b"))
    assert delta(difference, "soup", "gptq-3bit").loss_reading == "unclear"


def _joined(a, b):
    columns = {name: np.concatenate([getattr(a, name), getattr(b, name)]) for name in COLUMNS}
    return replace(a, document_sha256=a.document_sha256 + b.document_sha256, **columns)


def test_unpaired_intervals_reach_as_far_as_both_do_together():
    other = each(found(), lambda m: part(m.evidence, list(range(40)), "other "))
    difference = diff(side(found()), side(worse(other, "gptq-3bit", 0.5), "b"))
    assert difference.unit == "bits per byte"  # nothing tells that the tokenizer is the same
    got = delta(difference, "soup", "gptq-3bit")
    level, after = 1 - 0.05 / difference.at_once, worse(found(), "gptq-3bit", 0.5)
    pair = [loss_of(each_side, "soup", "gptq-3bit").evidence for each_side in (found(), after)]
    sums = [(one.nll_sum, one.nbytes * math.log(2)) for one in pair]
    left, right = (statistics.interval(one, statistics.per_token, level) for one in sums)
    assert got.loss.estimate == pytest.approx(right.estimate - left.estimate)
    below = (right.estimate - right.low) ** 2 + (left.high - left.estimate) ** 2
    above = (right.high - right.estimate) ** 2 + (left.estimate - left.low) ** 2
    assert got.loss.estimate - got.loss.low == pytest.approx(math.sqrt(below))
    assert got.loss.high - got.loss.estimate == pytest.approx(math.sqrt(above))
    narrow = delta(diff(side(found()), side(after, "b")), "soup", "gptq-3bit").relative_error
    assert narrow.high - narrow.low < got.relative_error.high - got.relative_error.low
    equal = delta(difference, "soup", "fp")
    assert (equal.loss.estimate, equal.loss_reading) == (0.0, "unclear")  # not the same: unpaired


def test_another_tokenizer_is_compared_in_bits_per_byte_where_bytes_were_counted():
    halved = each(found(), lambda m: replace(m.evidence, tokens=m.evidence.tokens // 2 + 1))
    difference = diff(side(found()), side(halved, "b"))
    assert (difference.paired, difference.unit) == (True, "bits per byte")
    assert "another tokenizer" in difference.notes[0]
    assert {d.loss_reading for d in difference.deltas} == {"same"}  # the bytes cost as much
    # A limit of tokens per document makes counts equal whatever the tokenizer; bytes tell.
    longer = each(found(), lambda m: replace(m.evidence, nbytes=m.evidence.nbytes + 7))
    assert diff(side(found()), side(longer, "b")).unit == "bits per byte"
    unknown = each(halved, lambda m: replace(m.evidence, nbytes=0 * m.evidence.nbytes))
    difference = diff(side(found()), side(unknown, "b"))
    assert {d.loss for d in difference.deltas} == {None}
    assert {d.relative_error_reading for d in difference.deltas} == {"same", None}
    assert "bytes were not counted" in difference.notes[0]
    assert difference.at_once == 4


def test_a_loss_that_is_not_finite_is_unclear_and_kept_out_of_nothing_else():
    broken = tuple(
        sample.with_loss(m, np.full(40, np.inf)) if (m.subject, m.scheme) == ("soup", "fp") else m
        for m in found()
    )
    difference = diff(side(found()), side(broken, "b"))
    assert delta(difference, "soup", "fp").loss_reading == "unclear"
    assert delta(difference, "soup", "gptq-4bit").relative_error_reading == "unclear"
    assert delta(difference, "soup", "gptq-4bit").loss_reading == "same"


def test_circumstances_that_differ_are_named():
    other = sample.series()
    one, two = side(found()), side(tuple(m for m in found() if m.scheme != "gptq-3bit"), "b")
    step = other[3]
    audit = replace(
        two.audit,
        protocol={**two.audit.protocol, "context": 512},
        environment={**two.audit.environment, "libraries": {"torch": "2.14.0", "numpy": "3"}},
        subjects=(two.audit.subjects[0], replace(step, label="soup"), replace(step, label="new")),
        pick=None,
    )
    again = tuple(replace(m, spec="gptq:bits=4:damp=0.1") for m in two.measurements[1:])
    two = Side("b", audit, (two.measurements[0], *again))
    difference = diff(one, two)
    assert [(c.what, c.a, c.b) for c in difference.protocol] == [("context", "256", "512")]
    versions = {c.what: (c.a, c.b) for c in difference.software}
    changed = {"torch": ("2.13.0", "2.14.0"), "numpy": (None, "3")}
    assert versions.items() >= {**changed, "transformers": ("5.23.0", None)}.items()
    assert difference.weights == ("soup",)
    assert "gptq-4bit" in [c.what for c in difference.specs]
    assert [(c.what, c.a is None) for c in difference.subjects] == [("new", True)]
    assert [(c.what, c.b is None) for c in difference.schemes] == [("gptq-3bit", True)]
    assert difference.pick_changed


def with_kl(measurements, times=1.0):
    """Return measurements with a divergence of every quantized document."""

    def evidence(m):
        if m.scheme == FULL_PRECISION:
            return m.evidence
        count = len(m.evidence.tokens)
        kl = times * np.random.default_rng(len(m.spec)).gamma(2, 0.05, count) * m.evidence.tokens
        whole = np.zeros(count, dtype=np.int64)
        return replace(
            m.evidence, fidelity=Fidelity(kl, kl, np.zeros((count, 2), np.int64), whole, kl)
        )

    return each(measurements, evidence)


def test_a_change_of_divergence_is_paired_on_documents():
    a, b = with_kl(found()), with_kl(found(), 1.2)
    difference = diff(side(a), side(b, "b"))
    assert difference.at_once == 6 + 4 + 4  # losses, relative errors, divergences
    changed = delta(difference, "soup", "gptq-3bit")
    m, n = (loss_of(each_side, "soup", "gptq-3bit").evidence for each_side in (a, b))
    sums = (n.fidelity.kl_sum, m.fidelity.kl_sum, m.tokens)
    level = statistics.simultaneous(0.95, 14)
    assert near(changed.kl, statistics.interval(sums, statistics.change, level))
    assert (changed.kl_reading, changed.loss_reading) == ("worse", "same")
    # Divergences are compared where both have them of the same tokens.
    mine = side(with_kl(found()))
    same = diff(mine, side(with_kl(found()), "b"))
    assert {d.kl_reading for d in same.deltas} == {"same", None}
    assert all(d.kl is None for d in filled(same.deltas) if d.scheme == FULL_PRECISION)
    difference = diff(side(found()), side(with_kl(found()), "b"))
    assert {(d.kl, d.kl_reading) for d in difference.deltas} == {(None, None)}
    assert difference.at_once == 10
    other = each(with_kl(found()), lambda m: replace(m.evidence, tokens=m.evidence.tokens + 1))
    assert all(d.kl is None for d in filled(diff(mine, side(other, "b")).deltas))
