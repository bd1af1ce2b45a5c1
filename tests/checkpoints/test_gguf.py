"""GGUF files become the weights that the `gguf` package reads in them, or an error by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qaudit.checkpoints.gguf import header_in, read_header
from qaudit.checkpoints.quantized.gguf import GgufFile, bits_in, bits_of
from qaudit.checkpoints.quantized.repository import format_of, must_match, open_quantized
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.errors import QauditError, SourceError, UsageError
from tests.support.gguf import KINDS, write_gguf
from tests.support.tiny import make

FAMILIES = ("llama", "olmo", "olmo2", "olmo3", "qwen2", "qwen3", "smollm3", "mistral")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for family in FAMILIES:
        made[family] = tmp_path_factory.mktemp("tiny") / family
        make(made[family], family)
    return made


def names_of(folder: Path) -> list[str]:
    return list(WeightFolder(folder).names())


def matrices(kind: str):
    return lambda name: kind if name.endswith("_proj.weight") else "F32"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_every_family_is_read(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder, path = folders[family], tmp_path / "m.gguf"
    meant = write_gguf(folder, path, matrices("Q8_0"))
    weights = GgufFile(path, base=names_of(folder))
    must_match("m", path, folder)
    assert (
        set(names_of(folder)) >= set(weights.names()) >= set(names_of(folder)) - {"lm_head.weight"}
    )
    for name in weights.names():
        assert torch.equal(weights.read(name), meant[name]), name
        assert weights.shape(name) == tuple(meant[name].shape)
    assert weights.bits == 8
    assert all(name.endswith("_proj.weight") for name in weights.linears)


TYPES = [
    kind.name
    for kind in gguf.GGMLQuantizationType
    if kind.name in (*KINDS, "Q4_1", "MXFP4", "TQ1_0", "TQ2_0", "BF16", "F16")
]


@pytest.mark.parametrize("kind", TYPES)
def test_types_are_decoded_as_the_package_decodes_them(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    make(folder, "llama", hidden_size=256, intermediate_size=256, head_dim=64)
    meant = write_gguf(
        folder, tmp_path / "m.gguf",
        lambda name: {"down_proj": "Q8_0", "up_proj": kind}.get(name.split(".")[-2], "F32"),
    )  # fmt: skip
    weights = open_quantized(tmp_path / "m.gguf", base=names_of(folder))
    for name in weights.names():
        assert torch.equal(weights.read(name), meant[name])


def test_bits_are_those_of_most_codes_and_bytes_those_of_blocks(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(folders["llama"], path, lambda n: "Q5_0" if "down" in n else "Q4_0")
    weights = GgufFile(path, base=names_of(folders["llama"]))
    assert (weights.bits, bits_in(read_header(path))) == (4, 4)
    assert format_of(path) == ("gguf", 4, 16)
    assert weights.nbytes_of("model.layers.0.mlp.down_proj.weight") == 64 * 128 // 32 * 22
    tensors = gguf.GGUFReader(path).tensors
    assert weights.nbytes == sum(one.n_bytes for one in tensors)


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("Q4_K", 4), ("IQ3_XXS", 3), ("IQ2_S", 2), ("TQ1_0", 1), ("MXFP4", 4), ("NVFP4", 4)],
)
def test_bits_of_types(kind: str, bits: int) -> None:
    assert bits_of(kind) == bits


# ------------------------------------------------------------------------- what is refused


@pytest.fixture(scope="module")
def file(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("one") / "m.gguf"
    write_gguf(folders["llama"], path, matrices("Q4_0"))
    return path.read_bytes()


def reason(path: Path, base: Path | None = None) -> str:
    with pytest.raises(QauditError) as caught:
        weights = open_quantized(path, base=names_of(base) if base else ())
        for name in weights.names():
            weights.read(name)
    assert caught.value.hint
    return caught.value.message


def test_an_architecture_that_is_not_known_is_refused_by_name(
    folders: dict[str, Path], file: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(file.replace(b"llama", b"gemma", 1))
    assert "architecture `gemma`" in reason(path)


def test_a_part_of_a_split_model_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00003.gguf"
    write_gguf(folders["llama"], path, matrices("Q4_0"), metadata={"split.count": 3})
    assert "one of 3 parts" in reason(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_a_file_that_is_cut_short_is_refused(share: float, file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(file[: int(share * len(file))])
    assert "cut short" in reason(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGML" + bytes(64))
    assert "is not a GGUF file" in reason(tmp_path / "m.gguf")
    (tmp_path / "n.gguf").write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    assert "big-endian" in reason(tmp_path / "n.gguf")
    (tmp_path / "o.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    assert "holds no tensors" in reason(tmp_path / "o.gguf")


def test_a_file_without_codes_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(folders["llama"], path)
    with pytest.raises(SourceError, match="no linear of the GGUF file is quantized"):
        format_of(path)


def test_numbers_that_are_not_finite_are_refused(
    folders: dict[str, Path], file: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    (one,) = (t for t in read_header_of(file).values() if t.name == "blk.1.ffn_down.weight")
    damaged = bytearray(file)
    damaged[one.start : one.start + 2] = b"\xff\xff"  # a scale that is no number
    path.write_bytes(damaged)
    assert reason(path, folders["llama"]).endswith("holds NaN or infinity")


def read_header_of(data: bytes):
    return header_in(Path("m.gguf"), data, len(data)).tensors


def test_tensors_that_the_base_does_not_have_are_refused(
    folders: dict[str, Path], file: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(file)
    names = names_of(folders["llama"])
    with pytest.raises(SourceError, match="for which its base has no place"):
        GgufFile(path, base=[name for name in names if "layers.2.mlp.up" not in name])
    with pytest.raises(SourceError, match=r"has nothing for `model\.other\.weight`"):
        GgufFile(path, base=[*names, "model.other.weight"])


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("model_type", "qwen2", "its `architecture` is llama"),
        ("num_hidden_layers", 99, "its `num_hidden_layers` is 3"),
        ("hidden_size", 128, "its `hidden_size` is 64"),
        ("num_key_value_heads", 4, "its `num_key_value_heads` is 2"),
        ("rope_theta", 5e5, "its `rope_theta` is 10000"),
    ],
)
def test_a_file_of_another_model_is_refused_by_its_key(
    key: str, value: object, sentence: str, folders: dict[str, Path], file: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(file)
    config = json.loads((folders["llama"] / "config.json").read_text())
    if key == "rope_theta":
        config.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(UsageError) as caught:
        must_match("m", path, tmp_path)
    assert sentence in caught.value.message


def test_another_vocabulary_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "base"
    make(folder, "llama")
    vocabulary = {f"t{k}": k for k in range(256)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    write_gguf(folder, tmp_path / "m.gguf", matrices("Q4_0"))
    must_match("m", tmp_path / "m.gguf", folder)
    vocabulary["t7"], vocabulary["t8"] = 8, 7
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    with pytest.raises(UsageError, match="another vocabulary"):
        must_match("m", tmp_path / "m.gguf", folder)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    data: st.DataObject, folders: dict[str, Path], file: bytes, tmp_path: Path
) -> None:
    """Change a few bytes of the header, where every length and count is."""
    damaged = bytearray(file)
    first = min(one.start for one in read_header_of(file).values())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, first - 1))
        span = data.draw(st.sampled_from([1, 4, 8]))
        damaged[at : at + span] = data.draw(st.binary(min_size=span, max_size=span))
    cut = data.draw(st.sampled_from([len(damaged), first, first // 2]))
    path = tmp_path / "m.gguf"
    path.write_bytes(damaged[:cut])
    try:
        must_match("m", path, folders["llama"])
        weights = open_quantized(path, base=names_of(folders["llama"]))
        for name in weights.names()[:6]:
            weights.read(name)
    except QauditError as error:
        assert error.hint
