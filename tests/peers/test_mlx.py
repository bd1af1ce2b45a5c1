"""Our MLX files in mlx itself: `make peers`. mlx runs on a CPU under Linux, too."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from qaudit.core.linears import Linears
from qaudit.core.registry import parse_scheme
from qaudit.export.choice import of_target
from qaudit.export.quantized import export_quantized
from qaudit.formats.registry import format_named
from qaudit.formats.weights import QuantizedFolder
from qaudit.types import SILENT
from tests.support.models import save_model, save_tokenizer, write_documents

pytestmark = pytest.mark.peers


def in_torch(array) -> torch.Tensor:
    import mlx.core as mx

    return torch.from_numpy(np.array(array.astype(mx.float32)))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("symmetric", ["true", "false"])
def test_mlx_dequantizes_to_the_weights_that_were_measured(bits, group, symmetric):
    import mlx.core as mx

    spec = f"rtn-{bits}bit:group={group}:sym={symmetric}"
    weight_RC = torch.randn(64, 256, generator=torch.Generator().manual_seed(bits)) / 50
    quantized = parse_scheme(spec).quantize(Linears({"w": weight_RC}))
    parts = format_named("mlx", parse_scheme(spec)).pack("a", quantized.stored["w"])
    weight = mx.array(parts["a.weight"].view(torch.int32).numpy()).view(mx.uint32)
    # Scales and biases hold the same numbers in float32, in which mlx then computes.
    scales, biases = (mx.array(parts[f"a.{name}"].float().numpy()) for name in ("scales", "biases"))
    theirs = mx.dequantize(weight, scales, biases, group_size=group, bits=bits)
    assert torch.equal(in_torch(theirs), quantized.weights["w"])


@pytest.mark.parametrize("family", ["llama", "olmo2"])
@pytest.mark.parametrize("spec", ["rtn-4bit:group=32", "rtn-3bit:group=32:sym=false"])
def test_mlx_lm_loads_and_runs_an_exported_folder(tmp_path: Path, spec, family):
    import mlx.core as mx
    from mlx_lm.utils import load_model
    from transformers import AutoModelForCausalLM

    source = save_model(tmp_path / "model", 1, family)
    save_tokenizer(source)
    text = write_documents(tmp_path / "text.jsonl", range(4))
    choice = of_target(str(source), None, spec, {"calibration": str(text)}, SILENT)
    out = export_quantized(choice, "mlx", tmp_path / "out")
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
