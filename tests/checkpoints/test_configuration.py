"""Configurations of strangers: read, or refused by name, and never believed beyond the weights."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from qaudit.checkpoints.stamps import (
    SETTLED_NS,
    Stamp,
    computed_hash,
    hash_of,
    known_hash,
    own_cache,
)
from qaudit.errors import ConfigurationError, SourceError, UsageError
from qaudit.formats.weights import must_match

_KEYS = st.sampled_from(
    ["model_type", "architectures", "num_hidden_layers", "hidden_size", "vocab_size", "x",
     "max_position_embeddings", "quantization_config", "text_config", "num_attention_heads"]
)  # fmt: skip
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=20,
)


def write(folder: Path, text: str) -> Path:
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    return folder


@given(config=_VALUES | st.dictionaries(_KEYS, _VALUES))
def test_configurations_are_read_or_refused(
    config: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write(tmp_path_factory.mktemp("config"), json.dumps(config))
    try:
        table = read_configuration(folder)
        assert longest_context(table, 2048) > 0
        must_be_held(table, 100, "`x`")
    except ConfigurationError as error:
        assert "config.json" in error.message
        assert error.code == 2


def test_what_no_model_has_is_refused(tmp_path: Path) -> None:
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


class PanicException(BaseException):
    """What the tokenizers library raises when its Rust code panics."""


def test_whatever_is_wrong_with_a_configuration_is_a_sentence(tmp_path: Path) -> None:
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


# A quantized file makes the tokens of its base, or is refused by the part that differs.


BASE: dict[str, Any] = {
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
}


def test_a_tokenizer_that_makes_other_tokens_is_refused_by_its_part(tmp_path: Path) -> None:
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
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list that grows whenever a file is read to be hashed."""
    seen: list[Path] = []

    def watched(path: Path, kind: stamps.HashKind = "sha256") -> str:
        seen.append(path)
        return computed_hash(path, kind)

    monkeypatch.setattr(stamps, "computed_hash", watched)
    return seen


def hash_at(path: Path, now_ns: int = LATER) -> str:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stamps.time, "time_ns", lambda: now_ns)
        return hash_of(path)


def test_a_file_is_read_once_and_git_ids_are_those_of_git(weights: Path, reads: list[Path]) -> None:
    link = weights.with_name("link.safetensors")
    link.symlink_to(weights)
    found = {hash_at(path) for path in (weights, weights, link)}
    assert found == {hashlib.sha256(b"weights").hexdigest()}
    assert len(reads) == 1
    command = ["git", "hash-object", weights]
    git = subprocess.run(command, check=True, capture_output=True, text=True)
    assert hash_of(weights, "git") == git.stdout.strip()


def test_a_file_that_just_changed_or_changes_while_it_is_read_is_not_remembered(
    weights: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
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

    def read(path: Path, kind: stamps.HashKind = "sha256") -> str:
        found = computed_hash(path, kind)
        path.write_bytes(b"longer weights")
        return found

    monkeypatch.setattr(stamps, "computed_hash", read)
    hash_at(weights)
    assert known_hash(weights) is None


def test_a_memory_that_is_damaged_or_cannot_be_written_costs_only_time(
    weights: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


def test_another_mount_of_the_same_file_has_the_same_stamp(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    status = (tmp_path / "a").stat()
    names = [name for name in dir(status) if name.startswith("st_")]
    there = SimpleNamespace(**{name: getattr(status, name) for name in names})
    there.st_dev += 1  # each mount of a network share has a number of its own
    mounted = SimpleNamespace(stat=lambda follow_symlinks: there)
    assert Stamp.of(mounted) == Stamp.of(tmp_path / "a")
