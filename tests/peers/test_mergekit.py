"""Our weighted mean and slerp against mergekit's: `make peers`.

Whole checkpoints through mergekit's own pipeline and through `write_soup`. It sums in float32,
we in double precision rounded once: the sums may differ by the roundings of its additions, one
for each member, and of its division. Its slerp takes the straight line where the cosine is above
0.9995, ours only where there is no arc at all; random members are far from both.
"""

import pytest
import torch
import yaml

from qaudit.checkpoints.folder import find_all
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.recipe.soups import resolve_soups
from qaudit.types import Recipe
from tests.support.filled import filled
from tests.support.models import save_model, save_tokenizer
from tests.support.series import write_soup

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    for seed, step in enumerate((1, 2, 3)):
        save_tokenizer(save_model(root / f"step{step}", seed))
    return root


def merged_by_mergekit(config, out):
    from mergekit.config import MergeConfiguration
    from mergekit.merge import MergeOptions, run_merge

    read = MergeConfiguration.model_validate(yaml.safe_load(yaml.safe_dump(config)))
    run_merge(read, str(out), MergeOptions(copy_tokenizer=True, quiet=True))
    return WeightFolder(out)


def merged_by_us(run, text, out):
    (soup,) = resolve_soups(Recipe((str(run),), (), soups=(text,)), find_all([str(run)]))
    return WeightFolder(write_soup(soup, out))


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("step1+step2+step3", (1, 1, 1)),
        ("0.9*step1+0.1*step3", (0.9, 0, 0.1)),
        ("weighted:scaled=true(3*step1+1*step2)", (3, 1, 0)),
    ],
)
def test_the_weighted_mean_is_mergekit_s(run, tmp_path, text, weights):
    members = [
        {"model": str(run / f"step{step}"), "parameters": {"weight": float(weight)}}
        for step, weight in zip((1, 2, 3), weights, strict=True)
        if weight
    ]
    config = {"merge_method": "linear", "models": members, "dtype": "float32"}
    theirs, ours = (
        merged_by_mergekit(config, tmp_path / "a"),
        merged_by_us(run, text, tmp_path / "b"),
    )
    assert set(theirs.names()) == set(ours.names())
    for name in filled(ours.names()):
        a, b = theirs.read(name), ours.read(name)
        scale = sum(WeightFolder(run / f"step{step}").read(name).abs() for step in (1, 2, 3))
        # One rounding for each of three products and sums, and one of the division.
        assert ((a - b).abs() <= 7 * 2.0**-24 * scale).all(), name


@pytest.mark.parametrize("t", [0.3, 0.5])
def test_slerp_is_mergekit_s(run, tmp_path, t):
    members = [{"model": str(run / f"step{step}")} for step in (1, 2)]
    config = {
        "merge_method": "slerp",
        "base_model": members[0]["model"],
        "models": members,
        "parameters": {"t": t},
        "dtype": "float32",
    }
    theirs = merged_by_mergekit(config, tmp_path / "a")
    ours = merged_by_us(run, f"slerp:t={t}(step1+step2)", tmp_path / "b")
    for name in filled(ours.names()):
        # Its angle comes from float32 dot products, so that coefficients agree to six digits.
        torch.testing.assert_close(theirs.read(name), ours.read(name), rtol=1e-5, atol=1e-6)
