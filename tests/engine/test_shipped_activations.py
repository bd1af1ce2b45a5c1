"""Activations of shipped files are rounded as their schemes round them, or a note says not."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.linears import Linears, Quantized, StoredWeight
from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import Scheme, Shipped
from qaudit.engine.shipped import open_shipped
from qaudit.engine.tokens import Feed
from qaudit.errors import ConfigurationError, SourceError
from qaudit.formats import arithmetic as floats
from qaudit.formats import compressed_tensors as groups
from qaudit.formats.reading import Rounding
from qaudit.formats.weights import QuantizedFolder
from tests.support.passes import feed, losses, tallies_of
from tests.support.quantized import ct_config, is_linear

Written = dict[str, Tensor]


def _bytes(one: Any) -> Written:
    return {"weight": one.codes_RC, "weight_scale": one.scales}


def _signed(one: Any) -> Written:
    return {"weight": (one.codes_RC.int() - 128).to(torch.int8), "weight_scale": one.scales_RG}


def _halves(codes_RC: Tensor) -> Tensor:
    return codes_RC[:, ::2] | codes_RC[:, 1::2] << 4


def _nvfp4(one: Any) -> Written:
    return {
        "weight_packed": _halves(one.codes_RC),
        "weight_scale": one.scales_RG,
        "weight_global_scale": one.tensor_scale.reshape(1).clone(),
        "input_global_scale": one.input_scale.reshape(1).clone(),
    }


def _mxfp4(one: Any) -> Written:
    return {"weight_packed": _halves(one.codes_RC), "weight_scale": one.exponents_RG}


DYNAMIC = {"num_bits": 8, "strategy": "token", "dynamic": True}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], Callable[[Any], Written]]] = {
    "fp8": ("float-quantized", {"num_bits": 8}, {**DYNAMIC, "type": "float"}, _bytes),
    "fp8:blocks=true": (
        "float-quantized",
        {"num_bits": 8, "block_structure": [128, 128]},
        {**DYNAMIC, "type": "float", "strategy": "group", "group_size": 128},
        _bytes,
    ),
    "int8": ("int-quantized", {"num_bits": 8}, {**DYNAMIC, "type": "int"}, _signed),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4},
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
         "dynamic": "local"},
        _nvfp4,
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4},
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True},
        _mxfp4,
    ),
}  # fmt: skip


def write_as(base: Path, folder: Path, spec: str, stored: dict[str, StoredWeight]) -> Path:
    """Write what a scheme stored of every linear as compressed-tensors has it."""
    form, weights, inputs, written = KINDS[spec]
    folder.mkdir()
    for path in base.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = {}
    for name, tensor in safetensors.torch.load_file(base / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        own = written(stored[stem]) if is_linear(name) else {"weight": tensor}
        tensors |= {f"{stem}.{part}": value.contiguous() for part, value in own.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    config = ct_config(weights, form)
    config["config_groups"]["group_0"]["input_activations"] = inputs
    own = json.loads((base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**own, "quantization_config": config}))
    return folder


@pytest.mark.parametrize("spec", KINDS)
def test_a_file_runs_as_the_scheme_that_made_it(
    checkpoint: Path, spec: str, tmp_path: Path
) -> None:
    stored: dict[str, StoredWeight] = {}

    def observe(scheme: Scheme, linears: Linears, quantized: Quantized) -> None:
        names = {f"model.layers.{linears.block}.{n}": s for n, s in quantized.stored.items()}
        stored.update(names)

    scheme, given = parse_scheme(spec), feed()
    place, names = tmp_path / "states", frozenset(WeightFolder(checkpoint).names())
    own = tallies_of(checkpoint, [scheme], place, given, observe=observe)[scheme.spec]
    folder = write_as(checkpoint, tmp_path / "file", spec, stored)
    file = Shipped(
        file="file",
        format="compressed-tensors",
        bits=QuantizedFolder(folder).bits,
        act=8,
        sha256="0" * 64,
    )
    opened = partial(open_shipped, file, folder, checkpoint, names)
    shipped = Feed(given.calibration, given.evaluation, shipped={file.spec: opened})
    tally = tallies_of(checkpoint, [file], place, shipped)[file.spec]
    assert not tally.notes
    np.testing.assert_array_equal(losses(shipped, tally), losses(given, own))


def test_int8_with_outliers_is_that_of_bitsandbytes() -> None:
    scheme = parse_scheme("bnb-int8")
    generator = torch.Generator().manual_seed(0)
    weight_RC = torch.randn(64, 96, generator=generator) * 0.02
    x_TC = torch.randn(40, 96, generator=generator)
    x_TC[:, 5], x_TC[7, 60] = 40.0, -7.5  # other columns would be rounded to steps of 0.3
    pytest.importorskip("bitsandbytes")
    quantized = scheme.quantize(Linears({"a": weight_RC}))
    theirs_TR = quantized.forwards["a"](x_TC)
    ours_TR = Rounding("int8 but outliers", 6.0)(x_TC) @ quantized.weights["a"].T
    # The library multiplies in half precision or integers; a wrong outlier would cost percents.
    assert (ours_TR - theirs_TR).norm() < 3e-3 * theirs_TR.norm()
    plain_TR = Rounding("int8 but outliers", 0.0)(x_TC) @ quantized.weights["a"].T
    assert (plain_TR - theirs_TR).norm() > 1e-2 * theirs_TR.norm()


@pytest.mark.parametrize("kind", ["fp8 fixed", "int8 fixed"])
def test_fixed_scales_clip_what_is_larger(kind: Any) -> None:
    largest = {"fp8 fixed": 448.0, "int8 fixed": 127.0}[kind]
    rounded = Rounding(kind, 0.5)(torch.tensor([0.5, 1e6, -0.5, 0.0]))
    assert rounded.tolist() == [0.5, largest / 2, -0.5, 0.0]


def test_bounds_of_fbgemm_clip_a_token() -> None:
    rounding = floats.rounding_of({"quant_method": "fbgemm_fp8", "activation_scale_ub": 10.0})
    assert rounding == Rounding("fp8", 10.0)
    assert isinstance(rounding, Rounding)
    assert float(rounding(torch.tensor([[1.0, 500.0]])).max()) == 10.0


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ({"num_bits": 8, "type": "int", "symmetric": False, "dynamic": True, "strategy": "token"},
         "8-bit int, dynamic by token"),
        ({"num_bits": 4, "type": "int", "dynamic": True, "strategy": "token"}, "4-bit int"),
        ({"num_bits": 8, "type": "float", "dynamic": True, "strategy": "group", "group_size": 64},
         "8-bit float, dynamic by group"),
        ({"num_bits": 8, "type": "float", "strategy": "channel"}, "8-bit float, fixed by channel"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_named(table: dict[str, Any], name: str) -> None:
    kind = groups.rounding_of({"input_activations": table})
    assert isinstance(kind, str)
    assert kind.startswith(name)


def write_fp8(folder: Path, scale: Tensor | None, **config: Any) -> Path:
    folder.mkdir()
    tensors = {
        "a.weight": torch.ones(4, 8).to(torch.float8_e4m3fn),
        "a.weight_scale": torch.ones(1),
        **({} if scale is None else {"a.input_scale": scale}),
    }
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    text = json.dumps({"quantization_config": {"quant_method": "fp8", **config}})
    (folder / "config.json").write_text(text)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_fixed_scale_is_read_from_the_file(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_fp8(tmp_path / "a", torch.tensor([0.25]).to(dtype), activation_scheme="static")
    opened = QuantizedFolder(folder)
    assert opened.linears["a.weight"].rounding == Rounding("fp8 fixed", 0.25)
    assert opened.notes == ()


@pytest.mark.parametrize(
    ("scale", "match"),
    [
        (None, "has no `input_scale`, and the configuration fixes"),
        (torch.zeros(1), "`input_scale` of 0, which is no scale"),
        (torch.full((1,), torch.nan), "which is no scale"),
        (torch.ones(2), "is no single number"),
    ],
)
def test_scales_of_activations_that_are_none_are_refused(
    scale: Tensor | None, match: str, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=match):
        QuantizedFolder(write_fp8(tmp_path / "a", scale, activation_scheme="static"))


def test_a_bound_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="`activation_scale_ub` is `often`"):
        floats.rounding_of({"quant_method": "fbgemm_fp8", "activation_scale_ub": "often"})


def test_what_is_not_run_is_noted(tmp_path: Path) -> None:
    config = {"activation_scheme": "dynamic", "weight_block_size": [64, 64]}
    folder = write_fp8(tmp_path / "a", None, **config)
    (note,) = QuantizedFolder(folder).notes
    assert note.startswith("weights only: the file also quantizes activations (fp8, dynamic")
