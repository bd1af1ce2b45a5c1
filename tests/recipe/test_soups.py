"""Soups as texts: weights, windows, subsets; what cannot be meant; and greedy searches."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core.registry import parse_scheme, parse_schemes
from qaudit.errors import UsageError
from qaudit.executors.measuring import greedy, loss_per_token
from qaudit.planning.price import Pricing, flops, passes_of, scheme_of, with_scheme
from qaudit.planning.sizes import Load, Sizes, TextSize
from qaudit.recipe.soups import SoupRequest, needed, parse_soup, resolve_soups
from qaudit.saved.codec import encode
from qaudit.types import Checkpoint, Evidence, Price, Protocol, Recipe, Ref, Subject, WeightFile


def checkpoint(label, step=None, stage=None):
    files = (WeightFile("w", 1, label),)
    return Checkpoint(Ref(label), label, files, step=step, stage=stage)


RUN = tuple(checkpoint(f"step{step}", step) for step in (100, 200, 300, 400, 500))
ENDS = tuple(replace(checkpoint(f"decay{k}-step50", 50, "stage2"), ingredient=k) for k in (1, 2, 3))


RTN_3BIT = f"greedy:scheme={parse_scheme('rtn-3bit:group=64').spec}"


def soups(*texts, series=RUN):
    return resolve_soups(Recipe(("x",), (), soups=texts), series)


def shares(subject):
    return {c.label: weight for c, weight in subject.members}


def test_a_soup_is_read():
    for text, *expected in (
        ("last:4", "last:4", "lawa:k=4", ()),
        ("late=last:4", "late", "lawa:k=4", ()),
        ("last:2(step*)", "last:2(step*)", "lawa:k=2", ("step*",)),
        ("lawa:k=5:every=500", "lawa:k=5:every=500", "lawa:k=5:every=500", ()),
        ("ema:decay=0.9", "ema:decay=0.9", "ema:decay=0.9", ()),
        ("0.9*A+0.1*B", "weighted(0.9*A+0.1*B)", "weighted", ("A", "B"), (0.9, 0.1)),
        ("x=weighted:scaled=true(3*A+1*B)", "x", "weighted:scaled=true", ("A", "B"), (3, 1)),
        ("x=slerp:t=0.3(A+B)", "x", "slerp:t=0.3", ("A", "B")),
        ("mean", "mean(mean)", "mean", ("mean",)),  # a checkpoint may be called so
        ("x = mean(A + B)", "x", "mean", ("A", "B")),
        ("x=1e-1*A+9e-1*B", "x", "weighted", ("A", "B"), (0.1, 0.9)),
        ("greedy(A+B)", "greedy(A+B)", "greedy", ("A", "B"), None, None, True),
        ("b=greedy:scheme=rtn-3bit:group=64(A)", "b", RTN_3BIT, ("A",), None, None, True),
        ("subsets:2(A+B)", "subsets:2(A+B)", "mean", ("A", "B"), None, 2),
        ("[1]*+B", "mean([1]*+B)", "mean", ("[1]*", "B")),
        (" A + B ", "mean( A + B )", "mean", ("A", "B")),
        ("stage2-*", "mean(stage2-*)", "mean", ("stage2-*",)),
        ("best=mean(A+B)", "best", "mean", ("A", "B")),
        ("best=lr=1+lr=2", "best", "mean", ("lr=1", "lr=2")),
        ("late=ema:decay=0.9(A+B)", "late", "ema:decay=0.9", ("A", "B")),
        ("lr=3e-4+lr=1e-3", "mean(lr=3e-4+lr=1e-3)", "mean", ("lr=3e-4", "lr=1e-3")),
    ):
        assert parse_soup(text) == SoupRequest(*expected), text  # type: ignore[arg-type]


SUSPECT = (*RUN[:-1], replace(RUN[-1], suspect=("it serves other weights",)))


FAMILIES = (replace(RUN[0], family="olmo2-7b"), replace(RUN[1], family="amber"))
TWINS = (RUN[0], replace(RUN[1], files=RUN[0].files), RUN[2])
TWELVE = tuple(checkpoint(f"c{n}", n) for n in range(12))


def test_a_soup_that_cannot_be_meant_is_refused():
    for text, message, hint, series in (
        ("subsets:12(c*)", "makes 4083 soups of 12 members", "", TWELVE),
        ("last:2", "ends in 3 ingredients, so that `last:2` could", "", (*RUN, *ENDS)),
        ("last:2", "no checkpoint here has a step", "", (checkpoint("a"), checkpoint("b"))),
        ("step*", "members of different families: amber, olmo2-7b", "", FAMILIES),
        ("step100+step200+step300", "weights twice: `step100` and `step200`", "", TWINS),
        *((*refusal, RUN) for refusal in [
        ("0.9*step100+0.2*step200", "the weights sum to 1.1, not to 1", "weighted:free=true"),
        ("0.9*step100+step200", "`step200` has no weight", "every member a weight, or none"),
        ("0.5*step*+0.5*step100", "6 members and 2 weights", "name each by itself"),
        ("mean(0.5*step100+0.5*step200)", "`mean` takes no weights", "`weighted`"),
        ("", "is not a soup", ""),
        ("A+", "is not a soup", ""),
        ("A++B", "is not a soup", ""),
        ("stage3-*", "no checkpoint matches `stage3-*`", "there are: step100, "),
        ("step100+step101", "no checkpoint `step101`", "`step100`?"),
        ("step1*", "`mean(step1*)` has one member, `step100`", "two or more"),
        ("step100+step100", "the same weights twice", "leave one of them out"),
        ("a=maen(step*)", "no merge `maen`", "`mean`?"),
        ("step100=mean(step*)", "two subjects are called `step100`", "label="),
        ("last:9", "a window of 9 is longer than the series, which has 5", "`lawa:k=5`"),
        ("last", "`last` has no number", "`last:4`"),
        ("slerp(step*)", "has 5 members, and `slerp` takes at most 2", "another number"),
        ("stock(step100+step200)", "has 2 members, and `stock` takes at least 3", "another"),
        ("subsets:1(step100+step200)", "has no subset of two", "`subsets:2(A+B+C)`"),
        ("lawa:k=3:every=150", "no checkpoint at step 350", "steps 200, 350, 500"),
        ("wsm:duration=150", "no checkpoint at step 350", "100, 200, 300, 400"),
        ("wsm:duration=-5", "a duration of -5 steps is none", "wsm:duration=2000"),
        ("wsm:decay=cosin", "there is no decay `cosin`", "use decay=linear or decay=cosine"),
        ("wsm(step100+step300+step400)", "100 to 200 steps apart", "at equal distances"),
        ("wsm(step400+step300)", "each at a later step; these are at 400, 300", "of one run"),
        ("lawa:n=3", "`lawa` has no parameter `n`", "it takes: k, every"),
        ("lawa:k=2(step100)", "longer than the series, which has 1", "name more checkpoints"),
        ("subsets(step*)", "`subsets` has no number", "`subsets:3(A+B+C)`"),
        ("subsets:x(step*)", "`subsets:x` has no number", "`subsets:3(A+B+C)`"),
        ("last:x", "`last:x` has no number", "`last:4`"),
        ("greedi(step*)", "there is no merge `greedi`", "did you mean `greedy`?"),
        ("greedy:(step*)", "`greedy:` is not a search", "`greedy(A+B)`"),
        ("mean", "`mean` names no checkpoints", "write `mean(A+B+C)`"),
        ("subsets:2", "`subsets:2` names no checkpoints", "write `subsets:2(A+B+C)`"),
        ("mean(step100+mean(step200+step300))", "no checkpoint `mean(step200`", "did you mean"),
        ("x=mean(step100+step200", "no checkpoint `x=mean(step100`", ""),
        ]),
    ):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            soups(text, series=series)
        assert message in caught.value.message
        assert hint in caught.value.hint


def test_weights_go_with_members_that_may_have_brackets_or_several_ends():
    assert len(soups("last:2(step*)", series=(*RUN, *ENDS))) == 1
    for name in ("a(1)", "a[1]"):
        (soup,) = soups(f"{name}+b", series=(checkpoint(name, 1), checkpoint("b", 2)))
        assert list(shares(soup)) == [name, "b"]
    for text, merge, expected, series in (
        ("0.9*step500+0.1*step100", "weighted:scaled=false:free=false",
         {"step500": 0.9, "step100": 0.1}, RUN),
        ("last:2", "lawa:k=2:every=0", {"step400": 0.5, "step500": 0.5}, RUN),
        ("last:2", "lawa:k=2:every=0", {"step300": 0.5, "step400": 0.5}, SUSPECT),
        ("lawa:k=3:every=200", "lawa:k=3:every=200",
         dict.fromkeys(("step100", "step300", "step500"), 1 / 3), RUN),
        ("ema:decay=0.5", "ema:decay=0.5",  # the latest most
         {"step100": 0.0625, "step200": 0.0625, "step300": 0.125, "step400": 0.25, "step500": 0.5},
         RUN),
    ):  # fmt: skip
        (soup,) = soups(text, series=series)
        assert soup.merge == merge
        assert list(shares(soup).items()) == [*expected.items()]
    found = shares(soups("wsm:decay=1-sqrt:duration=300")[0])
    root = [math.sqrt(n / 4) for n in range(5)]
    expected = [after - before for before, after in itertools.pairwise(root)]
    assert list(found) == ["step200", "step300", "step400", "step500"]
    assert list(found.values()) == pytest.approx(expected, rel=1e-12)
    linear = shares(soups("wsm")[0])
    assert list(linear.values()) == pytest.approx([0.2] * 5)  # the plain mean
    recipe = Recipe(("x",), (), checkpoints=("step100",), soups=("last:2",))
    assert [c.label for c in needed(recipe, RUN)] == ["step100", "step400", "step500"]
    labels = [s.label.replace("step", "") for s in soups("subsets:3(step100+step200+step300)")]
    pairs = ["mean(100+200)", "mean(100+300)", "mean(200+300)"]
    assert labels == [*pairs, "mean(100+200+300)"]


def table(**losses):
    """Return a loss by the names of the members, in order: `AB=1.0`."""
    return lambda members: losses["".join(members)]


def plainly(candidates, loss):
    """Return who goes in, as the paper's first algorithm has it."""
    ranked = sorted(candidates, key=lambda one: loss((one,)))
    ingredients = {ranked[0]}
    for candidate in ranked[1:]:
        now = loss(tuple(c for c in candidates if c in ingredients))
        tried = loss(tuple(c for c in candidates if c in {*ingredients, candidate}))
        if tried < now:
            ingredients.add(candidate)
    return ingredients


def test_the_next_best_goes_in_only_if_the_mean_gets_better():
    found = greedy("ABC", table(A=3.0, B=1.0, C=2.0, BC=1.5, AB=0.9))
    assert [candidate.label for candidate in found.candidates] == ["B", "C", "A"]
    trials = [(t.added, t.loss, t.taken) for t in found.trials]
    assert trials == [("C", 1.5, False), ("A", 0.9, True)]
    assert (found.members, found.loss) == (("A", "B"), 0.9)
    for losses, ranking, members in (
        ({"A": 1.0, "B": 2.0, "AB": 1.0}, "AB", "A"),  # only as good
        ({"A": 1.0, "B": 2.0, "AB": math.nan}, "AB", "A"),
        ({"A": 2.0, "B": 1.0, "C": 1.0, "BC": 0.5, "ABC": 0.4}, "BCA", "ABC"),  # equals as named
        ({"A": math.nan, "B": 1.0, "C": math.inf}, "BAC", "B"),  # broken ones: never averaged
    ):
        found = greedy(sorted({*"".join(losses)}), table(**losses))
        assert "".join(candidate.label for candidate in found.candidates) == ranking
        assert ("".join(found.members), found.loss) == (members, losses[members])


@given(st.integers(0, 2**32 - 1), st.integers(2, 6))
def test_it_takes_whom_the_plain_algorithm_takes(seed, count):
    generator = np.random.default_rng(seed)
    places = {name: generator.normal(size=3) for name in "ABCDEF"[:count]}

    def loss(members):
        return float(np.square(np.mean([places[m] for m in members], axis=0)).sum())

    asked = []

    def counted(members):
        asked.append(members)
        return loss(members)

    found = greedy(list(places), counted)
    assert set(found.members) == plainly(list(places), loss)
    assert found.loss == loss(found.members) <= (found.candidates[0].loss or 0)
    assert len(asked) == len(set(asked)) == 2 * count - 1


# ------------------------------------------------------------------------------------- the wiring


def search(*names, merge="greedy"):
    return Subject("best", tuple((checkpoint(n), 1 / len(names)) for n in names), merge)


def alone(name):
    return Subject(name, ((checkpoint(name), 1.0),))


def test_a_search_looks_at_what_is_asked_for_or_picked_by_default_if_it_is_measured():
    for merge, schemes, expected in (
        ("greedy", "rtn-3bit,gptq-4bit", "gptq-4bit"),
        ("greedy", "rtn-3bit,gptq-3bit", "gptq-3bit"),  # the first by name, in any order
        ("greedy:scheme=gptq:bits=3", "rtn-3bit,gptq-3bit", "gptq-3bit"),
    ):
        measured = parse_schemes([schemes])
        assert scheme_of(search("A", "B", merge=merge), measured).short == expected
        settled = with_scheme(search("A", "B", merge=merge), measured)
        assert settled.is_search
        assert scheme_of(settled, measured[::-1]).short == expected
    with pytest.raises(UsageError, match="searched for at `gptq-2bit`, which is not") as refused:
        scheme_of(search("A", "B", merge="greedy:scheme=gptq-2bit"), parse_schemes(["rtn-4bit"]))
    assert "--schemes rtn-4bit,gptq-2bit" in refused.value.hint


def test_a_search_costs_every_mean_and_every_candidate_by_itself_and_trials_no_rollouts():
    schemes = parse_schemes(["rtn-4bit,gptq-4bit"])
    sizes = Sizes(1000, 2, 300, 400, 10, 20, 40)
    text = TextSize.bound(Protocol(context=32))
    pricing = Pricing(sizes, text, Price())
    (shipped,) = parse_schemes(["gptq-4bit"])
    each = flops(sizes, Load.of([shipped], text))  # full precision beside it
    for subjects, streams, nbytes_read in (
        ([alone("A"), alone("B")], 0, 0),
        ([alone("A"), alone("B"), search("A", "B")], 6, 1 + 1 + 2),
        ([alone("A"), search("A", "B", "C")], 10, 1 + 1 + 1 + 2 + 3),
    ):
        passes = passes_of(subjects, schemes, 1, pricing)
        searches = [one for one in passes if one.subject.is_search]
        read = sum(c.nbytes for one in searches for c, _ in one.subject.members)
        price = sum((one.price for one in searches), Price())
        assert price.streams - 3 * len(searches) == streams
        assert price.nbytes_read - read == nbytes_read
        alike = price.flops - pricing.flops(schemes) * len(searches)
        assert alike == pytest.approx(streams / 2 * each)
    plain, whole = TextSize(64, 64, 32), TextSize(64, 64 + 999, 32, rollout_tokens=999)
    prices = [Pricing(sizes, text, Price()) for text in (plain, whole)]
    assert prices[0].flops(schemes) == prices[1].flops(schemes)
    assert prices[0].flops(schemes, items=True) < prices[1].flops(schemes, items=True)


def test_what_is_kept_is_plain_json_and_all_documents_choose():
    row = greedy("ABC", table(A=math.nan, B=2.0, C=1.0, BC=0.5))
    row = replace(row, label="best", scheme="gptq-3bit", documents=7, further=True)
    losses = {"C": 1.0, "B": 2.0, "A": None}
    assert json.loads(json.dumps(encode(row), allow_nan=False)) == {
        "label": "best", "scheme": "gptq-3bit", "spec": "", "documents": 7,
        "candidates": [{"label": name, "loss": loss} for name, loss in losses.items()],
        "trials": [{"added": "B", "loss": 0.5, "taken": True}],
        "members": ["B", "C"], "loss": 0.5, "further": True,
    }  # fmt: skip
    # Documents that judge are flattered by every mean that was tried on them.
    assert (row.counted, replace(row, further=False).counted) == (0, 1)
    tokens = np.array([4, 2, 0, 2])
    nll = np.array([8.0, 2.0, 0.0, 6.0])
    assert loss_per_token(Evidence(("a", "b", "c", "d"), nll, tokens, tokens)) == 2.0
