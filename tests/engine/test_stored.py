"""Bytes of a whole model, counted again from the library's modules and the files alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from qaudit.core.registry import parse_schemes
from qaudit.engine.measure import StoredSizes, measure
from qaudit.engine.tally import Tally
from qaudit.engine.tasks import Task
from qaudit.saved.results import ResultStore
from qaudit.types import Measurement, Subject
from tests.support import tiny
from tests.support.measured import MACHINE, corpus
from tests.support.series import find_checkpoints

GROUP = 32


def measured(folder: Path, out: Path) -> tuple[Measurement, Measurement]:
    """Return a model in full precision, and at 4 bits with an fp16 scale for every 32 weights."""
    (checkpoint,) = find_checkpoints(folder)
    subject = Subject(checkpoint.label, ((checkpoint, 1.0),))
    task = Task.unplanned(subject, corpus(), parse_schemes([f"rtn-4bit:group={GROUP}"]))
    full, low = measure(task, MACHINE, ResultStore(out / "evidence"))
    return full.measurement, low.measurement


def linears_of(folder: Path) -> dict[str, int]:
    """Return the matrices inside the blocks of a model as the library builds it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    blocks = max(
        ((n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList)),
        key=lambda pair: sum(p.numel() for p in pair[1].parameters()),
    )
    return {
        f"{blocks[0]}.{name}.weight": module.weight.numel()
        for name, module in blocks[1].named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }


@pytest.mark.parametrize("family", ["llama", "olmo2", "gpt2", "gpt_neox", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
def test_bytes_are_those_of_the_files_less_the_linears(
    tmp_path: Path, family: str, *, tied: bool
) -> None:
    folder = tiny.make(tmp_path / "step1", family, tie_word_embeddings=tied)
    tensors = load_file(folder / "model.safetensors")
    full, low = measured(folder, tmp_path)
    count = sum(tensor.numel() for tensor in tensors.values())
    quantized = sum(linears_of(folder).values())
    assert (full.parameters, low.parameters) == (count, count)
    assert full.nbytes == 4 * count
    assert low.nbytes == 4 * (count - quantized) + quantized * (4 + 16 / GROUP) / 8
    assert low.bits_per_weight == 4 + 16 / GROUP


def test_each_tensor_counts_in_the_dtype_that_it_is_stored_in(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "step1", "llama")
    tensors = load_file(folder / "model.safetensors")
    linears = linears_of(folder)
    # What is quantized later is stored in two bytes, norms and embeddings in four.
    mixed = {n: t.to(torch.bfloat16) if n in linears else t for n, t in tensors.items()}
    save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
    full, low = measured(folder, tmp_path)
    rest = sum(4 * t.numel() for n, t in mixed.items() if n not in linears)
    assert full.nbytes == rest + 2 * sum(linears.values())
    assert low.nbytes == rest + sum(linears.values()) * (4 + 16 / GROUP) / 8


def test_names_of_another_layout_count_by_their_one_dtype() -> None:
    tally = Tally(bits=400, weights=100, linears={"q_proj"})
    elements = {"fused.weight": 120, "embeddings": 80}
    assert StoredSizes(elements, {k: 2 * n for k, n in elements.items()}, 400).quantized_nbytes(
        tally
    ) == (400 - 200 + 50)
    assert StoredSizes(elements, {"fused.weight": 240, "embeddings": 320}, 560).quantized_nbytes(
        tally
    ) is None  # fmt: skip


def test_pickled_tensors_share_what_the_files_take() -> None:
    tally = Tally(bits=400, weights=100, linears={"q_proj"})
    assert StoredSizes({"a": 150, "b": 50}, {}, 808).quantized_nbytes(tally) == 808 - 404 + 50
