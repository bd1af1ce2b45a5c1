"""A group that lm-eval weights by size is one task, whose accuracy is lm-eval's own aggregate."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qaudit.core.items import Marked, drop
from qaudit.errors import SourceError
from qaudit.items import harness
from qaudit.items.files import Data, split_files
from qaudit.items.prepare import Reading, read_items
from qaudit.judge.tasks import answers
from qaudit.settings import Recipe
from qaudit.types import TaskEvidence
from tests.support import toys

pytestmark = pytest.mark.filterwarnings("default")  # lm-eval's own

GROUP = "mmlu"


def test_subjects_of_other_sizes_weigh_by_their_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.api.metrics import aggregate_subtask_metrics

    (definition,) = harness.definitions([GROUP])
    few = replace(definition, leaves=definition.leaves[:3])  # each loads a data set for seconds
    monkeypatch.setattr(harness, "definitions", lambda names: (few,))
    names = [str(leaf.config["dataset_name"]) for leaf in few.leaves]
    rng, sizes = random.Random(1), [2, 9, 25]
    toys.write(tmp_path, tuple(names), documents=5)
    for name, size in zip(names, sizes, strict=True):
        path = tmp_path / "cais/mmlu" / name / "test-00000-of-00001.parquet"
        toys._parquet(path, [toys._mmlu(rng) for _ in range(size)])
    recipe = Recipe((), tasks=(GROUP,), task_data=str(tmp_path), task_items="all")
    text, failed = read_items(Reading(recipe, (), "t", 4096), toys.tokenizer(adds_bos=False), {})
    assert (failed, len(text.items)) == ({}, sum(sizes))
    assert {item.task for item in text.items} == {GROUP}
    nll = np.random.default_rng(2).random(len(text.windows))
    # Later and larger subjects are easier, so that a mean over subjects is another number.
    first, right = 0, list[bool]()
    for item in text.items:
        right += [k in item.right for k in range(item.options)]
        nll[first + item.right[0]] -= len(right) / len(nll)
        first += item.options
    items = np.repeat(np.arange(len(text.items)), [item.options for item in text.items])
    marks = np.array(right)
    own = answers(TaskEvidence(GROUP, nll, items, marks, np.zeros(len(nll), np.bool_))).right_N
    each = np.split(own, np.cumsum(sizes)[:-1])
    accuracies = [float(part.mean()) for part in each]
    assert own.mean() == pytest.approx(aggregate_subtask_metrics(accuracies, sizes))
    assert abs(own.mean() - np.mean(accuracies)) > 0.02
    found = drop([Marked(own, np.ones_like(own))], 0.95, normalized=False)
    assert found is not None
    assert found.estimate == pytest.approx(1 - own.mean())


def test_a_part_of_a_known_group_is_found_without_reading_all_of_lm_eval() -> None:
    assert harness._where("mmlu_anatomy") == harness._where("mmlu") != (None,)
    assert harness._where("mmlu_pro_math") == harness._where("gsm8k") == (None,)
    (definition,) = harness.definitions(["mmlu_anatomy"])
    assert [leaf.name for leaf in definition.leaves] == ["mmlu_anatomy"]


def test_mmlu_is_one_task_of_all_its_subjects() -> None:
    (definition,) = harness.definitions(["mmlu"])
    assert (definition.name, len(definition.leaves)) == ("mmlu", 57)
    assert len({leaf.name for leaf in definition.leaves}) == 57


OUTSIDE = ("/etc/passwd", "../x.json", "reference::x.json", "http://x/y.json", "~/x.json")


@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize("shape", ['"{}"', '["{}"]', '[{{split: test, path: ["{}"]}}]'])
def test_a_readme_names_no_data_outside_of_its_data_set(path: str, shape: str) -> None:
    text = f"---\nconfigs: [{{config_name: x, data_files: {shape.format(path)}}}]\n---\n"
    with pytest.raises(SourceError, match="names data outside of it"):
        split_files(Data("org/name", None, ("test",)), ("x.json",), text.encode())
