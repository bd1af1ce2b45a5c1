"""What names and hashes tell before any weight is fetched."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core.course import (
    NO_WEIGHTS,
    bad_report,
    equal_report,
    is_bad_report,
    names_in_equal_report,
)
from qaudit.judge.rules import content_findings
from qaudit.types import Checkpoint, Ref, Subject, WeightFile


def checkpoint(label, *hashes, **known):
    files = tuple(WeightFile(f"shard{k}", 1, sha) for k, sha in enumerate(hashes))
    return Checkpoint(Ref("o/n", label), label, files, commit="c", **known)  # type: ignore[arg-type]


def step(number, *hashes, **known):
    return checkpoint(f"step{number}", *hashes, step=number, **known)


def end(ingredient, *hashes, tokens=None, **known):
    label = f"i{ingredient}" + (f"-{tokens}B" if tokens else "")
    return checkpoint(
        label, *hashes, stage="s2", ingredient=ingredient, step=9, tokens=tokens, **known
    )


def found(*checkpoints, soups=()):
    return [(f.rule, f.message) for f in content_findings(checkpoints, soups)]


def only(*checkpoints, soups=()):
    (finding,) = content_findings(checkpoints, soups)
    assert finding.hint
    assert finding.scheme is None
    return finding


# ---------------------------------------------------------------------------------- equal weights


NO_SHARDS = (bad_report("its first shard is another's", "http://x"),)
EQUAL = (equal_report(("step1", "step3"), "they serve the same weights", "http://x"),)
PLACE = (equal_report(("i1-100B", "i1-101B"), None, one_place=True),)
TWO_SETS = ("`model.safetensors` lies beside the shards",)
MAIN = checkpoint("main", "c", stage="s2", ingredient=3, step=9)


@pytest.mark.parametrize(
    ("checkpoints", "rule", "subject", "outcome", "said"),
    [
        ([step(1, "a"), step(2, "b"), step(3, "a"), step(4, "a")], "QA009", "step1", "fail",
         "3 checkpoints serve the same weights: `step1`, `step3` and `step4`"),
        ([step(n, "a") for n in range(86)], "QA009", "step0", "fail", "and 80 more"),
        ([end(1, "a"), end(3, "c"), MAIN], "QA010", "main", "fail", "holds the weights of `i3`"),
        ([end(1, "a"), end(2, "b"), checkpoint("main", "b")], "QA010", "main", "fail", "`i2`"),
        ([end(1, "a", tokens=100), end(1, "a", tokens=101), end(2, "b")],
         "QA011", "i1-100B", "pass", "`i1-100B` and `i1-101B` are 2 names"),
        ([step(8, "a"), step(9, "b"), checkpoint("main", "b")],
         "QA011", "step9", "pass", "`step9` and `main`"),
        ([step(1, "a"), checkpoint("main", suspect=(NO_WEIGHTS,))],
         "QA012", "main", "fail", "`main` cannot be measured: it holds no weights"),
        ([step(1, "a"), step(2, "b", suspect=NO_SHARDS)],
         "QA013", "step2", "inconclusive", "its first shard is another's (http://x)"),
        ([step(1, "a", suspect=EQUAL), step(3, "b", suspect=EQUAL)],
         "QA014", "step1", "pass", "the files of `step1` and `step3` differ"),
        ([end(1, sha, tokens=n, notes=PLACE) for sha, n in (("a", 100), ("b", 101))],
         "QA014", "i1-100B", "pass", "differ"),
        ([step(1, "a", "b", "c"), step(9, "x", "y", "z"), step(5, "x", "b2", "z")],
         "QA015", "step5", "fail", "`step5` has 2 of its 3 files from `step9`"),
        ([step(1, "a", suspect=TWO_SETS), step(2, "b", suspect=TWO_SETS)],
         "QA016", "step1", "fail", "`step1` and `step2`: `model.safetensors` lies beside"),
    ],
)  # fmt: skip
def test_what_is_odd_is_one_finding(checkpoints, rule, subject, outcome, said):
    finding = only(*checkpoints)
    assert (finding.rule, finding.subject, finding.outcome) == (rule, subject, outcome)
    assert finding.level == ("info" if outcome == "pass" else "warn")
    assert said in finding.message


def test_what_was_not_read_or_differs_is_not_judged():
    assert found(step(1, "a"), step(2, "b"), checkpoint("main", "c")) == []
    assert found(step(1), step(2), step(3, suspect=(*NO_SHARDS, *EQUAL))) == []
    assert found(step(1, "a", suspect=EQUAL), step(3, suspect=EQUAL)) == []
    soup = Subject("mine", ((step(1, "a"), 0.5), (step(2), 0.5)), "mean")
    assert found(step(1, "a"), step(2), soups=(soup,)) == []
    there = Checkpoint(Ref("o/other", "step3"), "other/step3", (WeightFile("w", 1, "b"),), "c")
    assert found(step(1, "a", suspect=EQUAL), there) == []


def test_a_soup_of_one_is_no_soup_and_second_names_are_no_further_steps():
    a, b = step(1, "a"), step(2, "b")
    alone = Subject("mine", ((a, 1.0), (b, 0.0)), "mean")
    finding = only(a, b, soups=(alone, Subject("both", ((a, 0.5), (b, 0.5)), "mean")))
    assert (finding.rule, finding.subject) == ("QA010", "mine")
    assert "`mine` holds the weights of `step1` alone" in finding.message
    said = found(step(1, "a"), step(2, "a"), checkpoint("main", "a", step=2))
    assert [rule for rule, _ in said] == ["QA009", "QA011"]
    assert "2 checkpoints serve" in said[0][1]


def test_what_a_family_says_is_not_taken_for_what_was_found_nor_said_twice():
    heard = bad_report("it holds a README and no weights", "http://x")
    assert found(checkpoint("main", suspect=(heard,))) == []
    finding = only(checkpoint("main", suspect=(heard, NO_WEIGHTS)))
    assert finding.rule == "QA012"
    assert "README" not in finding.message
    ends = (bad_report("weights of the end", some=True),)
    said = found(step(1, "a", suspect=ends), step(2, "b", suspect=ends), step(9, "a"))
    assert [rule for rule, _ in said] == ["QA009", "QA013"]
    assert "`step2`: its family's file says, of some revisions like it" in said[1][1]
    assert only(step(1, "a", "b", suspect=ends), step(9, "a", "c")).rule == "QA015"
    same = (equal_report(("step1", "step3"), "they serve the same weights"),)
    assert only(step(1, "a", suspect=same), step(3, "a", suspect=same)).rule == "QA009"


NAMES = st.lists(st.text("abc0123.-_/", min_size=1), min_size=2, max_size=5)


@given(NAMES, st.text(), st.none() | st.text(), st.booleans())
def test_what_is_said_of_names_or_to_be_bad_is_read_as_that(names, reason, source, flag):
    for why in (reason, None):
        text = equal_report(names, why, source, one_place=flag)
        assert names_in_equal_report(text) == tuple(names)
        assert not is_bad_report(text)
    said = bad_report(reason, source, some=flag)
    assert is_bad_report(said)
    assert names_in_equal_report(said) == ()


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc")), max_size=12))
def test_findings_come_by_code_and_name_only_what_is_there(rows):
    series = [checkpoint(f"c{k}", sha, step=n or None) for k, (n, sha) in enumerate(rows)]
    said = content_findings(series)
    assert [f.rule for f in said] == sorted(f.rule for f in said)
    assert {f.subject for f in said} <= {c.label for c in series}
    shared = len(rows) - len({sha for _, sha in rows})
    assert bool(said) == (shared > 0)
