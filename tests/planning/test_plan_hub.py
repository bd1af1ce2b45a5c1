"""From names on a Hub to a price: what is asked, what is refused, what a lock holds still.

Over real sockets, and against a server that pretends: a checkpoint of 29 GB is the headers of
its files.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from qaudit import hub as hub_package
from qaudit.errors import HubError, MachineError, SourceError
from qaudit.planning.pin import pinned_or_resolved
from qaudit.planning.prepare import make_plan
from qaudit.planning.price import START_SECONDS
from qaudit.planning.resolve import needs_hub, resolve
from qaudit.saved.parts import PLAN, write_plan
from qaudit.text.texts import DEFAULT_HUB_CALIBRATION, DEFAULT_HUB_EVALUATION
from qaudit.types import Plan, Recipe, Resolved
from tests.support.hub import Hub, write_headers
from tests.support.names import names_of
from tests.support.series import opened

OLMO = "allenai/OLMo-2-1124-7B"
GB = 10**9
HIDDEN, INNER, BLOCKS, VOCABULARY = 4096, 11008, 32, 100352
STEPS = tuple(f"step{k}" for k in range(1000, 13_000, 1000))


def shapes() -> dict[str, tuple[str, tuple[int, ...]]]:
    sides = dict.fromkeys((f"self_attn.{n}_proj" for n in "qkvo"), (HIDDEN, HIDDEN))
    sides |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (INNER, HIDDEN))
    sides |= {"mlp.down_proj": (HIDDEN, INNER)}
    found = {
        f"model.layers.{block}.{name}.weight": ("F32", shape)
        for block in range(BLOCKS)
        for name, shape in sides.items()
    }
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    return dict.fromkeys(ends, ("F32", (VOCABULARY, HIDDEN))) | found


NBYTES = sum(4 * math.prod(shape) for _, shape in shapes().values())  # headers come on top


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the headers of 7.3B parameters in six shards."""
    folder = tmp_path_factory.mktemp("model")
    assert NBYTES < write_headers(folder, shapes(), 5 * GB) < NBYTES + 100_000
    config = {"model_type": "olmo2", "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder


@dataclass
class World:
    """A Hub, and a machine with caches of its own that nothing is in yet."""

    hub: Hub

    def opened(self) -> hub_package.Hub:
        """Open the Hub as a new process does."""
        return opened(self.hub)

    def asked(self, pattern: str) -> list[str]:
        return [f"{entry['method']} {entry['path']}" for entry in self.hub.asked(pattern)]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    texts = tmp_path / "root/datasets/allenai/c4/main/en"
    texts.mkdir(parents=True)
    for source in (DEFAULT_HUB_CALIBRATION, DEFAULT_HUB_EVALUATION):
        path = texts / source.rpartition("/")[2]
        path.write_bytes(gzip.compress(json.dumps({"text": source}).encode()))
    monkeypatch.setattr("qaudit.planning.prepare.free_disk_nbytes", lambda _: 500 * GB)
    monkeypatch.setattr("qaudit.planning.prepare.available_nbytes", lambda: 64 * 2**30)
    monkeypatch.setattr("qaudit.planning.price.matmul_rate", lambda: 1e10)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("QAUDIT_CACHE", str(tmp_path / "own"))
    with Hub(tmp_path / "root").running() as hub:
        yield World(hub)


def recipe(*targets: str, **changes: Any) -> Recipe:
    plain = Recipe(targets or (OLMO,), ("rtn-4bit",), document_tokens=64, device="cpu")
    return replace(plain, **changes)


Series = Callable[..., World]


@pytest.fixture
def series(world: World, model: Path) -> Series:
    """Return a function that serves 12 checkpoints of 29 GB, or those that are named."""

    def serve(repo: str = OLMO, names: tuple[str, ...] = STEPS, **settings: Any) -> World:
        settings = {"main": names[-1], **settings}
        world.hub.add_names(repo, names, model, **settings)
        return world

    return serve


def labels(found: Resolved | Plan) -> list[str]:
    return [subject.label for subject in found.subjects]


# ------------------------------------------------------------------------- what is asked


@pytest.mark.slow
def test_a_thousand_revisions_take_a_call_for_each_that_is_chosen(series: Series) -> None:
    names = tuple(name for name in names_of(OLMO) if name != "main")
    world = series(names=names, main="stage2-ingredient3-step11931-tokens50B")
    hub = world.opened()
    found = resolve(recipe(), hub)
    trees = {c.commit for c in found.checkpoints}
    # names of the model, names of the data set, two texts, and a tree for each that was chosen
    assert hub.client.calls == 2 + 2 + len(trees)
    assert len(trees) <= 16
    before = hub.client.requests
    plan = make_plan(recipe(), hub=hub, resolved=found)
    # three small files, and one range of each of six shards for all of the checkpoints
    assert hub.client.requests - before <= 2 * (3 + 6)
    assert hub.client.calls == 4 + len(trees)
    assert (plan.blocks, plan.context) == (BLOCKS, 2048)
    assert plan.parameters == NBYTES // 4
    assert not world.asked("GET /cdn.*model-.*safetensors$")

    again = world.opened()
    assert resolve(recipe(), again).subjects == found.subjects
    assert again.client.calls <= 4  # trees are known for ever


def test_local_recipes_need_no_hub_and_texts_are_found_before_trees(series: Series) -> None:
    assert not needs_hub(recipe("demo", calibration="mine.txt"))
    assert needs_hub(recipe("demo", evaluation=DEFAULT_HUB_EVALUATION))
    assert needs_hub(recipe("demo", OLMO))
    world = series()
    missing = recipe(evaluation="hf://datasets/allenai/c4/en/missing.jsonl")
    with pytest.raises(HubError, match="evaluation text"):
        resolve(missing, world.opened())
    assert not world.asked(f"/api/models/{OLMO}/tree")


def test_folders_and_repositories_share_a_plan(series: Series, model: Path, tmp_path: Path) -> None:
    world = series(names=STEPS[:2])
    own = tmp_path / "own-model"
    own.mkdir()
    tiny = dict.fromkeys(("model.layers.0.mlp.up_proj.weight", "x.weight"), ("F32", (8, 8)))
    write_headers(own, tiny, GB)
    for path in own.glob("*.safetensors"):
        path.write_bytes(path.read_bytes() + bytes(2 * 8 * 8 * 4))
    config = {"model_type": "llama", "max_position_embeddings": 512}
    (own / "config.json").write_text(json.dumps(config), encoding="utf-8")
    found = resolve(recipe(str(own), f"{OLMO}@step1000"), world.opened())
    assert labels(found) == ["step1000", "own-model"]  # what no name places comes last
    assert found.local is not None
    plan = make_plan(recipe(), hub=world.opened(), resolved=found)
    assert plan.traffic is not None
    assert plan.traffic.nbytes_to_fetch // GB == 29
    assert plan.context == 512
    assert plan.seconds_low >= START_SECONDS[0]
    assert plan.seconds_high >= START_SECONDS[1]


def test_a_revision_without_weights_is_a_finding_or_refused(series: Series) -> None:
    hub = series(main=None).opened()
    found = resolve(recipe(), hub)
    assert labels(found) == list(STEPS)
    assert [f.subject for f in found.findings if f.rule == "QA012"] == ["main"]
    assert all(c.files for c in found.checkpoints)
    asked: list[dict[str, Any]] = [
        {"checkpoints": ("main",)},
        {"targets": (f"{OLMO}@main",)},
        {"targets": (f"hf://{OLMO}@main",)},
        {"checkpoints": ("step1000",), "soups": ("s=mean(main+step1000)",)},
    ]
    for chosen in asked:
        with pytest.raises(SourceError, match=r"`.*main`.* holds no weights") as refusal:
            resolve(recipe(**chosen), hub)
        assert f"qaudit series {OLMO}" in refusal.value.hint
    with pytest.raises(SourceError, match="none of the 1 checkpoints"):
        resolve(recipe(checkpoints=("m*n",)), hub)


def test_memory_that_is_short_is_refused_with_numbers_that_fit(
    series: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = series(names=STEPS[:1]).opened()
    wide = recipe(schemes=("gptq-4bit",), document_tokens=None, calibration_documents=512)
    found = resolve(wide, hub)

    monkeypatch.setattr("qaudit.planning.prepare.available_nbytes", lambda: 16 * 2**30)
    with pytest.raises(MachineError, match=r"17\.2 GB are free") as refusal:
        make_plan(wide, hub=hub, resolved=found)
    words = refusal.value.hint.replace("`", "").split()
    (documents,) = (int(w.partition("=")[2]) for w in words if "documents=" in w)
    assert 1 <= documents < 512
    fewer = replace(found, recipe=replace(found.recipe, calibration_documents=documents))
    assert make_plan(wide, hub=hub, resolved=fewer).nbytes_memory <= 16 * 2**30
    more = replace(found, recipe=replace(found.recipe, calibration_documents=documents + 1))
    with pytest.raises(MachineError):
        make_plan(wide, hub=hub, resolved=more)


def test_a_changed_choice_is_resolved_anew_and_what_moved_said(
    series: Series, tmp_path: Path
) -> None:
    def locked(asked: Recipe) -> tuple[Resolved, int]:
        """Plan as a run in an output folder does; return the plan and the calls it took."""
        hub, out = world.opened(), tmp_path / "out"
        found = pinned_or_resolved(asked, out / PLAN, hub)
        write_plan(make_plan(asked, hub=hub, resolved=found), asked, found, None, out)
        return found, hub.client.calls

    world = series()
    locked(recipe())
    branches = world.hub.repos[OLMO].branches
    branches["step5000"] = branches["step1000"]
    fewer, calls = locked(recipe(checkpoints=("step5000", "step6000")))
    assert calls > 0
    assert labels(fewer) == ["step5000", "step6000"]
    assert len([note for note in fewer.notes if "is at" in note]) == 1
