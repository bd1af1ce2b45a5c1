"""Configurations of strangers: read, or refused by name, and never believed beyond the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.checkpoints.configuration import (
    longest_context,
    must_be_held,
    read_configuration,
    unreadable,
)
from qaudit.errors import ConfigurationError, SourceError

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
def test_any_configuration_is_read_or_refused_by_name(
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


@pytest.mark.parametrize(
    ("text", "why"),
    [
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
    ],
)
def test_what_no_model_has_is_refused(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=why):
        read_configuration(write(tmp_path, text))


def test_a_folder_without_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"config\.json` cannot be read: no such file"):
        read_configuration(tmp_path)


def test_more_layers_than_tensors_are_refused() -> None:
    must_be_held({"num_hidden_layers": 12}, 12, "`x`")
    with pytest.raises(ConfigurationError, match="13 layers, and its weights hold 12 tensors"):
        must_be_held({"text_config": {"num_hidden_layers": 13}}, 12, "`x`")


class PanicException(BaseException):
    """What the tokenizers library raises when its Rust code panics."""


@pytest.mark.parametrize("raised", [ValueError("bad\nmore"), AssertionError(), PanicException("p")])
def test_whatever_a_library_raises_is_a_sentence(raised: BaseException) -> None:
    with pytest.raises(ConfigurationError, match="the file: "), unreadable("the file"):
        raise raised


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), MemoryError(), SystemExit()])
def test_what_is_no_fault_of_a_file_passes(raised: BaseException) -> None:
    with pytest.raises(type(raised)), unreadable("the file"):
        raise raised
