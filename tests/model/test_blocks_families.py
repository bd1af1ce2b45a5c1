"""Streamed logits are those of `transformers`, bit for bit, for every family we name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.model.blocks import BlockModel
from qaudit.model.proven import STREAMABLE
from tests.support import released, tiny
from tests.support.filled import filled

CPU = torch.device("cpu")


def whole(folder: Path, dtype: torch.dtype, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return [model(input_ids=t, use_cache=False).logits for t in tokens]


def streamed(folder: Path, dtype: torch.dtype, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    model = BlockModel(folder, WeightFolder(folder), dtype=dtype, device=CPU)
    hidden = [model.embed(t) for t in tokens]
    for block in filled(model.blocks()):
        with torch.no_grad():
            hidden = [block.forward(h) for h in hidden]
    return [model.logits(h) for h in hidden]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_streamed_logits_are_those_of_the_library(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = tiny.make(tmp_path, family)
    batches = [tiny.tokens(2, 48), tiny.tokens(1, 37, seed=1)]  # the last batch is ragged
    for ours, theirs in filled(
        zip(streamed(folder, dtype, batches), whole(folder, dtype, batches), strict=True)
    ):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_every_family_called_streamable_is_tested() -> None:
    assert set(tiny.FAMILIES) | set(released.RELEASED) == STREAMABLE
