"""What can run a stranger's program: refused by name and never fetched without permission."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from qaudit import families
from qaudit.checkpoints.safetensors import PICKLE_INDEX
from qaudit.errors import UsageError
from qaudit.planning.prepare import make_plan
from qaudit.planning.survey import allowed_notes, refuse
from qaudit.settings import RunOptions
from qaudit.types import FULL_PRECISION, AuditRecord, Checkpoint, Plan, Recipe, Ref
from tests.support import own_code, tiny
from tests.support.hub import Hub
from tests.support.running import run
from tests.support.series import opened
from tests.support.texts import BYTES, lines

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


def test_pickles_and_code_are_refused_before_a_byte_is_fetched(hub: Hub, tmp_path: Path) -> None:
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


def test_allowed_pickles_give_the_numbers_of_safetensors(hub: Hub, tmp_path: Path) -> None:
    plan = plan_of(hub, tmp_path, "acme/pickled", allow_pickle=True)
    assert any("pickled weights are read" in note for note in plan.notes)
    assert any("estimated from its configuration" in note for note in plan.notes)
    found = audit_of(hub, tmp_path, "acme/pickled", allow_pickle=True)
    expected = audit_of(hub, tmp_path / "", "acme/plain")
    for score, other in zip(found.measurements, expected.measurements, strict=True):
        assert (score.ce, score.spec) == (other.ce, other.spec)


def test_allowed_code_is_run_from_each_revisions_own_commit(hub: Hub, tmp_path: Path) -> None:
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


def checkpoint(label: str, *requires: str, repo: str = "org/name", family: str | None = None):
    return Checkpoint(Ref(repo, label), label, requires=requires, family=family)


def refusal(*checkpoints: Checkpoint, pickle: bool = False, code: bool = False) -> UsageError:
    with pytest.raises(UsageError) as caught:
        refuse(checkpoints, allow_pickle=pickle, trust_remote_code=code)
    assert caught.value.code == 2
    return caught.value


PICKLES = "`step2` of `org/name` has its weights as pickles only, and opening a pickle can run code"
CODE = "`step3` of `org/name` has its model as code of its own, which is not run unless asked for"


def test_what_is_not_allowed_yet_is_refused_with_the_flag_and_what_it_means() -> None:
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
