"""Pickles and code of repositories, from the Hub to an audit: never fetched without permission."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from qaudit.checkpoints.safetensors import PICKLE_INDEX
from qaudit.errors import UsageError
from qaudit.planning.prepare import make_plan
from qaudit.settings import RunOptions
from qaudit.types import FULL_PRECISION, AuditRecord, Plan, Recipe
from tests.support import own_code, tiny
from tests.support.hub import Hub
from tests.support.running import run
from tests.support.texts import BYTES, lines, opened

SCHEMES = ("rtn-4bit:group=32",)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
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


def pickle_weights(folder: Path) -> None:
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
def hub(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("QAUDIT_CACHE", str(tmp_path / "known"))
    (tmp_path / "fed.jsonl").write_bytes(lines("the cat sat on the mat", "a dog and a cat"))
    (tmp_path / "scored.jsonl").write_bytes(lines("one two three four", "the mat sat on a dog"))
    served.log.clear()
    with own_code.modules_in(tmp_path / "modules"):
        yield served


def plan_of(hub: Hub, tmp_path: Path, *targets: str, **allowed: bool) -> Plan:
    recipe = Recipe(
        targets, SCHEMES, device="cpu", dtype="float32", context=8,
        calibration=str(tmp_path / "fed.jsonl"), evaluation=str(tmp_path / "scored.jsonl"),
    )  # fmt: skip
    return make_plan(recipe, hub=opened(hub), options=RunOptions(**allowed))


def audit_of(hub: Hub, tmp_path: Path, target: str, **allowed: bool) -> AuditRecord:
    plan = plan_of(hub, tmp_path, target, **allowed)
    return run(plan, tmp_path / "out" / target, hub=opened(hub), **allowed)


def asked_for(hub: Hub) -> list[str]:
    """Return what was asked of the Hub beside names and trees."""
    return [e["path"] for e in hub.log if "/resolve" in e["path"] or e["path"].startswith("/cdn")]


def losses(audit: AuditRecord, spec: str = FULL_PRECISION) -> float:
    (score,) = [s for s in audit.measurements if s.spec == spec]
    return score.ce.estimate


def test_pickles_are_refused_by_name_before_a_byte_is_fetched(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        plan_of(hub, tmp_path, "acme/plain", "acme/pickled")
    assert "of `acme/pickled` (like 1 more) has its weights as pickles only" in caught.value.message
    assert "`--allow-pickle`" in caught.value.hint
    assert asked_for(hub) == []


def test_allowed_pickles_give_the_numbers_of_safetensors(hub: Hub, tmp_path: Path) -> None:
    plan = plan_of(hub, tmp_path, "acme/pickled", allow_pickle=True)
    assert any("pickled weights are read" in note for note in plan.notes)
    found = audit_of(hub, tmp_path, "acme/pickled", allow_pickle=True)
    expected = audit_of(hub, tmp_path / "", "acme/plain")
    for score, other in zip(found.measurements, expected.measurements, strict=True):
        assert (score.ce, score.spec) == (other.ce, other.spec)


def test_code_that_a_config_tells_of_is_refused_before_it_is_fetched(
    hub: Hub, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        plan_of(hub, tmp_path, "acme/coded")
    assert "has its model as code of its own" in caught.value.message
    assert "`--trust-remote-code`" in caught.value.hint
    assert not any(path.endswith((".py", ".safetensors")) for path in asked_for(hub))
    assert not list(tmp_path.rglob("*.py"))


def test_allowed_code_is_run_from_each_revisions_own_commit(hub: Hub, tmp_path: Path) -> None:
    plan = plan_of(hub, tmp_path, "acme/coded@v1", trust_remote_code=True)
    assert any("code of the repository is run" in note for note in plan.notes)
    audits = {
        revision: audit_of(hub, tmp_path, f"acme/coded@{revision}", trust_remote_code=True)
        for revision in ("v1", "v2")
    }
    assert losses(audits["v1"]) != losses(audits["v2"])  # the same weights, other code
    for audit in audits.values():
        commit = audit.subjects[0].first.commit
        for score in audit.measurements:
            assert any(f"code of commit {commit} was run" in note for note in score.notes)
