"""A file that is quantized already is run as it is, beside its base and in the same pass."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.registry import parse_scheme, parse_schemes
from qaudit.core.scheme import LOOKS_BROKEN, Shipped
from qaudit.engine.shipped import RuntimeDeparture, open_shipped
from qaudit.engine.tokens import Feed
from qaudit.formats.weights import QuantizedFolder
from qaudit.types import FULL_PRECISION
from tests.support.filled import filled
from tests.support.passes import feed, losses, on_llama, plain_losses, plain_model, tallies_of
from tests.support.problems import make_problem
from tests.support.quantized import Rounded, quantized_copy
from tests.support.torchao import INSTALLED

KINDS = ("gptq", "awq", "compressed-tensors", *(("torchao",) if INSTALLED else ()))


def shipped(name: str, kind: str = "gptq", bits: int = 4) -> Shipped:
    return Shipped(file=name, format=kind, bits=bits, sha256="0" * 64)


def run(
    base: Path,
    files: dict[str, Path],
    tmp_path: Path,
    schemes: str = "rtn-4bit:group=32",
    bits: int | None = None,
):
    names = frozenset(WeightFolder(base).names())
    planned = [bits or QuantizedFolder(folder).bits for folder in files.values()]
    own = [shipped(name, bits=count) for name, count in zip(files, planned, strict=True)]
    openers = {one.spec: partial(open_shipped, one, files[one.file], base, names) for one in own}
    given = feed()
    given = Feed(given.calibration, given.evaluation, shipped=openers)
    tallies = tallies_of(base, [*parse_schemes([schemes]), *own], tmp_path / "spill", given)
    return {one.file: tallies[one.spec] for one in own}, tallies, given


@torch.no_grad()
def whole_model_losses(base: Path, dense: dict[str, torch.Tensor]) -> np.ndarray:
    """Return the losses of the library's model with these weights in it."""
    model = plain_model(base)
    for name, tensor in dense.items():
        model.get_parameter(name).data = tensor.float()
    return plain_losses(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_has_the_losses_of_the_library_with_its_weights(
    checkpoint: Path, kind: str, tmp_path: Path
) -> None:
    dense = quantized_copy(checkpoint, tmp_path / "file", kind, scale=1.5)
    own, _, given = run(checkpoint, {"file": tmp_path / "file"}, tmp_path)
    # The same fp32 arithmetic over other batch shapes: rounding only.
    expected = whole_model_losses(checkpoint, dense)
    np.testing.assert_allclose(losses(given, own["file"]), expected, rtol=2e-6)
    assert own["file"].kl
    # torchao stores a code in a byte, and here scales in float32.
    stored = 8 + (32 + 8) / 32 if kind == "torchao" else 4 + (16 + 4) / 32
    assert own["file"].bits_per_weight == pytest.approx(stored, rel=0.15)


@on_llama
def test_a_file_with_a_configuration_of_its_own_says_what_differs(
    checkpoint: Path, tmp_path: Path
) -> None:
    quantized_copy(checkpoint, tmp_path / "file", "gptq")
    own, _, _ = run(checkpoint, {"file": tmp_path / "file"}, tmp_path / "same")
    assert not [note for note in own["file"].notes if "own configuration" in note]
    path = tmp_path / "file" / "config.json"
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**config, "rms_norm_eps": 0.01, "use_cache": False}), "utf-8")
    own, _, _ = run(checkpoint, {"file": tmp_path / "file"}, tmp_path / "other")
    (note,) = [note for note in own["file"].notes if "own configuration" in note]
    assert note.endswith(f"`rms_norm_eps: 0.01` for `{config['rms_norm_eps']}`")


@on_llama
def test_files_change_nothing_of_the_streams_beside_them(checkpoint: Path, tmp_path: Path) -> None:
    quantized_copy(checkpoint, tmp_path / "a", "gptq")
    quantized_copy(checkpoint, tmp_path / "b", "awq", scale=1.5)
    files = {name: tmp_path / name for name in ("a", "b")}
    schemes = "gptq-4bit:group=32"
    _, alone, given = run(checkpoint, {}, tmp_path, schemes)
    _, beside, _ = run(checkpoint, files, tmp_path, schemes)
    for name in (FULL_PRECISION, parse_scheme(schemes).spec):
        assert np.array_equal(losses(given, alone[name]), losses(given, beside[name]))


@on_llama
def test_a_damaged_file_ends_its_own_stream_alone(checkpoint: Path, tmp_path: Path) -> None:
    quantized_copy(checkpoint, tmp_path / "whole", "gptq")
    quantized_copy(checkpoint, tmp_path / "broken", "gptq")
    path = tmp_path / "broken" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    name = "model.layers.2.mlp.up_proj.scales"
    tensors[name] = torch.zeros_like(tensors[name])
    safetensors.torch.save_file(tensors, path)
    files = {one: tmp_path / one for one in ("whole", "broken")}
    own, tallies, _ = run(checkpoint, files, tmp_path)
    assert "scales of zero over" in str(own["broken"].error)
    assert not own["broken"].nll
    assert own["whole"].nll
    assert all(tally.nll for tally in filled(tallies.values()) if tally is not own["broken"])


def test_a_file_of_other_bits_than_its_configuration_has_leaves_the_pass(
    checkpoint: Path, tmp_path: Path
) -> None:
    quantized_copy(checkpoint, tmp_path / "file", "gptq", bits=3)
    own, _, _ = run(checkpoint, {"file": tmp_path / "file"}, tmp_path, bits=4)
    assert "`file` is stored in 3 bits, and its configuration has 4" in str(own["file"].error)
    assert not own["file"].nll


def test_a_shipped_file_is_written_and_read_like_a_scheme() -> None:
    one = shipped("model-GPTQ-Int4", bits=3)
    assert parse_scheme(one.spec) == one
    assert one.short == "model-GPTQ-Int4"
    assert one.bit_class == "3"


def broken_notes(base: Path, folder: Path, tmp_path: Path) -> list[str]:
    own, _, _ = run(base, {"file": folder}, tmp_path)
    return [note for note in own["file"].notes if note.startswith(LOOKS_BROKEN)]


@on_llama
@pytest.mark.parametrize("kind", KINDS)
def test_a_right_file_looks_whole(checkpoint: Path, kind: str, tmp_path: Path) -> None:
    quantized_copy(checkpoint, tmp_path / "file", kind, scale=1.5)
    assert not broken_notes(checkpoint, tmp_path / "file", tmp_path)


def test_zero_points_of_another_version_are_seen(checkpoint: Path, tmp_path: Path) -> None:
    quantized_copy(checkpoint, tmp_path / "file", "gptq", bits=3)
    path = tmp_path / "file" / "config.json"
    path.write_text(path.read_text().replace('"desc_act"', '"checkpoint_format": "gptq_v2", "a"'))
    (note,) = broken_notes(checkpoint, tmp_path / "file", tmp_path)
    assert "zero points look wrong" in note
    assert "21 of 21 linears" in note


def test_folded_scales_are_no_damage() -> None:
    weight_RC = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    scale_C = torch.rand(96, generator=torch.Generator().manual_seed(1)) * 4 + 0.1
    # One fit of rows and one of columns is not the best fit: a tenth is a third of what is noted.
    assert RuntimeDeparture.of(weight_RC * scale_C, weight_RC).share < 0.1
    assert RuntimeDeparture.of(weight_RC * scale_C[:64, None], weight_RC).share < 1e-5


SCHEMES = (
    "rtn-8bit", "rtn-4bit:group=32", "rtn-2bit:group=32", "gptq-4bit", "gptq-3bit:group=32",
    "gptq-2bit:group=32", "awq-4bit", "awq-3bit:group=32", "awq-2bit", "bnb-nf4", "bnb-int8",
    "nvfp4", "mxfp4", "fp8",
)  # fmt: skip


@pytest.mark.parametrize(
    ("factor", "cause"), [(-1.0, "scales look negated"), (0.0, "all of its weights are zero")]
)
def test_negated_weights_and_a_layer_of_zeros_are_far_away(factor: float, cause: str) -> None:
    weight_RC = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    departure = RuntimeDeparture.of(weight_RC * factor, weight_RC)
    assert not departure.is_explained(4)
    assert cause in departure.guess


@pytest.mark.parametrize("spec", SCHEMES)
def test_what_schemes_make_is_explained_by_its_codes(spec: str) -> None:
    scheme, problem = parse_scheme(spec), make_problem(96, 256)
    quantized = scheme.quantize(problem.linears).weights["linear"]
    size = {"nvfp4": 16, "mxfp4": 32}.get(spec, getattr(scheme, "group", 0))
    groups_C = torch.arange(256) // size if size else None
    bits = int(scheme.bit_class.removeprefix("w")[0])
    assert RuntimeDeparture.of(quantized, problem.weight_RC, groups_C).is_explained(bits)


@pytest.mark.parametrize("order", ["next", "scattered"])
@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_scales_of_other_groups_are_explained_by_no_codes(bits: int, size: int, order: str) -> None:
    weight_RC = make_problem(96, 512).weight_RC
    one = Rounded(weight_RC, bits, size)
    groups_C = one.group_of_C.roll(size)
    if order == "scattered":
        groups_C = one.group_of_C[torch.randperm(512, generator=torch.Generator().manual_seed(0))]
    own_RC = (one.codes_RC - one.zeros_RG[:, groups_C]) * one.scales_RG[:, groups_C]
    departure = RuntimeDeparture.of(own_RC, weight_RC, groups_C)
    assert not departure.is_explained(bits)
    assert "those of other groups" in departure.guess


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_a_shift_of_one_code_is_seen_at_any_number_of_bits(bits: int) -> None:
    weight_RC = make_problem(96, 256).weight_RC
    one = Rounded(weight_RC, bits, 64)
    departure = RuntimeDeparture.of(one.weight(one.zeros_RG - 1), weight_RC, one.group_of_C)
    assert not departure.is_explained(bits)
    assert "zero points look wrong" in departure.guess
