"""Code of a repository: never run without leave, never another commit's, and never for a family
the library knows."""

import hashlib
import json
import shutil

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.registry import parse_schemes
from qaudit.engine.batches import make_batches
from qaudit.engine.block_pass import Route
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.tasks import Machine
from qaudit.engine.tokens import Feed
from qaudit.errors import ModelError, QauditError, SourceError
from qaudit.model.blocks import BlockModel
from qaudit.model.config import code_sha256, computed_buffers, is_remote
from qaudit.model.skeleton import build_skeleton, load_whole, read_config
from qaudit.types import FULL_PRECISION, Window
from tests.support import own_code, tiny

CPU = torch.device("cpu")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKENS_T = torch.arange(3, 27)


@pytest.fixture(autouse=True)
def _modules_of_this_test(tmp_path):
    with own_code.modules_in(tmp_path / "modules"):
        yield


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "mark"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "model"


def load(folder, **leave):
    return load_whole(folder, WeightFolder(folder), torch.float32, **leave)


@torch.no_grad()
def logits(model):
    return model(input_ids=TOKENS_T[None]).logits[0]


def must_compute(folder, tensors, factor=1):
    """Assert that the code, run with leave, computes what it says."""
    expected = factor * own_code.logits(tensors, TOKENS_T)
    torch.testing.assert_close(logits(load(folder, trust_remote_code=True)), expected)


def refusal(folder, **leave):
    with pytest.raises(QauditError) as caught:
        load(folder, **leave)
    return caught.value


def run(folder, tmp_path, schemes="rtn-4bit:group=32"):
    windows = [Window(0, TOKENS_T.numpy().astype(np.int32))]
    feed = Feed(make_batches(windows, 24), make_batches(windows, 24))
    machine = Machine(CPU, torch.float32, 0, trust_remote_code=True)
    route = Route(folder, WeightFolder(folder), machine)
    with HiddenStates(tmp_path, 10**9, CPU) as streams:
        return dict(route.follow(feed, parse_schemes([schemes]), streams, lambda *_: None))


# ----------------------------------------------------------------------------------- permission


def test_without_leave_nothing_is_imported_and_with_it_it_computes(folder, tmp_path, mark):
    tensors = own_code.make(folder, mark)
    for attempt in (
        lambda: read_config(folder),
        lambda: build_skeleton(folder, WeightFolder(folder), torch.float32),
        lambda: BlockModel(folder, WeightFolder(folder), dtype=torch.float32, device=CPU),
        lambda: load(folder),
    ):
        with pytest.raises(ModelError) as caught:
            attempt()
        assert "code of its own, which is not run unless asked for" in caught.value.message
        assert "--trust-remote-code" in caught.value.hint
    assert not mark.exists()
    assert not (tmp_path / "modules").exists()
    # The frequencies are computed and not stored: built without memory they would be lost.
    must_compute(folder, tensors)
    assert {"configuration first", "modeling first"} == set(mark.read_text().splitlines())
    # What was copied for an earlier run and changed since is not run.
    (copied,) = (tmp_path / "modules").rglob("modeling_own.py")
    copied.write_text(copied.read_text().replace("logits=1.0", "logits=9.0"))
    must_compute(folder, tensors)


def test_a_family_the_library_knows_never_runs_code_beside_it(folder, tmp_path, mark):
    native = tiny.make(tmp_path / "native", "llama")
    expected = load(native)
    own_code.make(folder, mark)
    config = json.loads((native / "config.json").read_text())
    config["auto_map"] = json.loads((folder / "config.json").read_text())["auto_map"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((native / "model.safetensors").read_bytes())
    assert not is_remote(folder)
    model = load(folder, trust_remote_code=True)
    options = {"dtype": torch.float32, "device": CPU, "trust_remote_code": True}
    streamed = BlockModel(folder, WeightFolder(folder), **options)
    assert type(model) is type(expected)
    assert torch.equal(logits(model), logits(expected))
    assert streamed.is_streamable
    assert not mark.exists()


ELSEWHERE = ("other/repo--own.Own", "/etc/evil.Evil", "../evil.Evil", "evil", "a.b.c")
BROKEN = (
    ({"after": "from transformers.utils import LossKwargs"}, "to be imported: ImportError"),
    ({"after": "import a_library_nobody_has"}, "a_library_nobody_has"),
    ({"after": "class :"}, "to be imported: SyntaxError"),
    ({"ties": ("lm_head.weight",)}, "to be built"),
)


@pytest.mark.parametrize(
    ("made", "said", "hint"),
    [
        *(({"auto_map": {"AutoConfig": of}}, f"code from `{of}`", "never run") for of in ELSEWHERE),
        *((made, said, "another `transformers` than 5") for made, said in BROKEN),
    ],
)
def test_code_from_elsewhere_or_that_does_not_load_is_refused(folder, mark, made, said, hint):
    own_code.make(folder, mark, **made)
    error = refusal(folder, trust_remote_code=True)
    assert isinstance(error, ModelError)
    assert said in error.message
    assert hint in error.hint
    assert not mark.exists() if "auto_map" in made else f"in `{folder}` fails" in error.message


# -------------------------------------------------------------------------------- which commit


def test_a_module_that_only_imports_another_is_told_apart(tmp_path, mark):
    one, other = (tmp_path / commit / "model" for commit in ("a" * 40, "b" * 40))
    own_code.make(one, mark, name="same")
    own_code.make(other, tmp_path / "other", name="same")  # differs in `mark.py` alone
    load(one, trust_remote_code=True)
    load(other, trust_remote_code=True)
    assert mark.read_text() == (tmp_path / "other").read_text()
    assert code_sha256(one) != code_sha256(other)
    before = code_sha256(shutil.copytree(one, tmp_path / "copy"))
    assert code_sha256(one) == before
    (one / "sub").mkdir()
    (one / "sub" / "late.py").write_text("")  # all of its files are the code
    assert code_sha256(one) != before


def test_code_that_registers_itself_is_forgotten(tmp_path, mark):
    one, other = (tmp_path / commit / "model" for commit in ("a" * 40, "b" * 40))
    register = 'AutoConfig.register("own", OwnConfig)'
    own_code.make(one, mark, name="one", after=register)
    tensors = own_code.make(other, mark, name="other", factor=3.0, after=register)
    load(one, trust_remote_code=True)
    must_compute(other, tensors, 3)
    assert "own" not in CONFIG_MAPPING
    with pytest.raises(ModelError, match="not run unless asked for"):
        read_config(one)


def test_code_in_the_shared_cache_is_read_through_its_links(tmp_path, mark):
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / COMMIT
    tensors = own_code.make(tmp_path / "model", mark)
    blobs.mkdir()
    folder.mkdir(parents=True)
    for path in (tmp_path / "model").iterdir():
        blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(blob)
        (folder / path.name).symlink_to(blob)
    must_compute(folder, tensors)


# ------------------------------------------------------------------------------------ how it runs


@pytest.mark.parametrize(
    "made",
    [
        {"poses_as": "own"},
        {"poses_as": "llama"},  # what it calls itself proves nothing
        {"ties": ["lm_head.weight"]},  # written for version 4
    ],
)
def test_it_is_streamed_once_the_stream_is_shown_to_be_the_same(tmp_path, mark, made):
    folder = tmp_path / "snapshots" / COMMIT
    tensors = own_code.make(folder, mark, **made)
    must_compute(folder, tensors)
    tallies = run(folder, tmp_path)
    logits_TV = own_code.logits(tensors, TOKENS_T)[:-1]
    expected = torch.nn.functional.cross_entropy(logits_TV, TOKENS_T[1:], reduction="sum")
    measured = float(sum(nll.sum() for nll in tallies[FULL_PRECISION].nll))
    assert measured == pytest.approx(float(expected), rel=1e-5)
    assert any("bit-identical" in note for note in tallies[FULL_PRECISION].notes)
    for tally in tallies.values():
        assert any(f"of commit {COMMIT} was run (sha256 " in note for note in tally.notes)


def test_it_is_refused_where_its_stream_is_another_or_fails(tmp_path, mark, monkeypatch):
    own_code.make(tmp_path / "failing", mark, before="raise RuntimeError('not today')")
    with pytest.raises(ModelError, match="the blocks of a `own` cannot stand alone: not today"):
        run(tmp_path / "failing", tmp_path)
    own_code.make(tmp_path / "model", mark)
    monkeypatch.setattr(
        "qaudit.model.blocks.computed_buffers",
        lambda *args: {name: 2 * b for name, b in computed_buffers(*args).items()},
    )
    with pytest.raises(ModelError, match="of a `own`, run one at a time, give other logits"):
        run(tmp_path / "model", tmp_path)


def test_a_tensor_that_is_not_there_is_named(folder, mark):
    tensors = own_code.make(folder, mark)
    del tensors["layers.1.up.weight"]
    own_code.safetensors.torch.save_file(tensors, folder / "model.safetensors")
    error = refusal(folder, trust_remote_code=True)
    assert isinstance(error, SourceError)
    assert "`layers.1.up.weight`" in error.message
