"""Our MLX files in mlx itself: `make peers`. mlx runs on a CPU under Linux, too."""

import copy
import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qaudit.core.linears import IntegerCodes, Linears
from qaudit.core.registry import parse_scheme
from qaudit.errors import QauditError
from qaudit.export.choice import of_target
from qaudit.export.folder import export_quantized
from qaudit.formats.packing import format_named
from qaudit.formats.weights import QuantizedFolder
from qaudit.types import SILENT
from tests.support.damage import ODD
from tests.support.filled import filled
from tests.support.models import save_model, save_tokenizer, write_documents
from tests.support.quantized import write
from tests.support.runtimes import REAL, place_with, snippet_of_export, verified

pytestmark = pytest.mark.peers


def in_torch(array):
    import mlx.core as mx

    return torch.from_numpy(np.array(array.astype(mx.float32)))


BITS, GROUPS = [2, 3, 4, 5, 6, 8], [32, 64, 128]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("symmetric", ["true", "false"])
def test_mlx_dequantizes_to_the_weights_that_were_measured(bits, group, symmetric):
    spec = f"rtn-{bits}bit:group={group}:sym={symmetric}"
    weight_RC = torch.randn(64, 256, generator=torch.Generator().manual_seed(bits)) / 50
    quantized = parse_scheme(spec).quantize(Linears({"w": weight_RC}))
    assert torch.equal(of_mlx(spec, quantized.stored["w"]), quantized.weights["w"])


def of_mlx(spec, stored):
    """Return the weight that mlx decodes from what is packed for it."""
    import mlx.core as mx

    parts = format_named("mlx", parse_scheme(spec)).pack("a", stored)
    words = mx.array(parts["a.weight"].view(torch.int32).numpy()).view(mx.uint32)
    # Scales and biases hold the same numbers in float32, in which mlx then computes.
    scales, biases = (mx.array(parts[f"a.{name}"].float().numpy()) for name in ("scales", "biases"))
    how = {"group_size": stored.group, "bits": stored.bits}
    return in_torch(mx.dequantize(words, scales, biases, **how))


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from(BITS),
    group=st.sampled_from(GROUPS),
    rows=st.integers(1, 9),
    groups=st.integers(1, 5),
    symmetric=st.booleans(),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 2**31),
)
def test_codes_of_any_shape_are_packed_as_mlx_reads_them(
    bits, group, rows, groups, symmetric, exponent, seed
):
    """Equal to the bit: a code and a scale of bfloat16 have 16 digits, and their sum 24 of float32.

    So it does not matter whether a product is rounded before its bias is added.
    """
    drawn = torch.Generator().manual_seed(seed)
    codes_RC = torch.randint(0, 2**bits, (rows, group * groups), generator=drawn).byte()
    scales_RG = torch.rand(rows, groups, generator=drawn).add(0.5).mul(2.0**exponent).bfloat16()
    zeros_RG = torch.randint(0, 2**bits, (rows, groups), generator=drawn).byte()
    stored = IntegerCodes(codes_RC, scales_RG, None if symmetric else zeros_RG, bits, group)
    spec = f"rtn-{bits}bit:group={group}:sym={str(symmetric).lower()}"
    assert torch.equal(of_mlx(spec, stored), stored.decode())


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    bits=st.sampled_from(BITS),
    group=st.sampled_from(GROUPS),
    rows=st.integers(1, 9),
    groups=st.integers(1, 5),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    exponent=st.integers(-12, 6),
    constant=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_weights_that_mlx_quantizes_are_read_as_mlx_reads_them(
    bits, group, rows, groups, dtype, exponent, constant, seed, tmp_path_factory
):
    """A scale of any digits has a product that float32 rounds, here before the bias is added.

    mlx may add first and round once, so that both are within two roundings of their larger part.
    """
    import mlx.core as mx

    drawn = torch.Generator().manual_seed(seed)
    weight_RC = torch.randn(rows, group * groups, generator=drawn) * 2.0**exponent
    if constant:
        weight_RC[:, :group] = weight_RC[:, :1]
    given = mx.array(weight_RC.numpy()).astype(getattr(mx, dtype))
    words, scales, biases = mx.quantize(given, group_size=group, bits=bits)
    wide = [part.astype(mx.float32) for part in (scales, biases)]
    theirs = in_torch(mx.dequantize(words, *wide, group_size=group, bits=bits))
    name, kept = "model.layers.0.mlp.down_proj", getattr(torch, dtype)
    tensors = {
        f"{name}.weight": torch.from_numpy(np.array(words)),
        f"{name}.scales": in_torch(scales).to(kept),
        f"{name}.biases": in_torch(biases).to(kept),
    }
    table = {"group_size": group, "bits": bits}
    read = QuantizedFolder(write(tmp_path_factory.mktemp("mlx"), tensors, None, quantization=table))
    ours = read.read(f"{name}.weight")
    assert read.linears[f"{name}.weight"].bits == bits
    scales_RC, biases_RC = (in_torch(part).repeat_interleave(group, 1) for part in (scales, biases))
    largest_RC = scales_RC.abs() * (2**bits - 1) + biases_RC.abs()
    assert ((ours - theirs).abs() <= 2**-23 * largest_RC).all()


def exported(folder, spec, family="llama"):
    source = save_model(folder / "model", 1, family)
    save_tokenizer(source)
    text = write_documents(folder / "text.jsonl", range(4))
    choice = of_target(str(source), None, spec, {"calibration": str(text)}, SILENT)
    return export_quantized(choice, "mlx", folder / "out")


@pytest.mark.parametrize("family", ["llama", "olmo2"])
@pytest.mark.parametrize(
    "spec",
    ["rtn-4bit:group=32", "rtn-3bit:group=32:sym=false", "gptq-mix:budget=3.75:group=32:tie=none"],
)
def test_mlx_lm_loads_and_runs_an_exported_folder(tmp_path, spec, family):
    import mlx.core as mx
    from mlx_lm.utils import load_model
    from transformers import AutoModelForCausalLM

    out, source = exported(tmp_path, spec, family), tmp_path / "model"
    config = json.loads((out / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"]

    model, _ = load_model(out)
    read = QuantizedFolder(out)
    dense = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for name in read.linears:
            dense.get_parameter(name).copy_(read.read(name))
        tokens = torch.arange(2, 34)[None]
        ours = dense(input_ids=tokens).logits.log_softmax(-1)
    theirs = in_torch(model(mx.array(tokens.numpy()))).log_softmax(-1)
    # Scales in bfloat16 bring mlx's products to bfloat16 where the embeddings are of that type;
    # these are float32, so that only the order of sums differs.
    assert float((ours - theirs).abs().max()) < 1e-3


LINEAR = "model.layers.0.mlp.down_proj"
EDITS = {
    "bits": [2, 3, 4, 5, 6, 8],
    "group_size": [32, 64, 128],
    "mode": ["affine", "mxfp4", "mxfp8", "nvfp4"],
    LINEAR: [
        True, False, {"bits": 8}, {"group_size": 64}, {"group_size": 32, "bits": 4},
        {"group_size": 64, "bits": 2, "mode": "affine"},
        {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    ],
    LINEAR.removeprefix("model."): [{"bits": 8}, False],
}  # fmt: skip
"""What tools and people write into a configuration of MLX, for all linears or one."""
TABLES = ["quantization", "quantization_config"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    specs = ["rtn-4bit:group=32", "rtn-3bit:group=32:sym=false"]
    return [exported(tmp_path_factory.mktemp("mlx"), spec) for spec in specs]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_edited_configurations_are_refused_or_read_as_mlx_lm_reads_them(
    data, files, tmp_path_factory
):
    whole = data.draw(st.sampled_from(files))
    folder = tmp_path_factory.mktemp("edited") / "model"
    shutil.copytree(whole, folder)
    config = json.loads((folder / "config.json").read_text())
    tables = data.draw(st.sampled_from([[TABLES[0]], [TABLES[1]], TABLES]))
    for _ in range(data.draw(st.integers(1, 2))):
        key = data.draw(st.sampled_from(sorted(EDITS)))
        value = data.draw(st.sampled_from([*EDITS[key], data.draw(st.sampled_from(ODD))]))
        for table in tables:
            config[table][key] = copy.deepcopy(value)
    (folder / "config.json").write_text(json.dumps(config))
    try:
        read = QuantizedFolder(folder)
        ours_of = {linear: read.read(linear) for linear in read.linears}
    except QauditError as error:
        assert error.hint
        return
    assert len(ours_of) >= 7
    theirs_of = by_mlx_lm(folder, list(ours_of))
    if theirs_of is not None:
        for name, ours in filled(ours_of.items()):
            assert torch.equal(ours, theirs_of[name]), (name, config)


def by_mlx_lm(folder, names):
    """Return the weights that mlx-lm computes with; None where it refuses the folder."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    try:
        modules = dict(load_model(folder)[0].named_modules())
        weights = {}
        for name in names:
            module = modules[name.removesuffix(".weight")]
            how = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
            scales, biases = (module[part].astype(mx.float32) for part in ("scales", "biases"))
            weights[name] = in_torch(mx.dequantize(module.weight, scales, biases, **how))
    except Exception:  # noqa: BLE001 - a library raises what it likes
        return None
    return weights


@pytest.mark.parametrize("shape", [{}, REAL], ids=["tiny", "135M"])
@pytest.mark.usefixtures("without_pictures")
def test_verify_runs_an_exported_folder(qaudit, tmp_path, monkeypatch, shape):
    monkeypatch.chdir(place_with(tmp_path, **shape))
    run = verified(qaudit, "mlx", f"gptq-4bit:group={64 if shape else 32}")
    assert run["runtime"].startswith("mlx-lm 0.32")
    assert abs(run["difference"]) < 1e-3


def test_the_snippet_of_the_card_runs(qaudit, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(place_with(tmp_path))
    exec(snippet_of_export(qaudit, "mlx", "gptq-4bit:group=32"), {})
    assert capsys.readouterr().out.strip()
