"""Configurations as the library reads them: its errors name the file, nothing loads."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoConfig

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.errors import ModelError, SourceError
from qaudit.model.skeleton import build_skeleton, load_whole, must_be_causal_type
from qaudit.text.tokenizer import load_tokenizer
from tests.support import tiny


def configure(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float31"}, {"quantization_config": True}, {"num_attention_heads": 0},
        {"rope_theta": None}, {"rope_parameters": {"rope_type": "none"}}, {"architectures": [1]},
        {"max_position_embeddings": -5}, {"num_hidden_layers": 1_000_000}, {"vocab_size": 2**39},
        {"num_hidden_layers": 9_000}, {"hidden_act": "no"}, {"hidden_act": []},
        {"rms_norm_eps": "x"},
        {"pad_token_id": 10**9}, {"head_dim": 3}, {"layer_types": "x"}, {"id2label": 5},
        {"tie_word_embeddings": []}, {"torch_dtype": {}}, {"attention_bias": "no"},
    ],
    ids=str,
)  # fmt: skip
def test_a_mutated_configuration_is_run_or_refused(
    changes: dict[str, object], llama: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mutated"
    folder.mkdir()
    for path in llama.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    configure(folder, **changes)
    for build in (build_skeleton, load_whole):
        try:
            build(folder, WeightFolder(folder), torch.float32)
        except SourceError as error:
            assert str(folder) in error.message or "layers" in error.message
            assert error.hint


class Imports:
    """A finder that finds nothing and takes note of what is looked for."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        self.names.append(name)
        return None


@pytest.mark.parametrize(
    "name", ["someone/kernel", "kernels-community/flash-attn2", "flash_attention_2", "eager"]
)
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_configuration_does_not_choose_the_attention(
    key: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.make(tmp_path, "llama")
    expected = build_skeleton(folder, WeightFolder(folder), torch.float32).model.config
    configure(folder, **{key: name, "experts_implementation": name, "use_kernels": True})
    imports = Imports()
    monkeypatch.setattr(sys, "meta_path", [imports, *sys.meta_path])
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a request was made"))
    skeleton = build_skeleton(folder, WeightFolder(folder), torch.float32)
    assert skeleton.model.config._attn_implementation == expected._attn_implementation
    whole = load_whole(folder, WeightFolder(folder), torch.float32)
    assert whole.config._attn_implementation == expected._attn_implementation
    assert not {name.partition(".")[0] for name in imports.names} & {"kernels", "flash_attn"}


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{"), ("tokenizer.json", "[]"), ("tokenizer.json", "[" * 100_000),
        ("tokenizer.json", json.dumps(TOKENIZER | {"version": "9.9"})),
        ("tokenizer.json", json.dumps(TOKENIZER | {"model": {"type": "Newer", "vocab": {}}})),
        ("tokenizer.json", json.dumps(TOKENIZER | {"normalizer": {"type": "Newer"}})),
        ("tokenizer_config.json", '{"tokenizer_class": 1}'), ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}'),
        ("tokenizer_config.json", '{"model_max_length": "long"}'),
    ],
)  # fmt: skip
def test_a_mutated_tokenizer_is_refused_by_its_folder(name: str, text: str, tmp_path: Path) -> None:
    configure(tiny.make(tmp_path, "llama"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    load_tokenizer(tmp_path)
    (tmp_path / name).write_text(text)
    try:
        load_tokenizer(tmp_path)
    except SourceError as error:
        assert str(tmp_path) in error.message


@pytest.mark.parametrize(
    ("model_type", "changes", "refused"),
    [
        *((name, {}, True) for name in ("bert", "xlm", "xlnet", "cpmant")),
        ("bert", {"is_decoder": True}, False), ("xlm", {"causal": True}, False),
        ("gpt_neox", {}, False), ("llama", {}, False),
    ],
)  # fmt: skip
def test_models_that_read_what_is_behind_a_token_are_refused_by_their_configuration(
    model_type: str, changes: dict[str, object], refused: bool, tmp_path: Path
) -> None:
    match = r"reads what is (behind a token|before an answer)"
    with pytest.raises(ModelError, match=match) if refused else nullcontext():
        must_be_causal_type(AutoConfig.for_model(model_type, **changes), tmp_path)
