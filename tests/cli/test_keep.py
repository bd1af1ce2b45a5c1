"""What a scan keeps: weights for `export`, and a pass for a scan that was killed within it."""

import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from qaudit.engine.kept_weights import kept_groups
from qaudit.errors import SourceError
from qaudit.model.blocks import BlockModel
from qaudit.saved.exports import read_export
from qaudit.support.sizes import size
from qaudit.text.rollouts import Rollout
from qaudit.text.tokenizer import tokenizer_sha256
from tests.support import released, toys
from tests.support.cli import AUDITED, QUICK, ROUNDED, TEXT, audit_of, refused
from tests.support.filled import filled
from tests.support.parts import lasting, start
from tests.support.rollouts import written

GPTQ, RTN = "gptq-4bit:group=32", "rtn-3bit:group=32"
SCAN = ("scan", "series", *TEXT, "--schemes", f"{GPTQ},{RTN}", "--out", "out")
FILES = ("model.safetensors", "config.json", "qaudit-export.json")
KEPT = "written from the weights that the scan kept"


def export(qaudit, out, subject="step200"):
    return qaudit("export", "out", "--subject", subject, "--scheme", GPTQ, "--out", out, code=0)


def same(one, other):
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in FILES)


def kept(out):
    return sorted((out / "evidence" / "kept").rglob("*.safetensors"))


def test_what_is_named_is_kept_and_exported_without_checkpoints(qaudit, place):
    done = qaudit(*SCAN, "--keep", f"{GPTQ},{RTN}", "--soup", "late=last:2", code=0)
    whole = place / "out" / "evidence" / "kept"
    assert len(list(whole.iterdir())) == 12  # of four subjects both schemes, and the rest
    nbytes = sum(path.stat().st_size for path in whole.glob("*/*"))
    assert f"kept {size(nbytes)} of weights in out/evidence/kept" in done.err
    whole.rename("aside")
    assert KEPT not in export(qaudit, "again").err
    shutil.copytree("aside", whole)
    for path in filled(path for path in kept(place / "out") if path.name == "model.safetensors"):
        tensors = load_file(path)
        tensors["model.norm.weight"][0] += 1
        save_file(tensors, path)
    assert "are not, or not all, those that were judged" in export(qaudit, "norm").err
    for name, change, sentence in (
        ("byte", lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "are not, or not all, those that"),
        ("half", lambda raw: raw[: len(raw) // 2], "cannot be read"),
    ):
        shutil.rmtree(whole)
        shutil.copytree("aside", whole)
        for path in filled(whole.glob("*/00001-00000.safetensors")):
            path.write_bytes(change(path.read_bytes()))
        done = export(qaudit, name)
        assert sentence in done.err and KEPT not in done.err
        assert same(place / name, place / "again")
    shutil.rmtree(whole)
    Path("aside").rename(whole)
    for weights in place.glob("series/*/*.safetensors"):
        weights.unlink()
    assert KEPT in export(qaudit, "new").err
    assert same(place / "new", place / "again")
    assert KEPT in export(qaudit, "soup", "late").err
    assert read_export(place / "soup").subject == "late"
    assert not list(place.glob(".*.begun"))


def test_damage_in_what_is_kept_ends_in_a_sentence(tmp_path):
    os.mkfifo(tmp_path / "00000-00001.safetensors")  # which nothing may wait for
    for about in ('{"block": 0}', "[]", "null", '{"stored": {"a": {}}}'):
        save_file({}, tmp_path / "00000-00000.safetensors", metadata={"about": about})
        with pytest.raises(SourceError, match="cannot be read"):
            list(kept_groups(tmp_path))


def test_what_was_measured_is_not_kept_later_and_disks_must_hold(qaudit, exported, monkeypatch):
    assert f"at {ROUNDED} are not kept" in qaudit("scan", *AUDITED, "--keep", ROUNDED, code=0).err
    assert not kept(Path("out"))
    # The plan has what is kept and refuses what no disk holds.
    plan = qaudit(*SCAN, "--keep", GPTQ, "--dry-run")
    assert "--keep writes up to" in " ".join(plan.out.split())
    done = qaudit(*SCAN, "--keep", "awq-4bit", "--dry-run")
    refused(done, 2, "`--keep awq-4bit` names a scheme that is not measured", GPTQ)
    monkeypatch.setattr("qaudit.planning.machine.free_disk_nbytes", lambda place: 1000)
    done = qaudit(*SCAN, "--keep", GPTQ, "--dry-run")
    refused(done, 4, "weights of `--keep`", "fewer schemes in `--keep`, or none")


def test_parts_keep_and_copies_of_them_are_collected(qaudit, place):
    targets = ("series/step10", "series/step200")
    plan = ("plan", *targets, *TEXT, "--schemes", GPTQ, "--out", "out", "-q")
    qaudit(*plan, code=0)
    shutil.copytree(place / "out", place / "other")
    for folder, number in (("out", 0), ("other", 1)) * 2:
        qaudit("part", folder, "--part", f"{number}/2", "--keep", GPTQ, code=0)
    qaudit("collect", "out", "other", code=0)
    assert kept(place / "out")
    assert KEPT in export(qaudit, "new").err


# Keeps its pass at every block, says so at the entrance of the second, and waits to be killed.
STOPS = """
import time
import qaudit.engine.block_pass
from qaudit.cli import main
from qaudit.cli.progress import Progress

qaudit.engine.block_pass.EVERY_SECONDS = 0.0

def block(self, done, total, what):
    if done == 1:
        print("in the middle", flush=True)
        time.sleep(600)

Progress.block = block
main()
"""


def numbers(folder):
    audit = audit_of(folder)
    rows = audit["measurements"] + audit["tasks"] + audit["diagnostics"].get("rollouts", [])
    return lasting(rows + audit["diagnostics"].get("routing", []))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # lm-eval's own
def test_a_killed_subject_goes_on_at_its_block_with_all_it_scores(place, qaudit, monkeypatch):
    model = released.save(place / "model", "olmoe", max_position_embeddings=1024)
    toys.tokenizer(adds_bos=False).save_pretrained(model)
    toys.write(place / "data", ("anatomy",), documents=6)
    samples = [
        Rollout(prompt=k, prompt_sha256=f"{k}", ids=(1, 2, 3), new_ids=(4 + k, 5, 6), greedy=True)
        for k in range(4)
    ]
    written(place / "rolls", samples, tokenizer_sha256=tokenizer_sha256([model]))
    items = ("--tasks", "arc_easy,piqa", "--set", "task_data=data", "--set", "task_items=4")
    scan = ("scan", *QUICK, "model", *items, "--set", "rollouts=rolls")
    process = start(place, *scan, main=STOPS)
    assert process.stdout is not None
    assert process.stdout.readline() == "in the middle\n", process.communicate()[1]
    process.kill()
    process.communicate()
    passes = place / "out" / "evidence" / "passes"
    assert [path.suffix for path in passes.iterdir()] == [".kept"]
    begun = []
    blocks_of = BlockModel.blocks

    def blocks(self, first=0):
        begun.append(first)
        return blocks_of(self, first)

    monkeypatch.setattr(BlockModel, "blocks", blocks)
    qaudit(*scan, code=0)
    assert begun[0] == 1
    assert not passes.exists()
    assert qaudit(*scan, "--out", "whole").code == 0
    assert numbers(place / "out") == numbers(place / "whole")
    assert len(numbers(place / "out")) > 2 + 4  # two streams, two tasks of each, and the rest
