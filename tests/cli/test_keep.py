"""`scan --keep`: `export` writes the weights that were judged, without the checkpoint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from qaudit.engine.kept_weights import kept_groups
from qaudit.errors import SourceError
from qaudit.saved.exports import read_export
from qaudit.support.sizes import size
from tests.support.cli import AUDITED, ROUNDED, TEXT, Outcome, Run, refused
from tests.support.filled import filled

GPTQ, RTN = "gptq-4bit:group=32", "rtn-3bit:group=32"
SCAN = ("scan", "series", *TEXT, "--schemes", f"{GPTQ},{RTN}", "--out", "out")
FILES = ("model.safetensors", "config.json", "qaudit-export.json")
KEPT = "written from the weights that the scan kept"


def export(qaudit: Run, out: str, subject: str = "step200") -> Outcome:
    done = qaudit("export", "out", "--subject", subject, "--scheme", GPTQ, "--out", out)
    assert done.code == 0, done.err
    return done


def same(one: Path, other: Path) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in FILES)


def kept(out: Path) -> list[Path]:
    return sorted((out / "evidence" / "kept").rglob("*.safetensors"))


def test_what_is_named_is_kept_and_exported_without_checkpoints_unless_it_was_changed(
    qaudit: Run, place: Path
) -> None:
    done = qaudit(*SCAN, "--keep", f"{GPTQ},{RTN}", "--soup", "late=last:2")
    assert done.code == 0
    whole = place / "out" / "evidence" / "kept"
    assert len(list(whole.iterdir())) == 12  # of four subjects both schemes, and the rest
    nbytes = sum(path.stat().st_size for path in whole.glob("*/*"))
    assert f"kept {size(nbytes)} of weights in out/evidence/kept" in done.err
    whole.rename("aside")
    assert KEPT not in export(qaudit, "again").err
    shutil.copytree("aside", whole)
    for path in filled(path for path in kept(place / "out") if path.name.startswith("rest-")):
        tensors = load_file(path)
        tensors["model.norm.weight"][0] += 1
        save_file(tensors, path)
    done = export(qaudit, "norm")
    assert "are not, or not all, those that were judged" in done.err
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


@pytest.mark.parametrize("about", ['{"block": 0}', "[]", "null", '{"stored": {"a": {}}}'])
def test_damage_in_what_is_kept_ends_in_a_sentence(tmp_path: Path, about: str) -> None:
    os.mkfifo(tmp_path / "00000-00001.safetensors")  # which nothing may wait for
    save_file({}, tmp_path / "00000-00000.safetensors", metadata={"about": about})
    with pytest.raises(SourceError, match="cannot be read"):
        list(kept_groups(tmp_path))


def test_what_was_measured_without_keep_is_not_measured_again(qaudit: Run, exported: Path) -> None:
    done = qaudit("scan", *AUDITED, "--keep", ROUNDED)
    assert done.code == 0
    assert f"at {ROUNDED} are not kept" in done.err
    assert not kept(Path("out"))


def test_the_plan_has_what_is_kept_and_refuses_what_no_disk_holds(
    qaudit: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = qaudit(*SCAN, "--keep", GPTQ, "--dry-run")
    assert "--keep writes up to" in " ".join(plan.out.split())
    refused(
        qaudit(*SCAN, "--keep", "awq-4bit", "--dry-run"),
        2,
        "`--keep awq-4bit` names a scheme that is not measured",
        GPTQ,
    )
    monkeypatch.setattr("qaudit.planning.machine.free_disk_nbytes", lambda place: 1000)
    done = qaudit(*SCAN, "--keep", GPTQ, "--dry-run")
    refused(done, 4, "weights of `--keep`", "fewer schemes in `--keep`, or none")


def test_parts_keep_and_copies_of_them_are_collected(qaudit: Run, place: Path) -> None:
    targets = ("series/step10", "series/step200")
    plan = ("plan", *targets, *TEXT, "--schemes", GPTQ, "--out", "out", "-q")
    assert qaudit(*plan).code == 0
    shutil.copytree(place / "out", place / "other")
    for folder, number in (("out", 0), ("other", 1)):
        for _ in range(2):
            assert qaudit("part", folder, "--part", f"{number}/2", "--keep", GPTQ, "-q").code == 0
    assert qaudit("collect", "out", "other", "-q").code == 0
    assert kept(place / "out")
    assert KEPT in export(qaudit, "new").err
