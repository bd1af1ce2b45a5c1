"""A soup that is written is the soup that was measured, and no edit of an export is trusted."""

import errno
import json
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from qaudit.checkpoints.folder import find_all
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.cli.app import run as command
from qaudit.engine.block_pass import open_weights
from qaudit.errors import MachineError, QauditError, SourceError, UsageError
from qaudit.export.contents import begun_folder, begun_path, whole_folder
from qaudit.export.verify import verify
from qaudit.recipe.soups import resolve_soups
from qaudit.saved.codec import write
from qaudit.saved.evidence import VARIABLE, signed_export
from qaudit.saved.exports import FILE, read_export
from qaudit.types import SILENT, Recipe
from tests.support.damage import damaged, edited
from tests.support.filled import filled
from tests.support.models import save_model, save_tokenizer, write_documents
from tests.support.series import write_soup


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    for seed, step in enumerate((1, 2, 3)):
        save_tokenizer(save_model(root / f"step{step}", seed))
    return root


def soup_of(run, text):
    (soup,) = resolve_soups(Recipe((str(run),), (), soups=(text,)), find_all([str(run)]))
    return soup


@pytest.mark.parametrize("shard_nbytes", [10**9, 20_000])
@pytest.mark.parametrize("text", ["step*", "0.75*step1+0.25*step3", "ema:decay=0.5"])
def test_the_soup_is_the_measured_one(run, tmp_path, text, shard_nbytes):
    soup = soup_of(run, text)
    out = write_soup(soup, tmp_path / "soup", shard_nbytes)
    measured, written = open_weights(soup, allow_pickle=False), WeightFolder(out)
    assert set(written.names()) == set(measured.names())
    for name in filled(measured.names()):
        assert torch.equal(written.read(name), measured.read(name)), name
    assert len(list(out.glob("*.safetensors"))) == 1 if shard_nbytes == 10**9 else 2


def test_transformers_loads_it_and_the_card_names_its_members(run, tmp_path):
    soup = soup_of(run, "step1+step2")
    out = write_soup(soup, tmp_path / "soup", 20_000)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    measured = open_weights(soup, allow_pickle=False)
    state = model.state_dict()
    assert all(torch.equal(state[name], measured.read(name)) for name in filled(measured.names()))
    assert AutoTokenizer.from_pretrained(out)("the fox")["input_ids"]
    soup = soup_of(run, "0.75*step1+0.25*step3")
    card = (write_soup(soup, tmp_path / "shares") / "README.md").read_text(encoding="utf-8")
    assert card.startswith('---\nlibrary_name: "transformers"\npipeline_tag: "text-generation"\n')
    assert "| 1 | `step1` | 0.75 |" in card
    thirds = (write_soup(soup_of(run, "step*"), tmp_path / "thirds") / "README.md").read_text()
    assert thirds.count("| 1/3 |") == 3
    assert all(f"`{file.sha256}`" in card for c, _ in soup.members for file in c.files)


def test_weights_code_and_data_of_the_members_are_not_copied(run, tmp_path):
    source = shutil.copytree(run, tmp_path / "run")
    for name in ("modeling.py", "extra.bin", ".hidden", "eval.jsonl", "LICENSE"):
        (source / "step1" / name).write_text("x")
    (source / "step1" / "trainer_state.json").write_text("{}")
    out = write_soup(soup_of(source, "step*"), tmp_path / "soup")
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors", "README.md", "LICENSE"} <= names
    assert not {"modeling.py", "extra.bin", "trainer_state.json", ".hidden", "eval.jsonl"} & names


def test_a_disk_without_room_is_refused_and_one_that_is_full_leaves_nothing_behind(
    run, tmp_path, monkeypatch
):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(MachineError, match="no space left on device"):
        write_soup(soup_of(run, "step*"), tmp_path / "soup")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 8, 1))
    with pytest.raises(MachineError, match="the soup takes"):  # before anything is written
        write_soup(soup_of(run, "step*"), tmp_path / "soup")


def test_members_of_other_architectures_or_tokenizers_are_refused(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "run")
    path = other / "step2" / "config.json"
    config = json.loads(path.read_text()) | {"rms_norm_eps": 0.25, "checkpoint_number": 2}
    path.write_text(json.dumps(config))
    with pytest.raises(SourceError, match=r"`rms_norm_eps` is 1e-06 in one .* and 0.25 in the"):
        write_soup(soup_of(other, "step*"), tmp_path / "soup")
    other = shutil.copytree(run, tmp_path / "again")
    path = other / "step2" / "tokenizer.json"
    path.write_text(path.read_text().replace('"the"', '"teh"') + " ")
    with pytest.raises(SourceError, match="`step1` and `step2` cannot be merged: their tokenizers"):
        write_soup(soup_of(other, "step*"), tmp_path / "soup")


def test_whole_numbers_are_taken_if_they_agree_or_refused(run, tmp_path):
    from safetensors.torch import load_file, save_file

    other = shutil.copytree(run, tmp_path / "run")
    for step in (1, 2, 3):
        path = other / f"step{step}" / "model.safetensors"
        save_file(load_file(path) | {"counts": torch.tensor([7, 9])}, path, {"format": "pt"})
    out = write_soup(soup_of(other, "step*"), tmp_path / "soup")
    assert WeightFolder(out).read("counts").tolist() == [7, 9]
    save_file(load_file(path) | {"counts": torch.tensor([7, 8])}, path, {"format": "pt"})
    with pytest.raises(SourceError, match="`counts` holds whole numbers that differ"):
        write_soup(soup_of(other, "step*"), tmp_path / "again")


# ------------------------------------------------------------- unfinished work


def files_in(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def interrupt(out, identity):
    with pytest.raises(KeyboardInterrupt), begun_folder(out, identity) as folder:
        (folder / "block").write_text("half")
        raise KeyboardInterrupt


def test_the_same_work_goes_on_and_its_folder_goes_when_it_is_complete(tmp_path):
    out = tmp_path / "new"
    interrupt(out, "a")
    (begun_path(out) / "result").mkdir()
    (begun_path(out) / "result" / "half").touch()  # which a killed run left
    with begun_folder(out, "a") as folder, whole_folder(out, folder) as partial:
        assert (folder / "block").read_text() == "half"
        (partial / "x").write_text("whole")
        assert not out.exists()
    assert files_in(tmp_path) == {"new/x": "whole"}


@pytest.mark.parametrize("kind", ["files", "other work", "link", "link within", "file"])
def test_files_of_others_stay_as_they_are(tmp_path, kind):
    out, documents = tmp_path / "new", tmp_path / "documents"
    documents.mkdir()
    (documents / "thesis.txt").write_text("keep")
    begun = begun_path(out)
    if kind == "files":
        begun.mkdir()
        (begun / "block").write_text("keep")
    elif kind == "other work":
        interrupt(out, "b")
    elif kind == "link":
        begun.symlink_to(documents)
    elif kind == "link within":
        interrupt(out, "a")
        (begun / "result").symlink_to(documents)
    else:
        begun.write_text("keep")
    before = files_in(tmp_path)
    with pytest.raises(UsageError, match="unfinished work goes to"), begun_folder(out, "a"):
        raise AssertionError("it was taken")
    assert files_in(tmp_path) == before


def test_a_link_in_place_of_the_lock_is_not_written_through(tmp_path):
    out, target = tmp_path / "new", tmp_path / "thesis.txt"
    target.write_text("keep")
    begun_path(out).mkdir()
    (begun_path(out) / ".qaudit.lock").symlink_to(target)
    with pytest.raises(UsageError, match="holds something else or links"), begun_folder(out, "a"):
        raise AssertionError("it was taken")
    assert target.read_text() == "keep"


KEY = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a folder that was exported, with a signed record."""
    place = tmp_path_factory.mktemp("exported")
    save_tokenizer(save_model(place / "model", 0))
    what = ["--scheme", "rtn-4bit:group=32", "--out", str(place / "new"), "-q"]
    for number, name in enumerate(("calibration", "evaluation")):
        path = write_documents(place / f"{name}.jsonl", range(9 * number, 9 * number + 9))
        what += [f"--{name}", str(path)]
    assert command(["qaudit", "export", str(place / "model"), *what]) == 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(VARIABLE, KEY)
        write(place / "new" / FILE, signed_export(read_export(place / "new")))
    return place / "new"


@given(st.data())
def test_any_record_of_an_export_is_refused_or_has_the_same_value_or_is_not_trusted(exported, data):
    path = exported / FILE
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(VARIABLE, KEY)
        assert verify(exported, None, None, None, SILENT).holds is True  # a whole one is trusted
    whole = path.read_bytes()
    record = read_export(exported)
    try:
        if data.draw(st.booleans()):
            path.write_text(json.dumps(damaged(json.loads(whole), data)))
        else:
            path.write_bytes(edited(whole, data))
        with pytest.MonkeyPatch.context() as patched:
            if data.draw(st.booleans()):
                patched.setenv(VARIABLE, KEY)
            result = verify(exported, None, None, None, SILENT)
        assert not result.holds or result.record == record
        assert result.sentence
    except QauditError as error:
        assert error.message
    finally:
        path.write_bytes(whole)
