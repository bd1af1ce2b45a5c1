"""Which checkpoints are measured: entries, ranges and thinning, and those of recipes that ship."""

import re
from functools import cache
from itertools import pairwise

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from qaudit.checkpoints.series import Candidate, CheckpointGroup, Knowledge, as_series
from qaudit.cli.about import listing
from qaudit.core.registry import parse_schemes
from qaudit.errors import RecipeError, UsageError
from qaudit.families import all_families, find
from qaudit.recipe.selection import (
    MOST_MEASURED,
    REPRESENTATIVES,
    is_default_choice,
    matching,
    representatives,
    select,
)
from qaudit.recipe.soups import needed, resolve_soups
from qaudit.recipe.table import find_recipe, read_recipe, recipe_of, recipes_folder, shipped_recipes
from qaudit.types import Checkpoint, Recipe, Ref
from tests.support.names import names_of, recorded


def recipe(**asked):
    return Recipe(("x",), (), **asked)  # type: ignore[arg-type]


def checkpoint(label, **known):
    return Checkpoint(Ref("o/n", label), label, **known)  # type: ignore[arg-type]


def steps(stage, numbers, ingredient=None):
    name = f"{stage or 'run'}-{f'ingredient{ingredient}-' if ingredient else ''}step"
    return tuple(
        checkpoint(f"{name}{n}", stage=stage, step=n, ingredient=ingredient) for n in numbers
    )


@cache
def on_the_hub(repo):
    """Return a repository's checkpoints as the Hub would list them: names, and no weight."""
    known = Knowledge.of(find(repo), None)
    names = enumerate(dict.fromkeys((*names_of(repo), "main")))
    found = (Candidate(Ref(repo, n), n, (n,), known, commit=f"{k:040x}") for k, n in names)
    return as_series([CheckpointGroup(tuple(found), alone=False)])


STAGE1 = steps("stage1", [150, *range(1000, 929_000, 1000), 928_646])
RUN = (
    *STAGE1,
    *steps("stage2", [1000, 6000, 11_931], 1),
    *steps("stage2", [1000, 11_000], 3),
    checkpoint("main", stage="stage2"),
)


def chosen(*entries, series=RUN, **asked):
    return [c.label for c in select(recipe(checkpoints=entries, **asked), series)]


def labels_of(series):
    return [c.label for c in representatives(series)]


def steps_of(series):
    return [c.step or 0 for c in representatives(series)]


# --------------------------------------------------------------------------------------- ranges


OFF = steps("s", [0, 90, 151, 160, 240, 1000])
FAR = steps("s", [999_999, 1_000_000, 1_200_000])
TWICE = (*steps("s", [100]), checkpoint("main", stage="s", step=200), *steps("s", [200]))


def test_ranges_are_read_entries_add_up_and_names_go_first():
    for entry, expected, series in (
        ("stage1@3k..5000", [3000, 4000, 5000], RUN),  # both its ends
        ("stage1@100k..900k/50k", [*range(100_000, 900_001, 50_000)], RUN),
        ("stage1@800k../50k", [800_000, 850_000, 900_000, 928_646], RUN),  # an open end keeps it
        ("stage1@..2k", [150, 1000, 2000], RUN),
        ("stage1@../400k", [400_000, 800_000, 928_646], RUN),
        ("stage1@0../400k", [150, 400_000, 800_000, 928_646], RUN),  # zero is a multiple if written
        ("s@0..1000/100", [0, 90, 160, 240, 1000], OFF),  # the nearest to each multiple
        ("s@1M", [1_000_000], FAR),
        ("@1.1m..", [1_200_000], FAR),
    ):
        assert [c.step for c in select(recipe(checkpoints=(entry,)), series)] == expected, entry
    for entries, expected, series in (
        ("@10.5k..11k", "stage1-step11000 stage2-ingredient3-step11000", RUN),  # in every stage
        ("stage2-ingredient1@5k..",
         "stage2-ingredient1-step6000 stage2-ingredient1-step11931", RUN),
        ("stage2@10k..20k/10k",  # each ingredient has its own nearest
         "stage2-ingredient1-step11931 stage2-ingredient3-step11000", RUN),
        ("main stage2-ingredient1@..2k stage1-step15?",  # in the order of the series
         "stage1-step150 stage2-ingredient1-step1000 main", RUN),
        ("lr@3e-4", "lr@3e-4", ODD),  # a name with the sign of a range
        ("lr@1*", "lr@1e-3", ODD),
        ("s@100../100", "s-step100 s-step200", TWICE),  # of two names the one that tells it
    ):  # fmt: skip
        assert chosen(*entries.split(), series=series) == expected.split(), entries
    # The last ones are the last of the series.
    assert chosen(last=2) == ["stage2-ingredient3-step11000", "main"]
    assert chosen("stage1-*", last=1) == ["stage1-step928646"]
    assert chosen("stage1@../100k", last=2)[1:] == ["stage1-step928646"]


ODD = (checkpoint("lr@3e-4", step=1), checkpoint("lr@1e-3", step=2))


def test_an_entry_that_means_nothing_is_refused():
    for entry, sentence, hint in (
        ("stage1@9k..1k", "`stage1@9k..1k` ends before it starts", "`stage1@100k..900k/50k`"),
        ("stage1@1k...9k", "neither a checkpoint nor a range", "stage, first and last step"),
        ("stage1@", "neither a checkpoint nor a range", "write a range as"),
        ("stage1@/50k", "neither a checkpoint nor a range", "write a range as"),
        ("stage1@100B..", "neither a checkpoint nor a range", "write a range as"),
        ("stage1@1k..9k/0", "has no spacing", "leave `/0` out"),
        ("stage1@1.5..9k", "`1.5` in `stage1@1.5..9k` is no whole number", "write a range as"),
        ("stage1@2M..", "no checkpoint is in `stage1@2M..`", "from 150 to 928,646"),
        ("stage9@1k..", "there is no stage `stage9`", "did you mean `stage2`?"),
        ("stage1-step151", "there is no checkpoint `stage1-step151`", "did you mean `stage1-step1"),
        ("zzz", "there is no checkpoint `zzz`", "there are: stage1-step150, stage1-step1000"),
        ("zzz*", "no checkpoint matches `zzz*`", "..., main"),
    ):
        with pytest.raises(UsageError) as caught:
            chosen(entry)
        assert sentence in caught.value.message
        assert hint in caught.value.hint
        assert len(caught.value.hint) < 400
    with pytest.raises(UsageError, match="no step is known here"):
        chosen("@1k..", series=(checkpoint("a"), checkpoint("b")))


NUMBERS = st.lists(st.integers(0, 10**6), min_size=1, max_size=60, unique=True).map(sorted)


@given(NUMBERS, st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10**6))
def test_a_spaced_range_agrees_with_looking_for_each_multiple(found, low, width, spacing):
    series, high = steps("s", found), low + width
    within = [n for n in found if low <= n <= high]
    if not within:
        return
    spacing = max(spacing, width // 500 + 1)
    multiples = [m for m in range(0, high + 1, spacing) if m >= low]
    expected = {min(within, key=lambda n: (abs(n - m), n)) for m in multiples}
    asked = recipe(checkpoints=(f"s@{low}..{high}/{spacing}",))
    kept = select(asked, series)
    assert {c.step for c in kept} == expected
    assert not kept or select(asked, kept) == kept


# ------------------------------------------------------------------------------- a few of many


def test_of_more_than_sixteen_a_few_are_chosen_unless_somebody_chose():
    few = steps("s", list(range(MOST_MEASURED)))
    assert (is_default_choice(recipe(), few), select(recipe(), few)) == (False, few)
    assert is_default_choice(recipe(), RUN)
    assert len(select(recipe(), RUN)) <= REPRESENTATIVES + 2
    for asked in ({"checkpoints": ("*",)}, {"last": 9999}):
        assert not is_default_choice(recipe(**asked), RUN)
    assert select(recipe(checkpoints=("*",)), RUN) == RUN
    found = labels_of(RUN)  # the ends of stages and ingredients, and the release
    ends = "stage1-step928646 stage2-ingredient1-step11931 stage2-ingredient3-step11000 main"
    assert {*ends.split()} <= set(found)
    assert "stage2-ingredient3-step1000" not in found  # ingredient 1 went further
    assert "stage1-step150" not in found


def rated(rates):
    every = enumerate(rates, start=1)
    return tuple(checkpoint(f"step{n}", step=n, learning_rate=rate) for n, rate in every)


def test_phases_are_sampled_by_their_rate_and_suspects_left_out():
    unrated = steps_of(steps("s", list(range(10, 1210, 10))))
    assert unrated == list(range(100, 1201, 100))
    held, decay = [1.0] * 90, [1 - k / 10 for k in range(1, 11)]
    found = steps_of(rated(held + decay))
    early, late = [n for n in found if n <= 90], [n for n in found if n > 90]
    assert len(late) >= 6
    gaps = {b - a for a, b in pairwise([0, *early])}
    assert max(gaps) - min(gaps) <= 2
    assert max(b - a for a, b in pairwise(late)) <= 2
    warmed_up = steps_of(rated([k / 10 for k in range(10)] + [1.0] * 90))
    assert sum(n <= 10 for n in warmed_up) <= 2
    # Tokens count before steps, and steps of a stage after those of the one before.
    series = tuple(checkpoint(f"s{n}", step=n, tokens=n * n) for n in range(1, 101))
    assert sum(n > 70 for n in steps_of(series)) >= 6  # half of the tokens
    series = (*steps("a", list(range(1, 101))), *steps("b", list(range(1, 101))))
    assert 5 <= sum(c.stage == "a" for c in representatives(series)) <= 7
    series = tuple(
        checkpoint(f"s{n}", step=n, suspect=("bad",) if n % 2 else ()) for n in range(1, 102)
    )
    found = representatives(series)
    assert len(found) == REPRESENTATIVES
    assert not any(c.suspect for c in found)
    assert found[-1].step == 100  # the last that is not suspect
    bad = tuple(checkpoint(f"s{n}", step=n, suspect=("some are bad",)) for n in range(1, 100))
    found = representatives((*bad, checkpoint("main", step=99)))  # taken after all
    assert len(found) == REPRESENTATIVES
    assert found[-1].label == "main"
    assert max(b - a for a, b in pairwise(c.step or 0 for c in found)) <= 10


def test_of_two_names_of_one_checkpoint_one_is_taken_and_names_alone_by_their_order():
    numbered = [checkpoint(f"step{n}", step=n, commit=f"{n:040x}") for n in range(1, 40)]
    main = checkpoint("main", commit=f"{39:040x}")
    found = labels_of((*numbered, main))
    assert "step39" in found
    assert "main" not in found
    assert labels_of((main, *numbered)) == found
    twins = (f"i1-step9-tokens{n}B" for n in (100, 101))
    ends = [checkpoint(name, stage="s2", ingredient=1, step=9) for name in twins]
    found = labels_of((*steps("s1", list(range(20))), *ends))
    assert found[-1] == "i1-step9-tokens100B"
    assert "i1-step9-tokens101B" not in found
    names = labels_of(tuple(checkpoint(f"name{n}") for n in range(50)))
    numbers = [int(label[4:]) for label in names]
    assert len(numbers) == REPRESENTATIVES
    assert numbers[-1] == 49
    assert max(b - a for a, b in pairwise(numbers)) <= 5
    series = (*steps("s", list(range(40))), checkpoint("it-SFT"), checkpoint("main"))
    assert labels_of(series)[-2:] == ["s-step39", "main"]


CHECKPOINTS = st.fixed_dictionaries(
    {
        "stage": st.sampled_from([None, "a", "b", "c"]),
        "ingredient": st.sampled_from([None, None, 1, 2, 3, 4, 5]),
        "step": st.none() | st.integers(0, 1000),
        "learning_rate": st.none() | st.floats(0, 1),
        "suspect": st.sampled_from([(), ("bad",)]),
        "commit": st.sampled_from([None, None, "0" * 40, "1" * 40]),
    }
)
MANY = st.lists(CHECKPOINTS, min_size=17, max_size=80).map(
    lambda rows: tuple(
        checkpoint("main" if n == 20 else f"c{n}", **row) for n, row in enumerate(rows)
    )
)


@given(MANY)
def test_whatever_the_series_a_bounded_part_is_chosen_in_its_order(series):
    found = representatives(series)
    assert [c for c in series if c in found] == list(found)
    assert found
    ingredients = {(c.stage, c.ingredient) for c in series if c.ingredient is not None}
    assert len(found) <= REPRESENTATIVES + len(ingredients)
    assert select(recipe(), found) == found
    assert representatives(series) == found


@pytest.mark.parametrize("repo", recorded())
def test_every_recorded_series_is_told_by_its_ends_and_a_few_more(repo):
    series = on_the_hub(repo)
    found = select(recipe(), series)
    ingredients = {(c.stage, c.ingredient) for c in series if c.ingredient is not None}
    most = max(REPRESENTATIVES + len(ingredients), MOST_MEASURED)
    assert min(len(series), REPRESENTATIVES) <= len(found) <= most
    assert ingredients <= {(c.stage, c.ingredient) for c in found}
    for stage in {c.stage for c in series if c.stage and c.ingredient is None and c.step}:
        last = max(c.step or 0 for c in series if c.stage == stage)
        assert last in {c.step for c in found if c.stage == stage}
    if len(series) > MOST_MEASURED:
        assert not any(c.suspect for c in found)
    assert select(recipe(), found) == found


# --------------------------------------------------------------------------------------------------
# Every recipe that ships chooses what it says from the names its repository is known to have.


FOLDER = recipes_folder()
HUB = sorted(path for path in FOLDER.glob("*.yaml") if path.stem != "demo")
PAPER_A = [path for path in HUB if path.stem.endswith("-paper-a")]
WIKITEXT = [path for path in HUB if path.stem.endswith("-wikitext-2")]
PLAIN = [path for path in HUB if not re.search("-(paper-.|wikitext-2)$", path.stem)]

CALIBRATION = "hf://datasets/allenai/c4/en/c4-train.00001-of-01024.json.gz"
EVALUATION = "hf://datasets/allenai/c4/en/c4-validation.00000-of-00008.json.gz"
WIKITEXT_2 = "hf://datasets/Salesforce/wikitext/wikitext-2-raw-v1/test-00000-of-00001.parquet"


def family_of(recipe):
    (repo,) = recipe.targets
    family = find(repo)
    assert family is not None
    return family


def raw(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_every_family_has_a_recipe():
    have = {family_of(read_recipe(path)).family for path in HUB}
    # Other lengths and sizes of these differ in their target alone.
    alike = {"demo", "pythia-v0", "open-sci", "open-sci-300b", "open-sci-50b"}
    alike |= {f"pythia-{size}" for size in ("14m", "31m", "70m", "410m", "1b", "2.8b", "12b")}
    alike |= {"olmoe-0125"}  # whose revisions are not recorded here
    assert {family.family for family in all_families()} - have == alike


@pytest.mark.parametrize("path", HUB, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_needs_takes_what_it_names_and_makes_soups(path):
    table, text, recipe = raw(path), path.read_text(encoding="utf-8"), read_recipe(path)
    assert recipe.targets == tuple(table["targets"])
    assert str(table["description"]).endswith(".")
    assert text.startswith("# ")
    assert table["sources"]
    assert parse_schemes(recipe.schemes)
    flags = {"pickle": "--allow-pickle", "remote_code": "--trust-remote-code"}
    for need, flag in flags.items():
        wanted = need in family_of(recipe).requires
        assert (flag in text and flag in str(table["description"])) == wanted
    assert recipe.calibration in {CALIBRATION, None}  # pinned to a file
    assert recipe.evaluation in {EVALUATION, WIKITEXT_2}
    without = all(scheme.startswith("rtn") for scheme in recipe.schemes)
    assert recipe.calibration is not None or without
    known = on_the_hub(recipe.targets[0])
    for wanted in recipe.checkpoints:
        assert matching(wanted, known), wanted
    chosen = select(recipe, known)
    assert 3 <= len(chosen) <= (18 if path in PLAIN else 154)
    assert [c for c in known if c in chosen] == list(chosen)
    if path in PLAIN:  # it ends where its run does
        assert chosen[-1] in known[-2:]  # `main` is the last of many, and empty in a few
    suspect = {c.label for c in needed(recipe, known) if c.suspect}
    assert suspect == ({"step0", "step1"} if path.stem == "pythia-160m-paper-b" else set())
    soups = resolve_soups(recipe, known)
    assert len(soups) == len(recipe.soups)
    for soup in soups:
        places = {(c.stage, c.ingredient, c.step, c.label) for c, _ in soup.members}
        assert 2 <= len(places) == len(soup.members)
    made = {frozenset((c.label, round(w, 6)) for c, w in soup.members) for soup in soups}
    for documented in family_of(recipe).soups if path in PLAIN else ():
        weights = documented.weights or (1 / len(documented.of),) * len(documented.of)
        pairs = zip(documented.of, weights, strict=True)
        assert frozenset((name, round(w, 6)) for name, w in pairs) in made, documented.label


TAKEN = {"olmo2-1b": 50, "olmo2-7b": 55, "olmo2-13b": 33, "olmo2-32b": 40, "smollm3": 51}
TAKEN |= {"apertus-8b": 27, "open-sci": 31, "amber": 38, "pythia-160m": 154}


def test_the_study_s_recipes_have_one_protocol_and_take_as_many_revisions_as_they_did():
    for name, count in TAKEN.items():
        study = "b" if name == "pythia-160m" else "a"
        recipe = read_recipe(FOLDER / f"{name}-paper-{study}.yaml")
        assert len(select(recipe, on_the_hub(recipe.targets[0]))) == count, name
    keys = ("schemes", "calibration", "evaluation", "calibration_documents", "evaluation_documents")
    keys += ("context", "packed", "bos")
    protocols = [tuple(str(raw(path)[key]) for key in keys) for path in PAPER_A]
    assert len(PAPER_A) == 8
    assert len(set(protocols)) == 1
    specs = [scheme.spec for scheme in parse_schemes(read_recipe(PAPER_A[0]).schemes)]
    assert all("act_order=true" in spec and "act_group_aware=false" in spec for spec in specs)
    assert WIKITEXT  # windows of text run together
    for path in WIKITEXT:
        recipe = read_recipe(path)
        assert (recipe.evaluation, recipe.packed, recipe.bos) == (WIKITEXT_2, True, "never")
        assert "qaudit-llm[parquet]" in path.read_text(encoding="utf-8")


def test_a_shipped_recipe_is_found_from_any_folder_unless_one_of_its_name_lies_there(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    wanted = FOLDER / "olmo2-7b.yaml"
    for target in ("recipes/olmo2-7b.yaml", "olmo2-7b.yaml"):
        assert find_recipe(target) == wanted
        assert recipe_of(targets=[target]) == read_recipe(wanted)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "olmo2-7b.yaml").write_text("targets: [runs/mine]\n", encoding="utf-8")
    assert recipe_of(targets=["recipes/olmo2-7b.yaml"]).targets == ("runs/mine",)
    (tmp_path / "recipes" / "olmo2-7b.yaml").unlink()
    for target, hint in (
        ("/recipes/olmo2-7b.yaml", ""),
        ("../recipes/olmo2-7b.yaml", ""),
        ("recipes/../olmo2-7b.yaml", ""),
        ("a/olmo2-7b.yaml", ""),
        ("recipes/olmo-2-7b.yaml", "did you mean `recipes/olmo2-7b.yaml`?"),
        ("qwertz.yaml", "qaudit list recipes"),
    ):
        with pytest.raises(RecipeError, match="there is no recipe") as caught:
            recipe_of(targets=[target])
        assert hint in caught.value.hint
    inside = tmp_path / "qaudit" / "recipes"  # as a wheel has them
    inside.mkdir(parents=True)
    monkeypatch.setattr("qaudit.recipe.table.__file__", str(inside.parent / "recipe" / "table.py"))
    assert recipes_folder() == inside


def test_the_example_in_the_recipes_page_is_a_recipe_and_all_are_listed(tmp_path):
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "example.yaml").write_text(example, encoding="utf-8")
    recipe = read_recipe(tmp_path / "example.yaml")
    assert select(recipe, on_the_hub(recipe.targets[0]))
    lines = listing("recipes").splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_recipes())
    assert len(lines) == len(HUB) + 1
    assert all(line.endswith(".") for line in lines)
