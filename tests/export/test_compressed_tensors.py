"""Configurations of compressed-tensors files are those of its own presets."""

from __future__ import annotations

import pytest
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

from qaudit.core.registry import parse_scheme
from qaudit.errors import SchemeError
from qaudit.formats.registry import format_named
from tests.support.formats import stored_of, weight

PRESETS = {
    "fp8": "FP8_DYNAMIC",
    "fp8:blocks=true": "FP8_BLOCK",
    "int8": "W8A8",
    "nvfp4": "NVFP4",
    "nvfp4a16": "NVFP4A16",
    "mxfp4": "MXFP4",
    "mxfp4a16": "MXFP4A16",
    "rtn-4bit": "W4A16",
    "rtn-4bit:sym=false": "W4A16_ASYM",
}


@pytest.mark.parametrize("spec", PRESETS)
def test_the_configuration_is_that_of_its_preset(spec: str) -> None:
    form = format_named("compressed-tensors", parse_scheme(spec))
    written = QuantizationConfig.model_validate(form.config((), symmetric="sym=false" not in spec))
    ours = written.config_groups["group_0"]
    theirs = preset_name_to_scheme(PRESETS[spec], ["Linear"])
    observers = {"observer": None, "observer_kwargs": {}}  # of calibration, which is over
    for part in ("weights", "input_activations"):
        mine, preset = getattr(ours, part), getattr(theirs, part)
        if preset is None:
            assert mine is None
            continue
        assert mine.model_copy(update=observers) == preset.model_copy(update=observers)


@pytest.mark.parametrize("spec", ["quarot-rtn-4bit", "mxfp4:rotate=true"])
def test_rotations_are_refused(spec: str) -> None:
    scheme = parse_scheme(spec)
    with pytest.raises(SchemeError, match="read"):
        format_named("compressed-tensors", scheme).pack("a", stored_of(spec, weight(0, 64, 128)))
