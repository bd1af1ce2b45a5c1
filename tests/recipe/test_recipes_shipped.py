"""Every recipe that ships chooses what it says from the names its repository is known to have."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from qaudit.checkpoints.series import Candidate, Knowledge, in_order
from qaudit.cli.about import listing
from qaudit.core.registry import parse_schemes
from qaudit.errors import RecipeError
from qaudit.families import Family, all_families, find
from qaudit.recipe.selection import matching, select
from qaudit.recipe.soups import needed, resolve_soups
from qaudit.recipe.table import find_recipe, read_recipe, recipe_of, recipes_folder, shipped_recipes
from qaudit.types import Checkpoint, Recipe, Ref
from tests.support.names import names_of

FOLDER = recipes_folder()
HUB = sorted(path for path in FOLDER.glob("*.yaml") if path.stem != "demo")
PAPER_A = [path for path in HUB if path.stem.endswith("-paper-a")]
WIKITEXT = [path for path in HUB if path.stem.endswith("-wikitext-2")]
PLAIN = [path for path in HUB if not re.search("-(paper-.|wikitext-2)$", path.stem)]

CALIBRATION = "hf://datasets/allenai/c4/en/c4-train.00001-of-01024.json.gz"
EVALUATION = "hf://datasets/allenai/c4/en/c4-validation.00000-of-00008.json.gz"
WIKITEXT_2 = "hf://datasets/Salesforce/wikitext/wikitext-2-raw-v1/test-00000-of-00001.parquet"


def each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


def family_of(recipe: Recipe) -> Family:
    (repo,) = recipe.targets
    family = find(repo)
    assert family is not None
    return family


@cache
def series(repo: str) -> tuple[Checkpoint, ...]:
    """Return a repository's checkpoints as the Hub would list them: names, and no weight."""
    knowledge = Knowledge.of(find(repo), None)
    found = [
        Candidate(Ref(repo, name), name, (name,), knowledge, commit=f"{k:040x}")
        for k, name in enumerate(names_of(repo))
    ]
    return tuple(in_order(found))


def raw(path: Path) -> dict[str, object]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


# ---------------------------------------------------------------------- what each of them chooses


def test_every_family_has_a_recipe() -> None:
    have = {family_of(read_recipe(path)).family for path in HUB}
    # Other lengths and sizes of these differ in their target alone.
    alike = {"demo", "pythia-v0", "open-sci", "open-sci-300b", "open-sci-50b"}
    alike |= {f"pythia-{size}" for size in ("14m", "31m", "70m", "410m", "1b", "2.8b", "12b")}
    alike |= {"olmoe-0125"}  # whose revisions are not recorded here
    assert {family.family for family in all_families()} - have == alike


@each(HUB)
def test_a_recipe_reads_as_one_and_says_what_it_is_and_needs(path: Path) -> None:
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


@each(HUB)
def test_a_recipe_takes_what_it_names_in_the_order_of_the_run(path: Path) -> None:
    recipe = read_recipe(path)
    known = series(recipe.targets[0])
    for wanted in recipe.checkpoints:
        assert matching(wanted, known), wanted
    chosen = select(recipe, known)
    assert 3 <= len(chosen) <= (18 if path in PLAIN else 154)
    assert [c for c in known if c in chosen] == list(chosen)
    if path in PLAIN:  # it ends where its run does
        assert chosen[-1] in known[-2:]  # `main` is the last of many, and empty in a few
    suspect = {c.label for c in needed(recipe, known) if c.suspect}
    assert suspect == ({"step0", "step1"} if path.stem == "pythia-160m-paper-b" else set())


@each(HUB)
def test_the_soups_of_a_recipe_are_made_those_of_its_family_among_them(path: Path) -> None:
    recipe = read_recipe(path)
    soups = resolve_soups(recipe, series(recipe.targets[0]))
    assert len(soups) == len(recipe.soups)
    for soup in soups:
        places = {(c.stage, c.ingredient, c.step, c.label) for c, _ in soup.members}
        assert 2 <= len(places) == len(soup.members)
    made = {frozenset((c.label, round(w, 6)) for c, w in soup.members) for soup in soups}
    for documented in family_of(recipe).soups if path in PLAIN else ():
        weights = documented.weights or (1 / len(documented.of),) * len(documented.of)
        pairs = zip(documented.of, weights, strict=True)
        assert frozenset((name, round(w, 6)) for name, w in pairs) in made, documented.label


# ------------------------------------------------------------------------------ the studies' own


TAKEN = {"olmo2-1b": 50, "olmo2-7b": 55, "olmo2-13b": 33, "olmo2-32b": 40, "smollm3": 51}
TAKEN |= {"apertus-8b": 27, "open-sci": 31, "amber": 38, "pythia-160m": 154}


def test_the_study_s_recipes_have_one_protocol_and_take_as_many_revisions_as_they_did() -> None:
    for name, count in TAKEN.items():
        study = "b" if name == "pythia-160m" else "a"
        recipe = read_recipe(FOLDER / f"{name}-paper-{study}.yaml")
        assert len(select(recipe, series(recipe.targets[0]))) == count, name
    keys = ("schemes", "calibration", "evaluation", "calibration_documents", "evaluation_documents")
    keys += ("context", "packed", "bos")
    protocols = [tuple(str(raw(path)[key]) for key in keys) for path in PAPER_A]
    assert len(PAPER_A) == 8
    assert len(set(protocols)) == 1
    specs = [scheme.spec for scheme in parse_schemes(read_recipe(PAPER_A[0]).schemes)]
    assert all("act_order=true" in spec and "act_group_aware=false" in spec for spec in specs)


def test_wikitext_is_read_as_windows_of_text_run_together() -> None:
    assert WIKITEXT
    for path in WIKITEXT:
        recipe = read_recipe(path)
        assert (recipe.evaluation, recipe.packed, recipe.bos) == (WIKITEXT_2, True, "never")
        assert "qaudit-llm[parquet]" in path.read_text(encoding="utf-8")


# ----------------------------------------------------------------------------- where they are found


def test_a_shipped_recipe_is_found_from_any_folder_unless_one_of_its_name_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = FOLDER / "olmo2-7b.yaml"
    for target in ("recipes/olmo2-7b.yaml", "olmo2-7b.yaml"):
        assert find_recipe(target) == wanted
        assert recipe_of(targets=[target]) == read_recipe(wanted)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "olmo2-7b.yaml").write_text("targets: [runs/mine]\n", encoding="utf-8")
    assert recipe_of(targets=["recipes/olmo2-7b.yaml"]).targets == ("runs/mine",)


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("/recipes/olmo2-7b.yaml", ""),
        ("../recipes/olmo2-7b.yaml", ""),
        ("recipes/../olmo2-7b.yaml", ""),
        ("a/olmo2-7b.yaml", ""),
        ("recipes/olmo-2-7b.yaml", "did you mean `recipes/olmo2-7b.yaml`?"),
        ("qwertz.yaml", "qaudit list recipes"),
    ],
)
def test_a_path_that_leads_elsewhere_is_no_recipe_and_one_nearly_called_so_is_named(
    target: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="there is no recipe") as caught:
        recipe_of(targets=[target])
    assert hint in caught.value.hint


def test_the_example_in_the_recipes_page_is_a_recipe(tmp_path: Path) -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "example.yaml").write_text(example, encoding="utf-8")
    recipe = read_recipe(tmp_path / "example.yaml")
    assert select(recipe, series(recipe.targets[0]))


def test_recipes_are_listed_as_they_are_given_to_scan() -> None:
    lines = listing("recipes").splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_recipes())
    assert len(lines) == len(HUB) + 1
    assert all(line.endswith(".") for line in lines)


def test_recipes_inside_the_package_are_found_as_a_wheel_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "qaudit" / "recipes"
    inside.mkdir(parents=True)
    monkeypatch.setattr("qaudit.recipe.table.__file__", str(inside.parent / "recipe" / "table.py"))
    assert recipes_folder() == inside
