"""A file that is quantized already is run as it is, beside its base and in the same pass.

Its activations are rounded as their schemes round them, or a note says not.
"""

import json
from functools import partial

import numpy as np
import pytest
import safetensors.torch
import torch

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.linears import Linears
from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import LOOKS_BROKEN, Shipped
from qaudit.engine.shipped import RuntimeDeparture, open_shipped
from qaudit.engine.tokens import Feed
from qaudit.errors import ConfigurationError, SourceError
from qaudit.formats import arithmetic as floats
from qaudit.formats import compressed_tensors as groups
from qaudit.formats.packing import format_named
from qaudit.formats.reading import Rounding
from qaudit.formats.weights import QuantizedFolder
from qaudit.types import FULL_PRECISION
from tests.support.passes import (
    feed,
    losses,
    on_llama,
    plain_losses,
    plain_model,
    spec_of,
    tallies_of,
)
from tests.support.problems import make_problem
from tests.support.quantized import Rounded, is_linear, quantized_copy
from tests.support.torchao import INSTALLED

KINDS = ("gptq", "awq", "compressed-tensors", *(("torchao",) if INSTALLED else ()))
BESIDE = "gptq-3bit:group=32"


def shipped(name, kind="gptq", bits=4, act=16):
    return Shipped(file=name, format=kind, bits=bits, act=act, sha256="0" * 64)


def run(base, files, spill, schemes=()):
    """Run files, by how they are called in a plan, beside schemes; return tallies by file."""
    names = frozenset(WeightFolder(base).names())
    openers = {
        file.spec: partial(open_shipped, file, folder, base, names)
        for file, folder in files.items()
    }
    given = Feed(feed().calibration, feed().evaluation, shipped=openers)
    tallies = tallies_of(base, [*map(parse_scheme, schemes), *files], spill, given)
    by_name = {file.file: tallies.pop(file.spec) for file in files}
    return {name: losses(given, t) for name, t in tallies.items()} | by_name


def edited(folder, change):
    path = folder / "config.json"
    path.write_text(change(path.read_text("utf-8")), "utf-8")


def run_all(place, base):
    """Run right, wrong and damaged files in one pass; return what right ones mean, and tallies."""
    made = {"same": {}, "other": {}, "broken": {}, "few": {"bits": 3}, "v2": {"bits": 3}}
    for name, options in made.items():
        quantized_copy(base, place / name, "gptq", **options)
    dense = {kind: quantized_copy(base, place / kind, kind, scale=1.5) for kind in KINDS}
    config = json.loads((base / "config.json").read_text("utf-8"))
    changed = {"rms_norm_eps": 0.01, "use_cache": False}
    edited(place / "other", lambda text: json.dumps({**json.loads(text), **changed}))
    second = '"checkpoint_format": "gptq_v2", "a"'
    edited(place / "v2", lambda text: text.replace('"desc_act"', second))
    path, name = place / "broken/model.safetensors", "model.layers.2.mlp.up_proj.scales"
    tensors = safetensors.torch.load_file(path)
    tensors[name] = torch.zeros_like(tensors[name])
    safetensors.torch.save_file(tensors, path)
    files = {shipped(name, bits=3 if name == "v2" else 4): place / name for name in (*made, *KINDS)}
    return dense, run(base, files, place / "spill", [BESIDE]), config


@pytest.fixture
def files(checkpoint, once):
    return once(run_all, checkpoint)


def broken_notes(tally):
    return [note for note in tally.notes if note.startswith(LOOKS_BROKEN)]


@torch.no_grad()
@on_llama
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_has_the_losses_of_the_library_with_its_weights(checkpoint, files, kind):
    dense, tallies, _ = files
    # The same fp32 arithmetic over other batch shapes: rounding only.
    model = plain_model(checkpoint)
    for name, tensor in dense[kind].items():
        model.get_parameter(name).data = tensor.float()
    found = losses(feed(), tallies[kind])
    np.testing.assert_allclose(found, plain_losses(model), rtol=2e-6)
    assert tallies[kind].kl
    # torchao stores a code in a byte, and here scales in float32.
    stored = 8 + (32 + 8) / 32 if kind == "torchao" else 4 + (16 + 4) / 32
    assert tallies[kind].bits_per_weight == pytest.approx(stored, rel=0.15)
    assert not broken_notes(tallies[kind])


@on_llama
def test_files_change_nothing_of_the_streams_beside_them_whatever_is_wrong(files, finished):
    _, tallies, config = files
    file = shipped("model-GPTQ-Int4", bits=3)  # written and read like a scheme
    assert (parse_scheme(file.spec), file.short, file.bit_class) == (file, "model-GPTQ-Int4", "3")
    for name in (FULL_PRECISION, spec_of(BESIDE)):
        assert np.array_equal(tallies[name], finished.losses[name])
    assert not any("own configuration" in note for note in tallies["same"].notes)
    (note,) = (note for note in tallies["other"].notes if "own configuration" in note)
    assert note.endswith(f"`rms_norm_eps: 0.01` for `{config['rms_norm_eps']}`")
    assert "scales of zero over" in str(tallies["broken"].error) and not tallies["broken"].nll
    few = tallies["few"]
    assert "`few` is stored in 3 bits, and its configuration has 4" in str(few.error)
    assert not few.nll
    (note,) = broken_notes(tallies["v2"])
    assert "zero points look wrong" in note and "21 of 21 linears" in note


# ---------------------------------------------------------------- how far from the base it is


def departs(weight_RC, base_RC, groups_C, bits, guess):
    """Assert that a weight is not explained by its codes, and what is thought to be wrong."""
    departure = RuntimeDeparture.of(weight_RC, base_RC, groups_C)
    assert not departure.is_explained(bits)
    assert guess in departure.guess


def test_folded_scales_are_no_damage_and_negated_ones_and_zeros_are():
    generator = torch.Generator().manual_seed(0)
    weight_RC = torch.randn(64, 96, generator=generator)
    scale_C = torch.rand(96, generator=torch.Generator().manual_seed(1)) * 4 + 0.1
    # One fit of rows and one of columns is not the best fit: a tenth is a third of what is noted.
    assert RuntimeDeparture.of(weight_RC * scale_C, weight_RC).share < 0.1
    assert RuntimeDeparture.of(weight_RC * scale_C[:64, None], weight_RC).share < 1e-5
    departs(-weight_RC, weight_RC, None, 4, "scales look negated")
    departs(0 * weight_RC, weight_RC, None, 4, "all of its weights are zero")


SCHEMES = (
    "rtn-8bit", "rtn-4bit:group=32", "rtn-2bit:group=32", "gptq-4bit", "gptq-3bit:group=32",
    "gptq-2bit:group=32", "awq-4bit", "awq-3bit:group=32", "awq-2bit", "bnb-nf4", "bnb-int8",
    "nvfp4", "mxfp4", "fp8",
)  # fmt: skip


@pytest.mark.parametrize("spec", SCHEMES)
def test_what_schemes_make_is_explained_by_its_codes(spec):
    scheme, problem = parse_scheme(spec), make_problem(96, 256)
    quantized = scheme.quantize(problem.linears).weights["linear"]
    size = {"nvfp4": 16, "mxfp4": 32}.get(spec, getattr(scheme, "group", 0))
    groups_C = torch.arange(256) // size if size else None
    bits = int(scheme.bit_class.removeprefix("w")[0])
    assert RuntimeDeparture.of(quantized, problem.weight_RC, groups_C).is_explained(bits)


@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_scales_of_other_groups_and_shifted_codes_are_explained_by_no_codes(bits, size):
    weight_RC = make_problem(96, 512).weight_RC
    grid = Rounded(weight_RC, bits, size)
    scattered = torch.randperm(512, generator=torch.Generator().manual_seed(0))
    for groups_C in (grid.group_of_C.roll(size), grid.group_of_C[scattered]):
        made_RC = (grid.codes_RC - grid.zeros_RG[:, groups_C]) * grid.scales_RG[:, groups_C]
        departs(made_RC, weight_RC, groups_C, bits, "those of other groups")
    shifted_RC = grid.weight(grid.zeros_RG - 1)
    departs(shifted_RC, weight_RC, grid.group_of_C, bits, "zero points look wrong")


# ---------------------------------------------------------------- activations


WRITTEN = ("fp8", "fp8:blocks=true", "int8", "nvfp4", "mxfp4")


def write_as(base, folder, scheme, stored):
    """Write what a scheme stored of every linear as compressed-tensors has it."""
    packing, tensors = format_named("compressed-tensors", scheme), {}
    for name, tensor in safetensors.torch.load_file(base / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        tensors |= packing.pack(stem, stored[stem]) if is_linear(name) else {name: tensor}
    own = packing.config(("lm_head",), symmetric=True)
    config = packing.whole_config(json.loads((base / "config.json").read_text()), own)
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@on_llama
def test_a_file_runs_as_the_scheme_that_made_it(checkpoint, tmp_path, monkeypatch):
    # Runtimes read full blocks alone, and this model has none.
    monkeypatch.setattr(groups.CompressedTensors, "_must_be_run_so", lambda *_: None)
    stored, files = {spec_of(text): {} for text in WRITTEN}, {}

    def observe(scheme, linears, quantized):
        names = {f"model.layers.{linears.block}.{n}": s for n, s in quantized.stored.items()}
        stored[scheme.spec].update(names)

    schemes = [*map(parse_scheme, WRITTEN)]
    tallies = tallies_of(checkpoint, schemes, tmp_path / "states", observe=observe)
    for scheme in schemes:
        folder = write_as(checkpoint, tmp_path / scheme.short, scheme, stored[scheme.spec])
        bits = QuantizedFolder(folder).bits
        files[shipped(scheme.short, "compressed-tensors", bits, act=8)] = folder
    by_file = run(checkpoint, files, tmp_path / "states")
    for scheme in schemes:
        assert not by_file[scheme.short].notes
        expected = losses(feed(), tallies[scheme.spec])
        np.testing.assert_array_equal(losses(feed(), by_file[scheme.short]), expected)


def test_int8_with_outliers_is_that_of_bitsandbytes():
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


def test_fixed_scales_and_bounds_of_fbgemm_clip_what_is_larger():
    for kind, largest in (("fp8 fixed", 448.0), ("int8 fixed", 127.0)):
        rounded = Rounding(kind, 0.5)(torch.tensor([0.5, 1e6, -0.5, 0.0]))
        assert rounded.tolist() == [0.5, largest / 2, -0.5, 0.0]
    rounding = floats.rounding_of({"quant_method": "fbgemm_fp8", "activation_scale_ub": 10.0})
    assert rounding == Rounding("fp8", 10.0)
    assert float(rounding(torch.tensor([[1.0, 500.0]])).max()) == 10.0
    with pytest.raises(ConfigurationError, match="`activation_scale_ub` is `often`"):
        floats.rounding_of({"quant_method": "fbgemm_fp8", "activation_scale_ub": "often"})


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
def test_what_is_not_known_is_named(table, name):
    assert groups.rounding_of({"input_activations": table}).startswith(name)


def write_fp8(folder, scale, **config):
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


@pytest.mark.parametrize(
    ("scale", "match"),
    [
        (None, "has no `input_scale`, and the configuration fixes"),
        (torch.zeros(1), "`input_scale` of 0, which is no scale"),
        (torch.full((1,), torch.nan), "which is no scale"),
        (torch.ones(2), "is no single number"),
    ],
)
def test_scales_of_activations_that_are_none_are_refused(scale, match, tmp_path):
    with pytest.raises(SourceError, match=match):
        QuantizedFolder(write_fp8(tmp_path / "a", scale, activation_scheme="static"))


def test_a_fixed_scale_is_read_from_the_file_and_what_is_not_run_noted(tmp_path):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        scale = torch.tensor([0.25]).to(dtype)
        opened = QuantizedFolder(
            write_fp8(tmp_path / str(dtype), scale, activation_scheme="static")
        )
        assert opened.linears["a.weight"].rounding == Rounding("fp8 fixed", 0.25)
        assert opened.notes == ()
    config = {"activation_scheme": "dynamic", "weight_block_size": [64, 64]}
    (note,) = QuantizedFolder(write_fp8(tmp_path / "a", None, **config)).notes
    assert note.startswith("weights only: the file also quantizes activations (fp8, dynamic")
