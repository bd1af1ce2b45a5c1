"""From names on a Hub to a price: what is asked, what is refused, and what a lock holds still.

Over real sockets, and against a server that pretends: a checkpoint of 29 GB is the headers of
its files.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import shutil
from dataclasses import dataclass, replace

import pytest
import safetensors.torch
import torch

from qaudit import families
from qaudit.checkpoints.safetensors import PICKLE_INDEX
from qaudit.errors import HubError, MachineError, SourceError, UsageError
from qaudit.planning.pin import pinned_or_resolved
from qaudit.planning.prepare import make_plan
from qaudit.planning.price import START_SECONDS
from qaudit.planning.resolve import needs_hub, resolve
from qaudit.planning.survey import allowed_notes, refuse
from qaudit.saved.parts import PLAN, write_plan
from qaudit.settings import RunOptions
from qaudit.text.texts import DEFAULT_HUB_CALIBRATION, DEFAULT_HUB_EVALUATION
from qaudit.types import FULL_PRECISION, Checkpoint, Recipe, Ref
from tests.support import own_code, tiny
from tests.support.hub import Hub, write_headers
from tests.support.names import names_of
from tests.support.running import run
from tests.support.series import opened
from tests.support.texts import BYTES, lines

OLMO = "allenai/OLMo-2-1124-7B"
GB = 10**9
HIDDEN, INNER, BLOCKS, VOCABULARY = 4096, 11008, 32, 100352
STEPS = tuple(f"step{k}" for k in range(1000, 13_000, 1000))


def shapes():
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
def model(tmp_path_factory):
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

    def opened(self):
        """Open the Hub as a new process does."""
        return opened(self.hub)

    def asked(self, pattern):
        return [f"{entry['method']} {entry['path']}" for entry in self.hub.asked(pattern)]


@pytest.fixture
def world(tmp_path, monkeypatch):
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


def recipe(*targets, **changes):
    plain = Recipe(targets or (OLMO,), ("rtn-4bit",), document_tokens=64, device="cpu")
    return replace(plain, **changes)


@pytest.fixture
def series(world, model):
    """Return a function that serves 12 checkpoints of 29 GB, or those that are named."""

    def serve(repo=OLMO, names=STEPS, **settings):
        settings = {"main": names[-1], **settings}
        world.hub.add_names(repo, names, model, **settings)
        return world

    return serve


def labels(found):
    return [subject.label for subject in found.subjects]


# ------------------------------------------------------------------------- what is asked


@pytest.mark.slow
def test_a_thousand_revisions_take_a_call_for_each_that_is_chosen(series):
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


def test_local_recipes_need_no_hub_and_texts_are_found_before_trees(series):
    assert not needs_hub(recipe("demo", calibration="mine.txt"))
    assert needs_hub(recipe("demo", evaluation=DEFAULT_HUB_EVALUATION))
    assert needs_hub(recipe("demo", OLMO))
    world = series()
    missing = recipe(evaluation="hf://datasets/allenai/c4/en/missing.jsonl")
    with pytest.raises(HubError, match="evaluation text"):
        resolve(missing, world.opened())
    assert not world.asked(f"/api/models/{OLMO}/tree")


def test_folders_and_repositories_share_a_plan(series, model, tmp_path):
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


def test_a_revision_without_weights_is_a_finding_or_refused(series):
    hub = series(main=None).opened()
    found = resolve(recipe(), hub)
    assert labels(found) == list(STEPS)
    assert [f.subject for f in found.findings if f.rule == "QA012"] == ["main"]
    assert all(c.files for c in found.checkpoints)
    asked = [
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


def test_memory_that_is_short_is_refused_with_numbers_that_fit(series, monkeypatch):
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


def test_a_changed_choice_is_resolved_anew_and_what_moved_said(series, tmp_path):
    def locked(asked):
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


SCHEMES = ("rtn-4bit:group=32",)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    plain = tiny.make(root / "acme/plain/v1", "gpt_neox", vocab_size=320)
    BYTES.save_pretrained(plain)
    pickled = root / "acme/pickled/v1"
    shutil.copytree(plain, pickled)
    pickle_weights(pickled)
    for revision, factor in (("v1", 1.0), ("v2", 2.0)):
        coded = root / "acme/coded" / revision
        BYTES.save_pretrained(coded)
        own_code.make(coded, root / "mark", name=revision, factor=factor)
    with Hub(root).running() as hub:
        yield hub


def pickle_weights(folder):
    """Turn a folder's safetensors into two shards of pickles, with the masks of old checkpoints."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for k, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        shard = {name: tensors[name] for name in part}
        if k == 1:
            shard["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.uint8)
        file = f"pytorch_model-{k:05}-of-00002.bin"
        torch.save(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    (folder / PICKLE_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def hub(served, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("QAUDIT_CACHE", str(tmp_path / "known"))
    (tmp_path / "fed.jsonl").write_bytes(lines("the cat sat on the mat", "a dog and a cat"))
    (tmp_path / "scored.jsonl").write_bytes(lines("one two three four", "the mat sat on a dog"))
    served.log.clear()
    with own_code.modules_in(tmp_path / "modules"):
        yield served


def plan_of(hub, tmp_path, *targets, **allowed):
    recipe = Recipe(
        targets, SCHEMES, device="cpu", dtype="float32", context=8,
        calibration=str(tmp_path / "fed.jsonl"), evaluation=str(tmp_path / "scored.jsonl"),
    )  # fmt: skip
    return make_plan(recipe, hub=opened(hub), options=RunOptions(**allowed))


def audit_of(hub, tmp_path, target, **allowed):
    plan = plan_of(hub, tmp_path, target, **allowed)
    return run(plan, tmp_path / "out" / target, hub=opened(hub), **allowed)


def asked_for(hub):
    """Return what was asked of the Hub beside names and trees."""
    return [e["path"] for e in hub.log if "/resolve" in e["path"] or e["path"].startswith("/cdn")]


def test_pickles_and_code_are_refused_before_a_byte_is_fetched(hub, tmp_path):
    with pytest.raises(UsageError) as caught:
        plan_of(hub, tmp_path, "acme/plain", "acme/pickled")
    assert "of `acme/pickled` (like 1 more) has its weights as pickles only" in caught.value.message
    assert "`--allow-pickle`" in caught.value.hint
    assert asked_for(hub) == []
    with pytest.raises(UsageError) as caught:
        plan_of(hub, tmp_path, "acme/coded")
    assert "has its model as code of its own" in caught.value.message
    assert "`--trust-remote-code`" in caught.value.hint
    assert not any(path.endswith((".py", ".safetensors")) for path in asked_for(hub))
    assert not list(tmp_path.rglob("*.py"))


def test_allowed_pickles_give_the_numbers_of_safetensors(hub, tmp_path):
    plan = plan_of(hub, tmp_path, "acme/pickled", allow_pickle=True)
    assert any("pickled weights are read" in note for note in plan.notes)
    assert any("estimated from its configuration" in note for note in plan.notes)
    found = audit_of(hub, tmp_path, "acme/pickled", allow_pickle=True)
    expected = audit_of(hub, tmp_path / "", "acme/plain")
    for score, other in zip(found.measurements, expected.measurements, strict=True):
        assert (score.ce, score.spec) == (other.ce, other.spec)


def test_allowed_code_is_run_from_each_revisions_own_commit(hub, tmp_path):
    plan = plan_of(hub, tmp_path, "acme/coded@v1", trust_remote_code=True)
    assert any("code of the repository is run" in note for note in plan.notes)
    audits = {
        revision: audit_of(hub, tmp_path, f"acme/coded@{revision}", trust_remote_code=True)
        for revision in ("v1", "v2")
    }
    one, other = (
        next(s.ce.estimate for s in audit.measurements if s.spec == FULL_PRECISION)
        for audit in audits.values()
    )
    assert one != other  # the same weights, other code
    for audit in audits.values():
        commit = audit.subjects[0].first.commit
        for score in audit.measurements:
            assert any(f"code of commit {commit} was run" in note for note in score.notes)


def checkpoint(label, *requires, repo="org/name", family=None):
    return Checkpoint(Ref(repo, label), label, requires=requires, family=family)


def refusal(*checkpoints, pickle=False, code=False):
    with pytest.raises(UsageError) as caught:
        refuse(checkpoints, allow_pickle=pickle, trust_remote_code=code)
    assert caught.value.code == 2
    return caught.value


PICKLES = "`step2` of `org/name` has its weights as pickles only, and opening a pickle can run code"
CODE = "`step3` of `org/name` has its model as code of its own, which is not run unless asked for"


def test_what_is_not_allowed_yet_is_refused_with_the_flag_and_what_it_means():
    plain, pickled = checkpoint("step1"), checkpoint("step2", "pickle")
    coded, both = checkpoint("step3", "remote_code"), checkpoint("step4", "pickle", "remote_code")
    for needing, allowed, message, hint in (
        (pickled, {}, PICKLES, "pass `--allow-pickle` if .* nothing but tensors"),
        (coded, {}, CODE, "pass `--trust-remote-code` if .* with all your rights"),
        (both, {}, "", "pass `--allow-pickle` `--trust-remote-code` if"),
        (both, {"pickle": True}, "", "pass `--trust-remote-code` if"),
        (both, {"code": True}, "", "pass `--allow-pickle` if"),
    ):
        error = refusal(plain, needing, **allowed)
        assert error.message == message or not message
        assert re.match(hint, error.hint)
        refuse([plain, needing], allow_pickle=True, trust_remote_code=True)
    refuse([plain], allow_pickle=False, trust_remote_code=False)
    # A family says why in its own words.
    for repo, need, said in (
        ("LLM360/Amber", "pickle", "no revision was published as safetensors"),
        ("LLM360/Crystal", "pickle", "no revision was published as safetensors"),
        ("LLM360/Crystal", "remote_code", "written for transformers 4"),
        ("open-sci/open-sci-ref-v0.01-1.7b-nemotron-hq-1T-4096", "remote_code",
         "written for transformers 4.49 to 4.57, which may not load with 5"),
    ):  # fmt: skip
        family = families.find(repo)
        assert family is not None
        assert need in family.requires
        needing = checkpoint("step", need, repo=repo, family=family.family)
        assert said in refusal(needing).message
        (note,) = allowed_notes([needing])
        assert said in note
    assert "()" not in refusal(checkpoint("a", "pickle", family="nobody's")).message
