"""Every log-likelihood and every mark is lm-eval's own, with its own model class.

HFLM computes whole sequences in batches of its own, we compute trees; both in float32, where one
differs from the other by the order of additions. Log-likelihoods are sums over an option's
tokens of the order of 100 nats, of which 1e-4 is ten times the last bit.
"""

import random
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.items import Marked, drop
from qaudit.engine.batches import make_item_batches
from qaudit.engine.block_pass import run_blocks
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.tokens import Feed
from qaudit.errors import SourceError
from qaudit.items import harness
from qaudit.items.files import Data, source_of, split_files
from qaudit.items.prepare import Reading, read_items
from qaudit.judge.tasks import answers
from qaudit.model.blocks import BlockModel
from qaudit.settings import Recipe
from qaudit.types import FULL_PRECISION, TaskEvidence
from tests.support import toys
from tests.support.models import save_model
from tests.support.toys import TASKS, tokenizer

pytestmark = pytest.mark.filterwarnings("default")  # lm-eval's own

CONTEXT = 700  # shorter than some prompts, longer than most


def reading(data, tasks, **changes):
    keys = {"tasks": tasks, "task_data": str(data), "task_items": "all", **changes}
    return Reading(Recipe((), **keys), (), "tokenizer", CONTEXT)


def theirs(model, vocabulary, data, tasks):
    """Return lm-eval's log-likelihoods of every request, and its marks of every item."""
    from lm_eval.models.huggingface import HFLM

    model = HFLM(
        pretrained=model, tokenizer=vocabulary, device="cpu", batch_size=8, max_length=CONTEXT
    )
    values = []
    marks = {}
    for definition in harness.definitions(tasks):
        for leaf in definition.leaves:
            task = loaded(leaf, data)
            scored = model.loglikelihood(task.instances, disable_tqdm=True)
            values += [value for value, _ in scored]
            by_document = {}
            for request, answer in zip(task.instances, scored, strict=True):
                by_document.setdefault(request.doc_id, []).append((request, answer))
            marks[definition.name] = [
                float(task.process_results(some[0][0].doc, [a for _, a in some])["acc"])
                for some in by_document.values()
            ]
    return np.array(values), marks


def loaded(leaf, data):
    """Have lm-eval load a task and build its requests, without our own room in between."""
    place = reading(data, TASKS).folder(leaf)
    assert place is not None
    source = source_of(Data.of(leaf), *place, Path(tempfile.mkdtemp()))
    manager = harness._manager(*harness._where(leaf.name, leaf.file))
    (task,) = manager.load([{"group": "g", "task": [{"task": leaf.name, **source}]}])[
        "tasks"
    ].values()
    task.set_config("num_fewshot", 5)
    task.set_fewshot_seed(1234)
    task.build_all_requests(limit=None, rank=0, world_size=1)
    return task


# Easy items of ARC and a second subject of MMLU have the shape of their neighbours.
SHAPES = tuple(name for name in TASKS if name not in ("arc_easy", "mmlu_virology"))


@pytest.mark.parametrize(
    ("family", "adds_bos", "tasks"), [("llama", True, SHAPES), ("olmo2", False, SHAPES[:1])]
)
def test_every_log_likelihood_and_every_mark_is_that_of_lm_eval(
    family, adds_bos, tasks, data, tmp_path
):
    vocabulary = tokenizer(adds_bos=adds_bos)
    save_model(tmp_path / "model", 3, family, max_position_embeddings=4 * CONTEXT)
    text, failed = read_items(reading(data, tasks), vocabulary, {})
    assert failed == {}
    folder = tmp_path / "model"
    device = torch.device("cpu")
    streamed = BlockModel(folder, WeightFolder(folder), dtype=torch.float32, device=device)
    with HiddenStates(tmp_path / "spill", 2**30, device) as states:
        tallies = run_blocks(streamed, Feed((), (), items=(text.windows,)), [], states)
    tally = tallies[FULL_PRECISION]
    assert tally.options is not None
    nll, greedy = tally.options
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected, marks = theirs(model, vocabulary, data, tasks)
    np.testing.assert_allclose(-nll, expected, rtol=0, atol=1e-4)
    first, own = 0, dict[str, list[float]]()
    for item in text.items:
        some = slice(first, first + item.options)
        first += item.options
        right = np.isin(np.arange(item.options), item.right)
        alone = np.zeros(item.options, dtype=np.int64)
        marked = answers(TaskEvidence(item.task, nll[some], alone, right, greedy[some]))
        own.setdefault(item.task, []).append(float(marked.right_N[0]))
    assert own == marks
    assert 0 < sum(map(sum, own.values())) < sum(map(len, own.values()))
    plain = sum(len(window.tokens) - 1 for window in text.windows)
    batches = make_item_batches([text.windows], branches=True)
    assert sum(int((batch.positions_BT > 0).sum()) for batch in batches) < 0.6 * plain


# ------------------------------------------------- a group that lm-eval weights by size is one task


GROUP = "mmlu"


def test_subjects_weigh_by_their_items(tmp_path, monkeypatch):
    from lm_eval.api.metrics import aggregate_subtask_metrics

    (definition,) = harness.definitions([GROUP])
    few = replace(definition, leaves=definition.leaves[:2])  # each loads a data set for seconds
    monkeypatch.setattr(harness, "definitions", lambda names: (few,))
    names = [str(leaf.config["dataset_name"]) for leaf in few.leaves]
    rng, sizes = random.Random(1), [2, 25]
    toys.write(tmp_path, tuple(names), documents=5)
    for name, size in zip(names, sizes, strict=True):
        path = tmp_path / "cais/mmlu" / name / "test-00000-of-00001.parquet"
        toys._parquet(path, [toys._mmlu(rng) for _ in range(size)])
    recipe = Recipe((), tasks=(GROUP,), task_data=str(tmp_path), task_items="all")
    text, failed = read_items(Reading(recipe, (), "t", 4096), tokenizer(adds_bos=False), {})
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


def test_a_group_and_its_parts_are_found_without_reading_all_of_lm_eval():
    assert harness._where("mmlu_anatomy") == harness._where("mmlu") != (None,)
    assert harness._where("mmlu_pro_math") == harness._where("gsm8k") == (None,)
    (definition,) = harness.definitions(["mmlu_anatomy"])
    assert [leaf.name for leaf in definition.leaves] == ["mmlu_anatomy"]
    (definition,) = harness.definitions(["mmlu"])
    assert (definition.name, len(definition.leaves)) == ("mmlu", 57)
    assert len({leaf.name for leaf in definition.leaves}) == 57


@pytest.mark.parametrize("shape", ['"{}"', '["{}"]', '[{{split: test, path: ["{}"]}}]'])
def test_a_readme_names_no_data_outside_of_its_data_set(shape):
    for path in ("/etc/passwd", "../x.json", "reference::x.json", "http://x/y.json", "~/x.json"):
        text = f"---\nconfigs: [{{config_name: x, data_files: {shape.format(path)}}}]\n---\n"
        with pytest.raises(SourceError, match="names data outside of it"):
            split_files(Data("org/name", None, ("test",)), ("x.json",), text.encode())
