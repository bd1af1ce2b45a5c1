"""`scan --keep`: `export` writes the weights that were judged, without the checkpoint."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from qaudit.engine.kept_weights import kept_groups, sha256_of
from qaudit.errors import SourceError
from qaudit.saved.exports import read_export, write_export
from qaudit.support.sizes import size
from tests.support.cli import TEXT, Outcome, Run, audit_of, refused, run_in
from tests.support.filled import filled

GPTQ, RTN = "gptq-4bit:group=32", "rtn-3bit:group=32"
SCAN = ("scan", "series", *TEXT, "--schemes", f"{GPTQ},{RTN}", "--out", "out")
FILES = ("model.safetensors", "config.json", "qaudit-export.json")
KEPT = "written from the weights that the scan kept"


def export(qaudit: Run, out: str, *more: str) -> Outcome:
    shown = audit_of(Path("out"))["verdict"]
    subject = next(c for c in shown["classes"] if c["bit_class"] == "4")
    named = ("--subject", subject["subject"], "--scheme", GPTQ)
    return qaudit("export", "out", *named, "--out", out, *more)


def same(one: Path, other: Path) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in FILES)


def kept(out: Path) -> list[Path]:
    return sorted((out / "evidence" / "kept").rglob("*.safetensors"))


@pytest.fixture(scope="module")
def scanned(shipped: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what a scan left that kept nothing."""
    folder = tmp_path_factory.mktemp("kept") / "place"
    shutil.copytree(shipped, folder)
    assert run_in(folder, *SCAN, "-q") == 0
    return folder / "out"


def test_what_is_named_is_kept_and_exported_without_the_checkpoint(
    qaudit: Run, place: Path
) -> None:
    done = qaudit(*SCAN, "--keep", f"{GPTQ},{RTN}")
    assert done.code == 0
    folders = list((place / "out" / "evidence" / "kept").iterdir())
    assert len(folders) == 9  # of three subjects the linears under each scheme, and the rest
    assert {one["status"] for one in audit_of(place / "out")["verdict"]["classes"]} == {"undecided"}
    nbytes = sum(path.stat().st_size for folder in folders for path in folder.iterdir())
    assert f"kept {size(nbytes)} of weights in out/evidence/kept" in done.err
    shutil.copytree(place / "out", place / "copy")
    shutil.rmtree(place / "out" / "evidence" / "kept")
    again = export(qaudit, "again")
    assert again.code == 0
    assert KEPT not in again.err
    shutil.rmtree(place / "out")
    (place / "copy").rename(place / "out")
    for weights in place.glob("series/*/*.safetensors"):
        weights.unlink()
    done = export(qaudit, "new")
    assert done.code == 0, done.err
    assert KEPT in done.err
    assert same(place / "new", place / "again")
    assert not list(place.glob(".new*"))


def test_kept_weights_and_norms_that_were_changed_are_made_again(qaudit: Run, place: Path) -> None:
    assert qaudit(*SCAN, "--keep", GPTQ, "-q").code == 0
    assert export(qaudit, "first").code == 0
    path = next(path for path in kept(place / "out") if path.name == "00001-00000.safetensors")
    raw = path.read_bytes()
    for damaged, sentence in (
        (raw[:-1] + bytes([raw[-1] ^ 1]), "are not, or not all, those that were judged"),
        (raw[: len(raw) // 2], "cannot be read"),
    ):
        path.write_bytes(damaged)
        done = export(qaudit, f"new{len(damaged)}")
        assert done.code == 0, done.err
        assert sentence in done.err
        assert KEPT not in done.err
        assert same(place / f"new{len(damaged)}", place / "first")
    path.write_bytes(raw)
    rest = [path for path in kept(place / "out") if path.name.startswith("rest-")]
    for path in filled(rest):
        tensors = load_file(path)
        tensors["model.norm.weight"][0] += 1
        save_file(tensors, path)
    assert "are not, or not all, those that were judged" in export(qaudit, "norm").err


@pytest.mark.parametrize("about", ['{"block": 0}', "[]", "null", '{"stored": {"a": {}}}'])
def test_damage_in_what_is_kept_ends_in_a_sentence(tmp_path: Path, about: str) -> None:
    os.mkfifo(tmp_path / "00000-00001.safetensors")  # which nothing may wait for
    save_file({}, tmp_path / "00000-00000.safetensors", metadata={"about": about})
    with pytest.raises(SourceError, match="cannot be read"):
        list(kept_groups(tmp_path))


def test_what_was_measured_without_keep_is_not_measured_again(
    qaudit: Run, place: Path, scanned: Path
) -> None:
    shutil.copytree(scanned, place / "out")
    done = qaudit(*SCAN, "--keep", GPTQ)
    assert done.code == 0
    assert f"at {GPTQ} are not kept" in done.err
    assert not kept(place / "out")
    assert export(qaudit, "new").code == 0


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
    assert qaudit("plan", *SCAN[1:], "-q").code == 0
    shutil.copytree(place / "out", place / "other")
    for folder, number in (("out", 0), ("other", 1)):
        for _ in range(2):
            assert qaudit("part", folder, "--part", f"{number}/2", "--keep", GPTQ, "-q").code == 0
    assert qaudit("collect", "out", "other", "-q").code == 0
    assert kept(place / "out")
    assert KEPT in export(qaudit, "new").err


def test_a_soup_is_exported_without_its_members(qaudit: Run, place: Path) -> None:
    assert qaudit(*SCAN, "--soup", "late=last:2", "--keep", GPTQ, "-q").code == 0
    what = ("export", "out", "--subject", "late", "--scheme", GPTQ, "--out")
    for weights in place.glob("series/*/*.safetensors"):
        weights.unlink()
    done = qaudit(*what, "new")
    assert done.code == 0, done.err
    assert KEPT in done.err
    assert read_export(place / "new").subject == "late"


def test_a_file_with_another_norm_is_not_what_was_audited(
    qaudit: Run, place: Path, scanned: Path
) -> None:
    shutil.copytree(scanned, place / "out")
    assert export(qaudit, "new").code == 0
    path = place / "new" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    record = read_export(place / "new")
    rest = {**record.rest, "model.norm.weight": sha256_of(tensors["model.norm.weight"])}
    files = {**record.files, path.name: hashlib.sha256(path.read_bytes()).hexdigest()}
    write_export(replace(record, rest=rest, files=files), place / "new")
    done = qaudit("verify", "new", "--audit", "out")
    assert ("embeddings, norms or head are not those" in done.out, done.code) == (True, 1)
