"""Reading weights: what is stored comes back, and what is wrong is named."""

import json
import struct
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from qaudit.checkpoints.safetensors import (
    INDEX,
    PICKLE,
    SINGLE,
    WeightFolder,
    headers,
    unread_shards,
    weight_files,
)
from qaudit.errors import ConfigurationError, SourceError

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint32,
]  # fmt: skip


def save(folder, tensors, name=SINGLE):
    safetensors.torch.save_file(dict(tensors), folder / name)
    return folder


def save_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict(weight_map)}))
    return folder


def save_raw(folder, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def entry(start, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


# --------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_comes_back_as_it_was_stored(dtype, tmp_path):
    powers = torch.randint(0, 8, (3, 5)).float().exp2()
    shapes = {"a.weight": powers, "scalar": torch.tensor(2.0), "empty": torch.zeros(0, 4)}
    stored = {name: tensor.to(dtype) for name, tensor in shapes.items()}
    weights = WeightFolder(save(tmp_path, stored))
    assert set(weights.names()) == set(stored)
    for name, tensor in stored.items():
        found = weights.read(name)
        assert weights.shape(name) == tuple(found.shape) == tuple(tensor.shape)
        assert found.dtype == dtype
        assert found.flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8))


def test_a_single_file_comes_before_an_index_as_in_transformers(tmp_path):
    save(tmp_path, {"a": torch.zeros(1)})
    save(tmp_path, {"a": torch.ones(1)}, "part.safetensors")
    save_index(tmp_path, {"a": "part.safetensors"})
    assert float(WeightFolder(tmp_path).read("a")) == 0
    from transformers.modeling_utils import _get_resolved_checkpoint_files

    (theirs,), _ = _get_resolved_checkpoint_files(str(tmp_path), None, None, None, None, False)
    assert [str(path) for path in weight_files(tmp_path)] == [theirs]
    said = "`part.safetensors`, which `model.safetensors.index.json` names"
    assert said in str(unread_shards(tmp_path))
    save_index(tmp_path, {"a": SINGLE})
    assert unread_shards(tmp_path) is None
    torch.save({"a": torch.ones(1)}, tmp_path / PICKLE)
    assert float(WeightFolder(tmp_path, allow_pickle=True).read("a")) == 0  # before pickles, too
    (tmp_path / "config.json").write_text('{"transformers_weights": "other.safetensors"}')
    with pytest.raises(ConfigurationError, match=r"names its weights `other\.safetensors`"):
        WeightFolder(tmp_path)


def test_headers_are_read_without_torch(tmp_path):
    save(tmp_path, {"a": torch.zeros(2, 3, dtype=torch.bfloat16)})
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from qaudit.checkpoints.safetensors import headers\n"
        f"info = headers(Path({str(tmp_path)!r}))['a']\n"
        "assert (info.dtype, info.shape, info.nbytes) == ('BF16', (2, 3), 12), info\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------------------- bad input


@given(cut=st.integers(min_value=0, max_value=10_000))
def test_a_file_cut_anywhere_is_refused(cut, tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("cut"), {"a": torch.randn(30), "b": torch.randn(5)})
    content = (folder / SINGLE).read_bytes()
    cut %= len(content)
    (folder / SINGLE).write_bytes(content[:cut])
    with pytest.raises(SourceError, match=rf"{SINGLE}. is cut short: \d+ .*, {cut} found") as info:
        headers(folder)
    assert "download" in info.value.hint


def test_files_that_shrink_and_values_that_are_not_finite_are_refused(tmp_path):
    weights = WeightFolder(save(tmp_path, {"a": torch.randn(300)}))
    content = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(content[:-4])
    with pytest.raises(SourceError, match="cut short"):
        weights.read("a")
    for dtype, bad in (
        *((dtype, float(bad)) for dtype in DTYPES[:3] for bad in ("nan", "inf", "-inf")),
        (torch.float8_e4m3fn, float("nan")),
    ):
        tensor = torch.zeros(100)
        tensor[57] = bad
        both = {"good": torch.zeros(3), "layer.bad": tensor.to(dtype)}
        weights = WeightFolder(save(tmp_path, both))
        weights.read("good")
        with pytest.raises(SourceError, match=r"`layer\.bad` in `model\.safetensors`.*1 of 100"):
            weights.read("layer.bad")


def test_a_damaged_header_is_refused(tmp_path):
    for header, data, message in (
        ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12), "shares bytes"),
        ({"a": entry(0, 8, [3])}, bytes(12), "8 bytes where its shape needs 12"),
        ({"a": entry(0, 12, [2])}, bytes(12), "12 bytes where its shape needs 8"),
        ({"a": entry(0, 4, [1])}, bytes(5), "1 bytes behind its last tensor"),
        ({"a": entry(2, 6, [1])}, bytes(6), "2 bytes before tensor `a`"),
        ({}, bytes(3), "3 bytes behind"),
        ({"a": entry(0, 4, [1], "Q7")}, bytes(4), "stored as `Q7`"),
        ({"a": {"dtype": "F32"}}, b"", "does not describe tensor `a`"),
        ({"a": entry(-4, 0, [1])}, bytes(4), "does not describe tensor `a`"),
        ({"a": entry(0, 4, ["1"])}, bytes(4), "does not describe tensor `a`"),  # type: ignore[list-item]
        ([1, 2], b"", "not a table"),
        (b"{not json", b"", "cannot be read: "),
        (b'{"a": {"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
         b' "a": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', bytes(1), "`a` is twice"),
    ):  # fmt: skip
        with pytest.raises(SourceError, match=message):
            headers(save_raw(tmp_path, header, data))


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=10,
)
_ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "Q7"]) | _VALUES,
        "shape": st.lists(st.integers(-2, 4), max_size=3) | _VALUES,
        "data_offsets": st.lists(st.integers(-2, 40), min_size=2, max_size=2) | _VALUES,
    },
)


@given(
    header=_VALUES | st.dictionaries(st.text(max_size=3), _ENTRIES | _VALUES, max_size=3),
    index=st.none() | _VALUES | st.fixed_dictionaries({"weight_map": _VALUES}),
    count=st.integers(0, 40),
)
def test_any_header_and_index_are_read_or_refused(header, index, count, tmp_path_factory):
    folder = save_raw(tmp_path_factory.mktemp("any"), header, bytes(count))
    if index is not None:
        (folder / INDEX).write_text(json.dumps(index))
    try:
        tensors = headers(folder)
    except SourceError as error:
        assert error.hint
    else:
        assert sum(info.nbytes for info in tensors.values()) == count


ONE, TWO = "one.safetensors", "two.safetensors"


@pytest.mark.parametrize(
    ("files", "index", "match"),
    [
        ([ONE], {"a": ONE, "b": TWO}, r"`two\.safetensors` is named"),
        ([ONE], {"a": ONE, "b": ONE}, r"tensor `b` in `one\.safetensors`"),
        ([ONE, TWO], {"a": ONE, "b": TWO}, "tensor `a` is in both"),
        *(([], {"a": place}, "points outside")
          for place in ("../model.safetensors", "/etc/passwd", "sub/x.safetensors")),
        *(([], text, "not an index") for text in ("", "[]", '{"weight_map": 3}', '{"other": {}}')),
        ([], None, "no weights in"),
    ],
)  # fmt: skip
def test_files_and_an_index_that_do_not_fit_together_are_refused(files, index, match, tmp_path):
    for name in files:
        save(tmp_path, {"a": torch.zeros(1)}, name)
    if isinstance(index, dict):
        save_index(tmp_path, index)
    elif index is not None:
        (tmp_path / INDEX).write_text(index)
    with pytest.raises(SourceError, match=match) as info:
        WeightFolder(tmp_path)
    assert info.value.hint
