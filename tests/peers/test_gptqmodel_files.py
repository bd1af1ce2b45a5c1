"""Our GPTQ and AWQ files in GPTQModel itself: it loads an exported folder and runs its weights."""

import json
import os
import shutil
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig

from qaudit.errors import QauditError
from qaudit.export.choice import of_target
from qaudit.export.folder import export_quantized
from qaudit.formats.weights import QuantizedFolder
from qaudit.types import SILENT
from tests.support.filled import filled
from tests.support.models import save_model, save_tokenizer, write_documents
from tests.zoo import tiny

pytestmark = pytest.mark.peers
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "pad_token_id": 0}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    from transformers import PreTrainedTokenizerFast

    folder = save_model(tmp_path_factory.mktemp("model") / "model", 1, "llama", **WIDE)
    save_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)  # GPTQModel wants one
    tokenizer.save_pretrained(folder)
    return folder


def exported(source, out, form, spec):
    text = write_documents(out.parent / "text.jsonl", range(4))
    choice = of_target(str(source), None, spec, {"calibration": str(text)}, SILENT)
    return export_quantized(choice, form, out)


def loaded(folder, backend):
    from gptqmodel import BACKEND, GPTQModel

    chosen = getattr(BACKEND, backend)
    return GPTQModel.load(str(folder), device="cpu", backend=chosen, dtype=torch.bfloat16).model


def weight_in(module):
    """Return the weight that a linear of GPTQModel computes with: (rows, columns)."""
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    if hasattr(module, "dequantize_weight"):
        return module.dequantize_weight().T
    parts = {"qweight": module.qweight, "qzeros": module.qzeros, "scales": module.scales}
    return dequantize_gemm(**parts, bits=4, group_size=module.group_size).T


def differing(model, ours):
    """It multiplies in bfloat16, a code less its zero point by a scale: rounded once."""
    found = []
    for name in filled(ours.linears):
        theirs_RC = weight_in(model.get_submodule(name.removesuffix(".weight")))
        if not torch.equal(theirs_RC.float(), ours.read(name).to(theirs_RC.dtype).float()):
            found.append(name)
    return found


@pytest.mark.parametrize(
    "spec",
    [
        "rtn-4bit:group=32",
        "gptq-4bit:group=128:sym=false",
        "rtn-3bit:group=128",
        "rtn-3bit:group=64:sym=false",
        "rtn-8bit:group=-1",
    ],
)
def test_gptqmodel_reads_the_codes_scales_and_zero_points_of_gptq_files(tmp_path, source, spec):
    folder = exported(source, tmp_path / "out", "gptq", spec)
    assert not differing(loaded(folder, "GPTQ_TORCH"), QuantizedFolder(folder))


@pytest.mark.parametrize(
    "spec", ["rtn-4bit:group=32", "awq-4bit:group=128:exact_fold=true", "rtn-4bit:sym=false"]
)
def test_gptqmodel_reads_the_weights_of_awq_files(tmp_path, source, spec):
    folder = exported(source, tmp_path / "out", "awq", spec)
    assert not differing(loaded(folder, "AWQ_TORCH"), QuantizedFolder(folder))


# ------------------------------------------------------------------- configurations by hand

ASYMMETRIC, SYMMETRIC = "gptq-4bit:group=32:sym=false", "rtn-4bit:group=32"
EDITS = [
    ("gptq", ASYMMETRIC, {"bits": 3}, "refuses"),
    ("gptq", ASYMMETRIC, {"bits": 8}, "refuses"),
    ("gptq", ASYMMETRIC, {"group_size": 64}, "refuses"),
    ("gptq", ASYMMETRIC, {"group_size": -1}, "refuses"),
    ("gptq", ASYMMETRIC, {"sym": True}, "reads the same"),  # its zero points are those stored
    ("gptq", SYMMETRIC, {"checkpoint_format": "gptq_v2"}, "reads others"),
    ("awq", "rtn-4bit:group=32:sym=false", {"bits": 8}, "refuses"),
    ("awq", "rtn-4bit:group=32:sym=false", {"group_size": 64}, "refuses"),
    ("awq", "rtn-4bit:group=32:sym=false", {"zero_point": False}, "reads the same"),
]
"""What contradicts the stored tensors, and what GPTQModel does with it."""


@pytest.fixture(scope="module")
def files(source, tmp_path_factory):
    return cache(
        lambda form, spec: exported(source, tmp_path_factory.mktemp("f") / "m", form, spec)
    )


def edit(folder, change):
    """Change both configurations of a folder."""
    for name in ("config.json", "quantize_config.json"):
        if (folder / name).is_file():
            config = json.loads((folder / name).read_text())
            config.get("quantization_config", config).update(change)
            (folder / name).write_text(json.dumps(config))


def reading_of(folder, form, stored):
    """Return what GPTQModel does with a folder whose weights are known."""
    try:
        model = loaded(folder, f"{form.upper()}_TORCH")
    except Exception:  # noqa: BLE001 - a library raises what it likes
        return "refuses"
    return "reads others" if differing(model, stored) else "reads the same"


def must_be_refused(folder):
    with pytest.raises(QauditError) as caught:
        read = QuantizedFolder(folder)
        for name in read.linears:
            read.read(name)
    assert caught.value.hint


@pytest.mark.parametrize(("form", "spec", "change", "theirs"), EDITS)
def test_configurations_that_tensors_contradict_are_refused(
    form, spec, change, theirs, files, tmp_path
):
    whole, folder = files(form, spec), tmp_path / "edited"
    shutil.copytree(whole, folder)
    edit(folder, change)
    must_be_refused(folder)
    assert reading_of(folder, form, QuantizedFolder(whole)) == theirs


def test_an_order_of_columns_that_is_denied_is_refused(files, tmp_path):
    """GPTQModel goes by `g_idx` whatever `desc_act` is; kernels of vLLM leave it out."""
    shuffled, denied = tmp_path / "shuffled", tmp_path / "denied"
    shutil.copytree(files("gptq", ASYMMETRIC), shuffled)
    tensors = load_file(shuffled / "model.safetensors")
    for name in tensors:
        if name.endswith(".g_idx"):
            tensors[name] = tensors[name].roll(1)
    save_file(tensors, shuffled / "model.safetensors", {"format": "pt"})
    shutil.copytree(shuffled, denied)
    edit(shuffled, {"desc_act": True})
    must_be_refused(denied)
    for folder in (shuffled, denied):
        assert reading_of(folder, "gptq", QuantizedFolder(shuffled)) == "reads the same"


# ------------------------------ experts, which releases store one by one (OLMoE) or together


def dense_of(source, ours, *, transposed):
    """Return the model of transformers, in bfloat16, with the weights of files where they belong.

    Its parameters hold gate and up of all experts of a layer together.
    """
    kind = tiny.class_of(AutoConfig.from_pretrained(source))
    model = kind.from_pretrained(source, dtype=torch.bfloat16).float().eval()
    for name in ours.linears:
        place, expert, rest = name.partition(".experts.")
        if not expert:
            model.get_parameter(name).data.copy_(ours.read(name))
            continue
        number, part, _ = rest.split(".")
        key = "down_proj" if part == "down_proj" else "gate_up_proj"
        fused_RC = model.get_parameter(f"{place}.experts.{key}").data[int(number)]
        fused_RC = fused_RC.T if transposed else fused_RC
        half = len(fused_RC) // 2
        rows = {"gate_proj": slice(half), "up_proj": slice(half, None)}.get(part, slice(None))
        fused_RC[rows].copy_(ours.read(name))
    return model


def in_place_of(model, name, weight_RC):
    """Put a dense linear in the place of a quantized one."""
    linear = nn.Linear(weight_RC.shape[1], len(weight_RC), bias=False, dtype=weight_RC.dtype)
    linear.weight.data.copy_(weight_RC)
    model.set_submodule(name.removesuffix(".weight"), linear)


@torch.no_grad()
def logits_of(model):
    return model(input_ids=torch.arange(2, 34)[None], use_cache=False).logits.float()


@pytest.mark.parametrize("form", ["gptq", "awq"])
@pytest.mark.parametrize("family", ["llama4", "qwen3_5_moe", "olmoe"])
def test_gptqmodel_computes_with_experts(family, form, tmp_path, monkeypatch):
    """Weights, places and logits hold: its kernels in bfloat16, and its model in float32.

    In bfloat16 the routers of two libraries part, so that models are compared in float32.
    """
    # It opens the processor of a wrapper, which needs torchvision; text needs none.
    monkeypatch.setattr("gptqmodel.models.base.AutoProcessor.from_pretrained", lambda *_, **__: 0)
    source = tmp_path / "model"
    tiny.save(source, family)
    save_tokenizer(source)
    folder = exported(source, tmp_path / "out", form, "rtn-4bit:group=32:sym=false")
    model, ours = loaded(folder, f"{form.upper()}_TORCH"), QuantizedFolder(folder)
    assert any(name.endswith(".experts.3.up_proj.weight") for name in ours.linears)
    assert not differing(model, ours)
    quantized = logits_of(model)
    for name in ours.linears:
        in_place_of(model, name, ours.read(name).bfloat16())
    assert torch.equal(logits_of(model), quantized)  # it decodes weights, and multiplies then
    model.float()
    for name in ours.linears:
        in_place_of(model, name, ours.read(name))
    plain = logits_of(dense_of(source, ours, transposed=family == "llama4"))
    assert float((logits_of(model) - plain).abs().max()) <= 1e-5 * float(plain.abs().max())


def test_gptqmodel_has_other_names_for_the_experts_of_mixtral(tmp_path):
    """It looks for `mlp.experts.0.gate_proj`: in releases `block_sparse_moe.experts.0.w1`."""
    tiny.save(tmp_path / "model", "mixtral")
    save_tokenizer(tmp_path / "model")
    folder = exported(tmp_path / "model", tmp_path / "out", "gptq", SYMMETRIC)
    with pytest.raises(ValueError, match=r"mlp\.experts\.0\.down_proj\.qweight"):
        loaded(folder, "GPTQ_TORCH")
