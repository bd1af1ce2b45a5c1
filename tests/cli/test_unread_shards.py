"""Shards that hold nothing but towers are not downloaded, unless they are written again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support import released
from tests.support.cards import whole_at
from tests.support.cli import TEXT, Run, audit_of, settings
from tests.support.hub import Hub, Serve
from tests.support.models import save_tokenizer

TOWERS, WORDS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SCHEME = "rtn-4bit:group=32"
SHORT = (*TEXT, "--set", "context=32", "--schemes", SCHEME)


def shard(folder: Path, *, mixed: bool = False) -> None:
    """Store the towers in one shard and the text in another; `mixed`: one tensor of them beside."""
    single = folder / "model.safetensors"
    # The tower's names in the release; transformers 5 saves shorter ones.
    tower = ("vision_tower.", "vision_tower.vision_model.")
    tensors = {name.replace(*tower): tensor for name, tensor in load_file(single).items()}
    single.unlink()
    beside = "multi_modal_projector.mm_soft_emb_norm.weight" if mixed else ""
    placed = {n: WORDS if n == beside or n.startswith("lang") else TOWERS for n in tensors}
    for file in (TOWERS, WORDS):
        part = {name: tensors[name] for name in tensors if placed[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def hub(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Serve two checkpoints of a wrapper, whose towers are in shards of their own."""
    repo = tmp_path / "root" / "org" / "model"
    for seed, name in enumerate(("step1", "step2")):
        save_tokenizer(released.save(repo / name, "gemma3", seed))
        shard(repo / name, mixed=bool(seed))
    settings(repo, branch_per_revision=True)
    hub = serve(tmp_path / "root")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    return hub


def test_towers_in_shards_of_their_own_are_not_downloaded(
    hub: Hub, place: Path, qaudit: Run, tmp_path: Path
) -> None:
    done = qaudit("scan", "org/model@step1", *SHORT, "--out", "out", "--keep", SCHEME)
    assert done.code == 0, done.err
    assert hub.asked(WORDS) and not hub.asked(TOWERS)
    assert [path.name for path in (tmp_path / "cache").rglob("*.safetensors")] == [WORDS]
    (note,) = [n for n in audit_of(place / "out")["plan"]["notes"] if "not downloaded" in n]
    assert TOWERS in note and note in whole_at(place / "out")

    local = tmp_path / "root" / "org" / "model" / "step1"
    assert qaudit("scan", local, *SHORT, "--out", "local").code == 0
    ours, theirs = (audit_of(place / name)["measurements"] for name in ("out", "local"))
    for key in ("ce", "kl", "bits_per_weight"):
        assert [row[key] for row in ours] == [row[key] for row in theirs], key

    before = len(hub.log)
    assert qaudit("scan", "org/model@step1", *SHORT, "--out", "out").code == 0
    assert not [e for e in hub.log[before:] if "safetensors" in e["path"]]  # nothing is measured

    named = ("--subject", "step1", "--scheme", SCHEME, "--out", "new", "-q")
    done = qaudit("export", "out", *named)
    assert done.code == 0, done.err
    assert hub.asked(TOWERS)
    written = load_file(place / "new" / "model.safetensors")
    stored = load_file(local / TOWERS)
    assert all((written[name] == tensor).all() for name, tensor in stored.items())
    done = qaudit("verify", "new", "--audit", "out", "--json", "-q")
    assert json.loads(done.out)["differences"] == []


def test_members_of_a_soup_may_have_other_shards(
    hub: Hub, place: Path, qaudit: Run, tmp_path: Path
) -> None:
    options = (*SHORT, "--soup", "step1+step2", "--out", "out")
    assert qaudit("scan", "org/model", *options).code == 0
    assert not hub.asked(TOWERS)
    folder = tmp_path / "series"
    shutil.copytree(tmp_path / "root" / "org" / "model", folder)
    (folder / "repo.json").unlink()
    assert qaudit("scan", folder, *SHORT, "--soup", "step1+step2", "--out", "l").code == 0
    ours, theirs = (
        {(r["subject"], r["scheme"]): r["ce"] for r in audit_of(place / name)["measurements"]}
        for name in ("out", "l")
    )
    assert len(theirs) == 6 and ours | theirs == ours  # beside `main`
    done = qaudit("soup", "org/model", "--soup", "step1+step2", "--out", "soup")
    assert done.code == 0, done.err
    assert hub.asked(TOWERS)
