"""What every registered format must keep; a new file in `qaudit/formats` inherits it."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import bitsandbytes
import gguf
import numpy as np
import pytest
import torch
from bitsandbytes.functional import QuantState
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.gguf import GgufBlocks
from qaudit.core.linears import IntegerCodes
from qaudit.core.registry import parse_scheme
from qaudit.errors import QauditError, SchemeError
from qaudit.formats.packing import format_named, formats
from qaudit.formats.weights import QuantizedFolder, format_of
from tests.support.filled import filled
from tests.support.formats import example


def integers(*bits, groups=(32, -1)):
    kinds = [f"group={group}{sym}" for group in groups for sym in ("", ":sym=false")]
    return [f"rtn-{number}bit:{kind}" for number in bits for kind in kinds]


HOLDS = {
    "compressed-tensors": [
        *integers(2, 3, 4, 5, 6, 7, 8), "fp8", "fp8:blocks=true", "int8", "nvfp4a16", "nvfp4",
        "mxfp4a16", "mxfp4", "mxfp4a16:rule=floor",
    ],
    "gptq": integers(3, 4, 8),
    "awq": integers(4),
    "mlx": integers(2, 3, 4, 5, 6, 8, groups=(32,)),
    "bnb": ["bnb-nf4", "bnb-fp4:blocksize=128", "bnb-nf4:double_quant=true", "bnb-int8"],
    "gguf": [
        *(f"rtn-{bits}bit:group={group}" for bits in (4, 8) for group in (32, -1)),
        "gguf-q4_0", "gguf-q3_k", "gguf-q4_k", "gguf-q5_k", "gguf-q6_k", "gguf-q8_0",
    ],
}  # fmt: skip
"""The schemes that each format holds; it refuses every other one of this table."""

CASES = [(form, spec) for form, specs in HOLDS.items() for spec in specs]
every_case = pytest.mark.parametrize(("form", "spec"), CASES)
FILES = [(form, spec) for form, spec in CASES if formats()[form].has_settings]
every_file = pytest.mark.parametrize(("form", "spec"), FILES)


def packed(form, spec):
    packing = format_named(form, parse_scheme(spec))
    return packing, packing.pack("a", example(spec).stored["w"])


def write(folder, form, tensors, config):
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(form.whole_config({}, config)))
    return folder


def configuration(form, spec):
    return form.config(("lm_head",), symmetric="sym=false" not in spec)


def dense(form, folder):
    if form.has_settings:
        return QuantizedFolder(folder).read("a.weight")
    files = WeightFolder(folder)
    ((name, stored),) = ((name, files.read(name)) for name in files.names())
    return GgufBlocks(stored, name.rpartition(".")[2]).decode()


def test_every_format_names_the_schemes_that_it_holds():
    assert set(HOLDS) == set(formats())


@pytest.mark.parametrize("form", formats())
def test_every_other_scheme_is_refused_with_a_way_out(form):
    for spec in {spec for _, spec in CASES} - set(HOLDS[form]):
        with pytest.raises(SchemeError) as refusal:
            packed(form, spec)
        assert refusal.value.hint


@every_case
def test_what_was_packed_is_read_back_bit_for_bit(form, spec, tmp_path):
    packing, tensors = packed(form, spec)
    assert all(n.startswith("a.") and t.is_contiguous() for n, t in filled(tensors.items()))
    config, quantized = configuration(packing, spec), example(spec)
    folder = write(tmp_path, packing, tensors, config)
    assert torch.equal(dense(packing, folder), quantized.weights["w"])
    if not packing.has_settings:
        return
    weights, stored = QuantizedFolder(folder), quantized.stored["w"]
    assert list(weights.names()) == ["a.weight"]
    bits = stored.bits if isinstance(stored, IntegerCodes) else 4 if "4" in spec else 8
    assert weights.bits == bits
    assert format_of(folder)[1:] == (bits, parse_scheme(spec).act_bits or 16)


@every_file
def test_bits_are_not_believed(form, spec, tmp_path):
    """Fewer bits in the configuration are refused, or change nothing."""
    packing, tensors = packed(form, spec)
    config = json.dumps(configuration(packing, spec))
    # Not 7 for 8, which padded to words as by compressed-tensors before 0.18 take as much room.
    for bits, fewer in ((3, 2), (4, 3), (8, 5)):
        config = config.replace(f'bits": {bits}', f'bits": {fewer}')
    folder = write(tmp_path, packing, tensors, json.loads(config))
    try:
        weight_RC = QuantizedFolder(folder).read("a.weight")
    except QauditError as error:
        assert error.hint
    else:
        assert torch.equal(weight_RC, example(spec).weights["w"])


@pytest.mark.parametrize("form", [form for form, specs in HOLDS.items() if integers(4)[0] in specs])
def test_scales_may_be_negative(form, tmp_path):
    """AutoRound turns the sign of a symmetric group whose largest weight is positive."""
    stored = example("rtn-4bit:group=32").stored["w"]
    assert isinstance(stored, IntegerCodes)
    signs_RG = torch.where(torch.arange(stored.scales_RG.numel()) % 2 == 0, -1, 1)
    turned = replace(stored, scales_RG=stored.scales_RG * signs_RG.view_as(stored.scales_RG))
    packing = format_named(form, parse_scheme("rtn-4bit:group=32"))
    config = packing.config((), symmetric=True)
    folder = write(tmp_path, packing, packing.pack("a", turned), config)
    assert torch.equal(dense(packing, folder), turned.decode())


@given(st.sampled_from(FILES), st.data())
def test_damaged_tensors_are_refused_in_words(case, data):
    form, spec = case
    packing, tensors = packed(form, spec)
    name = data.draw(st.sampled_from(sorted(tensors)))
    size = data.draw(st.integers(0, max(0, len(tensors[name].flatten()) - 1)))
    tensors[name] = tensors[name].flatten()[:size].reshape(size, *[1] * (tensors[name].dim() - 1))
    config = configuration(packing, spec)
    with tempfile.TemporaryDirectory() as folder:
        place = write(Path(folder), packing, tensors, config)
        try:
            dense(packing, place)
        except QauditError as error:
            assert error.hint


@pytest.mark.parametrize("form", formats())
def test_a_cache_is_no_part_of_a_file(form):
    with pytest.raises(SchemeError, match="cached keys and values") as refusal:
        format_named(form, parse_scheme("rtn-4bit:group=32:kv=int8"))
    assert "export rtn-4bit:group=32," in refusal.value.hint


# ------------------------------------------------------------------ the format's own library


def of_compressed_tensors(state, config):
    theirs = QuantizationConfig.model_validate(config).config_groups["group_0"]
    if theirs.format == "pack-quantized":
        state["weight_scale"] = state["weight_scale"].float()  # keeps the product in float32
    compressor = BaseCompressor.get_value_from_registry(theirs.format)
    assert set(state) >= set(compressor.compression_param_names(theirs)) - {"weight_g_idx"}
    dense_RC = compressor.decompress(dict(state), theirs)["weight"].float()
    if theirs.format != "nvfp4-pack-quantized":
        return dense_RC
    # It rounds every step to bfloat16, at most thrice; the same two functions do not in float32.
    rows, half = state["weight_packed"].shape
    values = unpack_fp4_from_uint8(state["weight_packed"], rows, 2 * half, dtype=torch.float32)
    scale, whole = state["weight_scale"].float(), state["weight_global_scale"]
    exact_RC = dequantize(
        values, scale, args=theirs.weights, global_scale=whole, dtype=torch.float32
    )
    assert torch.allclose(dense_RC, exact_RC, rtol=3 * 2.0**-8, atol=0)
    return exact_RC


def of_bitsandbytes(state, config):
    if "SCB" in state:
        return bitsandbytes.functional.int8_vectorwise_dequant(state["weight"], state["SCB"])
    packed_codes = state.pop("weight")
    states = {name.removeprefix("weight."): tensor for name, tensor in state.items()}
    how = QuantState.from_dict(states, device=torch.device("cpu"))
    return bitsandbytes.functional.dequantize_4bit(packed_codes, how).float()


def of_gguf(state, config):
    ((kind, blocks),) = state.items()
    values = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(np.array(values, np.float32))


LIBRARIES = {
    "compressed-tensors": of_compressed_tensors, "bnb": of_bitsandbytes, "gguf": of_gguf
}  # fmt: skip
"""Those that the development environment has; `tests/peers` has GPTQModel and mlx."""


@pytest.mark.parametrize(("form", "spec"), [case for case in CASES if case[0] in LIBRARIES])
def test_the_library_of_the_format_reads_the_weights_that_were_measured(form, spec):
    packing, tensors = packed(form, spec)
    state = {name.removeprefix("a."): tensor for name, tensor in tensors.items()}
    theirs_RC = LIBRARIES[form](state, configuration(packing, spec))
    assert torch.equal(theirs_RC, example(spec).weights["w"])


PRESETS = {name: name.upper() for name in ("nvfp4", "nvfp4a16", "mxfp4", "mxfp4a16")}
PRESETS |= {"fp8": "FP8_DYNAMIC", "fp8:blocks=true": "FP8_BLOCK", "int8": "W8A8"}
PRESETS |= {"rtn-4bit": "W4A16", "rtn-4bit:sym=false": "W4A16_ASYM"}


@pytest.mark.parametrize("spec", PRESETS)
def test_the_configuration_is_that_of_its_preset(spec):
    form = format_named("compressed-tensors", parse_scheme(spec))
    written = QuantizationConfig.model_validate(configuration(form, spec))
    ours = written.config_groups["group_0"]
    theirs = preset_name_to_scheme(PRESETS[spec], ["Linear"])
    observers = {"observer": None, "observer_kwargs": {}}  # of calibration, which is over
    for part in ("weights", "input_activations"):
        mine, preset = getattr(ours, part), getattr(theirs, part)
        if preset is None:
            assert mine is None
            continue
        assert mine.model_copy(update=observers) == preset.model_copy(update=observers)
