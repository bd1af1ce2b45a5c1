"""Folders of checkpoints: which, in which order, what is known of them; and configurations."""

import hashlib
import json
import os
import subprocess
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.checkpoints import stamps
from qaudit.checkpoints.configuration import (
    longest_context,
    must_be_held,
    read_configuration,
    unreadable,
)
from qaudit.checkpoints.folder import DEMO, find_all
from qaudit.checkpoints.stamps import (
    SETTLED_NS,
    Stamp,
    computed_hash,
    hash_of,
    known_hash,
    own_cache,
)
from qaudit.errors import ConfigurationError, QauditError, SourceError, UsageError
from qaudit.formats.weights import must_match
from qaudit.types import Recipe, Ref
from tests.support.series import find_checkpoints

FAMILY = """
family: mine
description: Mine.
tokens_per_step: 100
stages:
  - {name: stage1, lr: {kind: constant, peak: 0.5}}
  - {name: stage2, starts_after: stage1@10, lr: {kind: linear, peak: 0.5, end: 10, verified: false}}
"""


def checkpoint(folder, weights=b"weights"):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(weights + folder.name.encode())
    return folder


def series(folder, *names):
    for name in names:
        checkpoint(folder / name)
    return folder


def labels(checkpoints):
    return [c.label for c in checkpoints]


def recipe(**more):
    return Recipe(("x",), ("rtn-4bit",), **more)  # type: ignore[arg-type]


def trainer_state(folder, **state):
    (folder / "trainer_state.json").write_text(json.dumps(state))


def test_pickled_weights_count_only_where_there_is_nothing_else(tmp_path):
    both, pickled = checkpoint(tmp_path / "both"), checkpoint(tmp_path / "pickled")
    (both / "pytorch_model.bin").write_bytes(b"p")
    (pickled / "pytorch_model.bin").write_bytes(b"p")
    (pickled / "training_args.bin").write_bytes(b"not weights")
    (pickled / "model.safetensors").unlink()
    found = {c.label: [f.name for f in c.files] for c in find_checkpoints(tmp_path)}
    (file,) = find_checkpoints(both)[0].files
    assert file.sha256 == hashlib.sha256(b"weightsboth").hexdigest()
    assert found == {"both": ["model.safetensors"], "pickled": ["pytorch_model.bin"]}


def test_checkpoints_lie_in_a_folder_or_one_deeper_and_others_are_left(tmp_path, monkeypatch):
    flat, deep = series(tmp_path / "flat", "step1", "step2", ".hidden"), tmp_path / "deep"
    (flat / "step2" / "config.json").unlink()  # named later, and not dropped
    (flat / "tokenizer").mkdir()
    (flat / "log.txt").write_text("")
    assert labels(find_checkpoints(flat)) == ["step1", "step2"]
    series(deep, "iter_0000200/hf", "iter_0000030/hf")
    found = find_checkpoints(deep)
    assert [(c.label, c.step) for c in found] == [("iter_0000030", 30), ("iter_0000200", 200)]
    assert found[0].ref == Ref(str(deep / "iter_0000030" / "hf"))
    monkeypatch.chdir(checkpoint(tmp_path / "step7"))
    (found,) = find_checkpoints(".")  # without a name of its own
    assert (found.label, found.step) == ("step7", 7)
    run = checkpoint(tmp_path / "run")  # a final model comes after the checkpoints beneath it
    series(run, "checkpoint-1000", "checkpoint-500", "original")
    assert labels(find_checkpoints(run)) == ["checkpoint-500", "checkpoint-1000", "run"]
    (left,) = series(tmp_path / "left", "step10", "inner/step30", "inner/step40").glob("inner")
    (found,) = find_checkpoints(left.parent)
    (note,) = found.notes
    assert note.startswith("`inner` is left out, with checkpoints inside: name them as targets")


def test_series_keep_their_order_and_equal_names_are_told_apart(tmp_path):
    series(tmp_path, "step1000", "step200")
    targets = [str(tmp_path / "step1000"), str(tmp_path / "step200")]
    assert labels(find_all(targets)) == ["step200", "step1000"]
    series(tmp_path / "b", "step2", "step10")
    series(tmp_path / "a", "step1")
    both = [str(tmp_path / "b"), str(tmp_path / "a")]
    assert labels(find_all(both)) == ["step2", "step10", "step1"]
    for run in ("x/a", "y/a", "x/b"):
        series(tmp_path / run, "step1")
    series(tmp_path / "x/b", "step2")
    found = find_all([str(tmp_path / run) for run in ("x/a", "y/a", "x/b")])
    assert labels(found) == ["x/a/step1", "y/a/step1", "b/step1", "step2"]
    with pytest.raises(UsageError, match="2 times"):
        find_all([str(tmp_path / "x/a"), f"{tmp_path / 'x/a'}/"])


# --------------------------------------------------------------------------- what is known of them


def test_a_family_file_in_the_folder_is_read(tmp_path):
    series(tmp_path, "stage1-step10", "stage2-step5")
    (tmp_path / "qaudit-family.yaml").write_text(FAMILY)
    first, second = find_checkpoints(tmp_path)
    assert (first.family, first.stage, first.tokens, first.learning_rate) == (
        "mine", "stage1", 1000, 0.5,
    )  # fmt: skip
    assert (second.tokens, second.learning_rate) == (1500, 0.25)
    assert (first.notes, second.notes) == ((), ("the learning rate of `stage2` is inferred",))
    (alone,) = find_checkpoints(tmp_path / "stage2-step5")
    assert alone.learning_rate == 0.25


def test_no_family_is_guessed_and_a_trainer_s_state_gives_its_rate(tmp_path):
    folder = checkpoint(tmp_path / "stage1-step500")
    (found,) = find_checkpoints(folder)
    assert (found.family, found.tokens, found.learning_rate) == (None, None, None)
    assert (found.stage, found.step) == ("stage1", 500)
    with pytest.raises(UsageError, match="no family `dmeo`") as caught:
        find_checkpoints(folder, recipe(family="dmeo"))
    assert caught.value.hint == "did you mean `demo`?"
    folder = checkpoint(tmp_path / "final")
    log = [{"step": 10, "learning_rate": 0.3}, {"step": 20, "learning_rate": 0.2}, {"step": 20}]
    trainer_state(folder, global_step=20, num_input_tokens_seen=4096, log_history=log)
    (found,) = find_checkpoints(folder)
    assert (found.step, found.tokens, found.learning_rate) == (20, 4096, 0.2)
    trainer_state(folder, global_step=25, log_history=[{"step": 20, "learning_rate": 0.2}])
    (found,) = find_checkpoints(folder)  # the rate of another step does not stand for it
    assert (found.step, found.learning_rate, found.tokens) == (25, None, None)
    # A recipe's schedule stands in where nothing else is known.
    last = series(tmp_path / "own", "checkpoint-5", "checkpoint-10") / "checkpoint-10"
    trainer_state(last, global_step=10, log_history=[{"step": 10, "learning_rate": 7.0}])
    schedule = {"kind": "linear", "peak": 1.0, "end": 10}
    found = find_checkpoints(tmp_path / "own", recipe(schedule=schedule))
    assert [c.learning_rate for c in found] == [0.5, 7.0]


def test_a_final_model_is_a_row_of_its_own_unless_it_equals_a_checkpoint(tmp_path):
    run = series(checkpoint(tmp_path / "run"), "checkpoint-5", "checkpoint-10", "checkpoint-15")
    for step in (5, 10, 15):
        log = [{"step": step, "learning_rate": step / 100}]
        trainer_state(run / f"checkpoint-{step}", global_step=step, log_history=log)
    (run / "model.safetensors").write_bytes(b"weightscheckpoint-15")
    found = find_checkpoints(run)
    assert [(c.label, c.step, c.learning_rate) for c in found] == [
        ("checkpoint-5", 5, 0.05), ("checkpoint-10", 10, 0.1), ("checkpoint-15", 15, 0.15),
    ]  # fmt: skip
    assert found[-1].notes == ("`run` holds the weights of `checkpoint-15`: one row for both",)
    (run / "model.safetensors").write_bytes(b"weightscheckpoint-5")  # the best was loaded again
    found = find_checkpoints(run)
    assert labels(found) == ["checkpoint-5", "checkpoint-10", "checkpoint-15"]
    assert [bool(c.notes) for c in found] == [True, False, False]
    (run / "model.safetensors").write_bytes(b"weightscheckpoint-16")
    trainer_state(run, global_step=17, log_history=[{"step": 17, "learning_rate": 0}])
    found = find_checkpoints(run)
    assert [(c.label, c.step) for c in found][-1] == ("run", 17)
    assert found[-1].learning_rate == 0
    (run / "model.safetensors").write_bytes(b"weightscheckpoint-15")
    found = find_checkpoints(run, recipe(checkpoints=("run",)))
    assert labels(found)[-1] == "run"  # a copy that is requested by name


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
_STATES = _JSON | st.fixed_dictionaries(
    {},
    optional={
        "global_step": _JSON,
        "num_input_tokens_seen": _JSON,
        "log_history": _JSON
        | st.lists(st.fixed_dictionaries({}, optional={"step": _JSON, "learning_rate": _JSON})),
    },
)


@given(state=_STATES)
def test_trainer_states_are_read_or_refused(state, tmp_path_factory):
    folder = checkpoint(tmp_path_factory.mktemp("state") / "final")
    (folder / "trainer_state.json").write_text(json.dumps(state))
    try:
        (found,) = find_checkpoints(folder, hashed=False)
    except SourceError as error:
        assert "trainer_state.json" in error.message
    else:
        assert found.step is None or found.step >= 0


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, "9" * 5000, "\ud800", '{"global_step": 1e400}']
)
def test_a_trainer_state_made_to_harm_is_refused(text, tmp_path):
    folder = checkpoint(tmp_path / "final")
    (folder / "trainer_state.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(SourceError, match=r"trainer_state\.json"):
        find_checkpoints(folder)


def _runs(root):
    series(root / "run-a", "step10", "step20")
    return series(root / "run-b", "step10", "step20").parent


def _neighbour(root):
    return checkpoint(root / "olmo-step1000").with_name("olmo-step100")


def _without_checkpoints(root):
    (root / "notes.txt").write_text("")
    (root / "sub").mkdir()
    return root


def _without_configuration(root):
    (checkpoint(root / "a") / "config.json").unlink()
    return root / "a"


@pytest.mark.parametrize(
    ("make", "code", "message", "hint"),
    [
        (_neighbour, 2, "there is no folder `{}`", "did you mean `olmo-step1000`?"),
        (lambda root: root / "no" / "where", 2, "there is no folder `{}`", "a recipe file, or `de"),
        (lambda root: root, 2, "`{}` is empty", "checkpoints in it"),
        (_without_checkpoints, 2, "there is no checkpoint in `{}`", "config.json"),
        (_runs, 2, "there is no checkpoint in `{}`", "/run-a`"),
        (_without_configuration, 4, "`{}` holds weights and no `config.json`", "as safetensors"),
        (lambda root: checkpoint(root / "a") / "model.safetensors", 2,
         "`{}` is a file, and a folder is needed", "`config.json` in it"),
    ],
)  # fmt: skip
def test_what_is_no_folder_of_checkpoints_is_refused_and_why(make, code, message, hint, tmp_path):
    target = make(tmp_path)
    with pytest.raises(QauditError) as caught:
        find_checkpoints(target)
    assert (caught.value.message, caught.value.code) == (message.format(target), code)
    assert hint in caught.value.hint


def test_demo_means_the_shipped_series(monkeypatch, tmp_path):
    series(tmp_path / "shipped", "stage1-step500")
    series(tmp_path / "here" / "demo", "step1")
    monkeypatch.setattr("qaudit.checkpoints.folder.shipped_series", lambda: tmp_path / "shipped")
    monkeypatch.chdir(tmp_path / "here")
    assert labels(find_checkpoints(DEMO)) == ["stage1-step500"]
    assert labels(find_checkpoints("./demo")) == ["step1"]


_KEYS = st.sampled_from(
    ["model_type", "architectures", "num_hidden_layers", "hidden_size", "vocab_size", "x",
     "max_position_embeddings", "quantization_config", "text_config", "num_attention_heads"]
)  # fmt: skip
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=20,
)


def write(folder, text):
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    return folder


@given(config=_VALUES | st.dictionaries(_KEYS, _VALUES))
def test_configurations_are_read_or_refused(config, tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("config"), json.dumps(config))
    try:
        table = read_configuration(folder)
        assert longest_context(table, 2048) > 0
        must_be_held(table, 100, "`x`")
    except ConfigurationError as error:
        assert "config.json" in error.message
        assert error.code == 2


class PanicException(BaseException):
    """What the tokenizers library raises when its Rust code panics."""


def test_whatever_is_wrong_with_a_configuration_is_a_sentence(tmp_path):
    with pytest.raises(SourceError, match=r"config\.json` cannot be read: no such file"):
        read_configuration(tmp_path)
    must_be_held({"num_hidden_layers": 12}, 12, "`x`")
    with pytest.raises(ConfigurationError, match="13 layers, and its weights hold 12 tensors"):
        must_be_held({"text_config": {"num_hidden_layers": 13}}, 12, "`x`")
    for raised in (ValueError("bad\nmore"), AssertionError(), PanicException("p")):
        with pytest.raises(ConfigurationError, match="the file: "), unreadable("the file"):
            raise raised
    for raised in (KeyboardInterrupt(), MemoryError(), SystemExit()):  # no fault of a file
        with pytest.raises(type(raised)), unreadable("the file"):
            raise raised
    for text, why in (
        ("[" * 100_000, "nests too deep"),
        ('{"a":' * 40 + "1" + "}" * 40, "nests deeper than 32"),
        ("[]", "not a table"),
        ("{", "Expecting"),
        ("\ud800", "utf-8"),
        ('{"num_hidden_layers": ' + "9" * 5000 + "}", "digits"),
        ('{"num_hidden_layers": 1000000}', "no model has as many layers"),
        ('{"text_config": {"num_layers": 1000000}}', "no model has as many layers"),
        ('{"num_attention_heads": 0}', "`num_attention_heads` is `0`"),
        ('{"max_position_embeddings": -5}', "`max_position_embeddings` is `-5`"),
        ('{"hidden_size": "64"}', "not a whole number"),
        ('{"architectures": [1]}', "no list of names"),
        ('{"model_type": 1}', "`model_type` is `1`"),
        ('{"quantization_config": true}', "`quantization_config` is `True`"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            read_configuration(write(tmp_path, text))


# A quantized file makes the tokens of its base, or is refused by the part that differs.


BASE = {
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
}


def test_a_tokenizer_that_makes_other_tokens_is_refused_by_its_part(tmp_path):
    for change, part in (
        # the same
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
          "model": {**BASE["model"], "merges": ["a b"]}}, ""),
        ({"normalizer": {"type": "Lowercase"}}, "another normalizer"),
        ({"normalizer": None}, "another normalizer"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "another pre-tokenizer"),
        ({"model": {**BASE["model"], "merges": [["b", "a"]]}}, "other merges"),
        ({"model": {**BASE["model"], "merges": []}}, "other merges"),
        ({"model": {**BASE["model"], "vocab": {"a": 1, "b": 0, "ab": 2}}}, "another vocabulary"),
    ):  # fmt: skip
        for name, table in (("own", {**BASE, **change}), ("base", BASE)):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "tokenizer.json").write_text(json.dumps(table))
        with pytest.raises(UsageError, match=f"has {part} than") if part else nullcontext():
            must_match("m", tmp_path / "own", tmp_path / "base")


# --------------------------------------------------------------------------------------------------
# Hashes are remembered exactly as long as they are right.


LATER = 1 << 62  # a time at which every file of this test has been left alone long enough


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def reads(monkeypatch):
    """Return a list that grows whenever a file is read to be hashed."""
    seen = []

    def watched(path, kind="sha256"):
        seen.append(path)
        return computed_hash(path, kind)

    monkeypatch.setattr(stamps, "computed_hash", watched)
    return seen


def hash_at(path, now_ns=LATER):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stamps.time, "time_ns", lambda: now_ns)
        return hash_of(path)


def test_a_file_is_read_once_and_git_ids_are_those_of_git(weights, reads):
    link = weights.with_name("link.safetensors")
    link.symlink_to(weights)
    found = {hash_at(path) for path in (weights, weights, link)}
    assert found == {hashlib.sha256(b"weights").hexdigest()}
    assert len(reads) == 1
    command = ["git", "hash-object", weights]
    git = subprocess.run(command, check=True, capture_output=True, text=True)
    assert hash_of(weights, "git") == git.stdout.strip()


def test_a_file_that_just_changed_or_changes_as_it_is_read_is_not_kept(weights, reads, monkeypatch):
    changed = weights.stat().st_ctime_ns
    hash_at(weights, changed + SETTLED_NS)
    assert known_hash(weights) is None
    hash_at(weights, changed + SETTLED_NS + 1)
    assert known_hash(weights) is not None
    assert len(reads) == 2
    before = weights.stat()
    while weights.stat().st_ctime_ns == before.st_ctime_ns:  # until the clock has ticked
        weights.write_bytes(b"WEIGHTS")
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_mtime_ns == before.st_mtime_ns
    assert known_hash(weights) is None  # other bytes of equal length and date
    assert hash_of(weights) == hashlib.sha256(b"WEIGHTS").hexdigest()

    def read(path, kind="sha256"):
        found = computed_hash(path, kind)
        path.write_bytes(b"longer weights")
        return found

    monkeypatch.setattr(stamps, "computed_hash", read)
    hash_at(weights)
    assert known_hash(weights) is None


def test_a_damaged_memory_costs_only_time_and_mounts_share_stamps(weights, monkeypatch, tmp_path):
    found = hash_at(weights)
    (place,) = (own_cache() / "stamps").iterdir()
    for damage in ("", "[]", "{}", "null", '{"stamp": 1}', "\0"):
        place.write_text(damage)
        assert known_hash(weights) is None
        assert hash_at(weights) == found == known_hash(weights)
    (tmp_path / "file").touch()
    monkeypatch.setenv("QAUDIT_CACHE", str(tmp_path / "file" / "cache"))
    assert hash_at(weights) == hashlib.sha256(b"weights").hexdigest()
    assert known_hash(weights) is None
    (tmp_path / "a").write_bytes(b"x")
    status = (tmp_path / "a").stat()
    names = [name for name in dir(status) if name.startswith("st_")]
    there = SimpleNamespace(**{name: getattr(status, name) for name in names})
    there.st_dev += 1  # each mount of a network share has a number of its own
    mounted = SimpleNamespace(stat=lambda follow_symlinks: there)
    assert Stamp.of(mounted) == Stamp.of(tmp_path / "a")
