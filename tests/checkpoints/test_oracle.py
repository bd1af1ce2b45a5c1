"""Whatever a quantization configuration says, an accepted file is what transformers makes of it.

One edit or two of a right file's configuration, as tools, people and attackers make them. Either it
is refused here, or transformers refuses it, or both read the same weights.
"""

import copy
import json
import math
import shutil
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from qaudit.core.linears import Linears
from qaudit.core.registry import parse_scheme
from qaudit.errors import QauditError
from qaudit.formats.packing import format_named
from qaudit.formats.weights import QuantizedFolder
from tests.support.damage import damaged
from tests.support.quantized import is_linear
from tests.support.tiny import make

FILES = [
    *(
        ("compressed-tensors", f"rtn-{rest}")
        for rest in ("4bit:group=32", "4bit:group=32:sym=false", "8bit:group=-1")
    ),
    *(("compressed-tensors", spec) for spec in ("fp8", "int8", "nvfp4a16", "mxfp4a16")),
    *(("bnb", f"bnb-{kind}") for kind in ("nf4", "int8")),
]
TOKENS = torch.arange(3, 43)[None]
LINEAR = "model.layers.0.mlp.down_proj"
EDITS = {
    "symmetric": [True, False],
    "num_bits": [2, 3, 4, 8],
    "group_size": [16, 32, 64, -1, None],
    "strategy": ["tensor", "channel", "group", "tensor_group", "block", "token"],
    "type": ["int", "float"],
    "actorder": ["group", "weight", None],
    "dynamic": [True, "local"],
    "scale_dtype": ["torch.uint8", "torch.float8_e4m3fn", None],
    "zp_dtype": ["torch.int8", None],
    "block_structure": [[16, 16], [128, 128]],
    "format": ["pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense",
               "nvfp4-pack-quantized", "mxfp4-pack-quantized", "marlin-24"],
    "ignore": [[LINEAR], ["re:.*down_proj"], ["Linear"], ["re:.*mlp"], ["down_proj"], None],
    "targets": [["re:.*_proj"], ["re:.*mlp.*"], [LINEAR], ["Linear", LINEAR], []],
    "quantization_status": ["frozen", "initialized", "compressed"],
    "quant_method": ["compressed-tensors", "bitsandbytes", "gptq"],
    "llm_int8_skip_modules": [["down_proj"], ["model.layers.0"], ["proj"], ["mlp"], ["re:.*"]],
    "bnb_4bit_quant_type": ["nf4", "fp4"],
    "bnb_4bit_use_double_quant": [True, False],
    "load_in_4bit": [True, False],
    "load_in_8bit": [True, False],
    "llm_int8_threshold": [0.0, 1.0],
}  # fmt: skip
"""What a key may be, anywhere in a configuration that has it."""


@cache
def base(folder):
    """Make a model whose loss depends on each linear."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 1}
    make(folder, "llama", **sizes)
    tensors = load_file(folder / "model.safetensors")
    tensors = {n: one * 4 if is_linear(n) else one for n, one in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def file_of(folder, form, spec):
    """Write the base in a format; activations stay as they are."""
    base(folder / "base")
    place = folder / f"{form}-{spec.replace(':', '-')}"
    place.mkdir()
    scheme = parse_scheme(spec)
    packing, stored = format_named(form, scheme), {}
    for name, tensor in load_file(folder / "base" / "model.safetensors").items():
        if is_linear(name):
            linear = name.removesuffix(".weight")
            quantized = scheme.quantize(Linears({linear: tensor}, None))
            stored |= packing.pack(linear, quantized.stored[linear])
        else:
            stored[name] = tensor
    save_file(stored, place / "model.safetensors", {"format": "pt"})
    own = packing.config(("lm_head",), symmetric="sym=false" not in spec)
    for group in own.get("config_groups", {}).values():
        group["input_activations"] = None
    config = json.loads((folder / "base" / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "quantization_config": own}))
    return place


def edit(config, data):
    """Change a value that tools and people change, wherever its key is; or any value."""
    tables = [config]
    for table in tables:
        tables += [value for value in table.values() if isinstance(value, dict)]
    places = [(table, key) for table in tables for key in table if key in EDITS]
    if not places or data.draw(st.integers(0, 9)) == 0:
        anything = damaged(copy.deepcopy(config), data)
        config |= anything if isinstance(anything, dict) else {}
        return
    table, key = data.draw(st.sampled_from(places))
    table[key] = data.draw(st.sampled_from(EDITS[key]))


@torch.no_grad()
def loss(model):
    return float(model(TOKENS, labels=TOKENS).loss)


def loss_here(folder, original):
    weights = QuantizedFolder(folder, base=list(original.state_dict()))
    model = copy.deepcopy(original)
    for name in weights.names():
        model.get_parameter(name).data = weights.read(name).float()
    return loss(model)


def loss_of_transformers(folder):
    """Return its loss; infinity where it fills up with random numbers, None where it refuses."""
    how = json.loads((folder / "config.json").read_text())["quantization_config"]
    more = {}
    if str(how.get("quant_method")) == "compressed-tensors":
        more["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True, **more
            )
            return math.inf if info["missing_keys"] else loss(model.eval())
    except Exception:  # noqa: BLE001 - a library raises what it likes
        return None


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("oracle")


@pytest.mark.parametrize(("form", "spec"), FILES)
def test_a_right_file_has_the_loss_of_transformers(form, spec, root):
    folder = file_of(root, form, spec)
    ours = loss_here(folder, base(root / "base"))
    assert ours == pytest.approx(loss_of_transformers(folder), abs=TOLERANCE)


TOLERANCE = 5e-3  # compressed-tensors multiplies zero points and scales in bfloat16


@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_an_edited_configuration_is_refused_or_agrees(data, root):
    whole = file_of(root, *data.draw(st.sampled_from(FILES)))
    folder = root / "edited"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder, copy_function=lambda a, b: Path(b).hardlink_to(a))
    config = json.loads((whole / "config.json").read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        edit(config["quantization_config"], data)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    try:
        ours = loss_here(folder, base(root / "base"))
    except QauditError as error:
        assert error.hint
        return
    theirs = loss_of_transformers(folder)
    assert theirs is None or ours == pytest.approx(theirs, abs=TOLERANCE), config
