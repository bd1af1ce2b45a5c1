"""Our GPTQ and AWQ files in GPTQModel itself: it loads an exported folder and runs its weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from qaudit.export.choice import of_target
from qaudit.export.quantized import export_quantized
from qaudit.formats.weights import QuantizedFolder
from qaudit.types import SILENT
from tests.support.models import save_model, save_tokenizer, write_documents

pytestmark = pytest.mark.peers
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "pad_token_id": 0}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import PreTrainedTokenizerFast

    folder = save_model(tmp_path_factory.mktemp("model") / "model", 1, "llama", **WIDE)
    save_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)  # GPTQModel wants one
    tokenizer.save_pretrained(folder)
    return folder


def exported(source: Path, out: Path, form: str, spec: str) -> Path:
    text = write_documents(out.parent / "text.jsonl", range(4))
    choice = of_target(str(source), None, spec, {"calibration": str(text)}, SILENT)
    return export_quantized(choice, form, out)


def loaded(folder: Path, backend: str):
    from gptqmodel import BACKEND, GPTQModel

    chosen = getattr(BACKEND, backend)
    return GPTQModel.load(str(folder), device="cpu", backend=chosen, dtype=torch.bfloat16).model


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
def test_gptqmodel_reads_the_codes_scales_and_zero_points_of_gptq_files(
    tmp_path: Path, source: Path, spec: str
) -> None:
    folder = exported(source, tmp_path / "out", "gptq", spec)
    model, ours = loaded(folder, "GPTQ_TORCH"), QuantizedFolder(folder)
    for name in ours.linears:
        module = model.get_submodule(name.removesuffix(".weight"))
        theirs_RC = module.dequantize_weight().T
        # It multiplies in bfloat16, a code less its zero point by a scale: rounded once.
        assert torch.equal(theirs_RC.float(), ours.read(name).to(theirs_RC.dtype).float()), name


@pytest.mark.parametrize(
    "spec", ["rtn-4bit:group=32", "awq-4bit:group=128:exact_fold=true", "rtn-4bit:sym=false"]
)
def test_gptqmodel_reads_the_weights_of_awq_files(tmp_path: Path, source: Path, spec: str) -> None:
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    folder = exported(source, tmp_path / "out", "awq", spec)
    model, ours = loaded(folder, "AWQ_TORCH"), QuantizedFolder(folder)
    for name in ours.linears:
        module = model.get_submodule(name.removesuffix(".weight"))
        parts = {"qweight": module.qweight, "qzeros": module.qzeros, "scales": module.scales}
        theirs_RC = dequantize_gemm(**parts, bits=4, group_size=module.group_size).T
        assert torch.equal(theirs_RC.float(), ours.read(name).to(theirs_RC.dtype).float()), name
