"""A rotation in front of every linear leaves every kind of model what it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.rotation import rotate, rotated
from qaudit.core.scheme import Quantized
from qaudit.model.blocks import BlockModel
from tests.support import tiny

# gemma2, olmo2: norms behind sublayers; gpt2: tied, transposed matrices; phi: parallel sublayers.
FAMILIES = ["llama", "olmo2", "gemma2", "gpt2", "phi"]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_rotation_alone_leaves_no_divergence(family: str, tmp_path: Path) -> None:
    folder, cpu = tiny.make(tmp_path, family), torch.device("cpu")
    model = BlockModel(folder, WeightFolder(folder), dtype=torch.float32, device=cpu)
    tokens_BT = tiny.tokens(2, 24)
    plain_BTD = turned_BTD = model.embed(tokens_BT)
    for block in model.blocks():
        plain_BTD = block.forward(plain_BTD)
        for group in block.groups:
            weights = rotated(block.linears(group)).weights
            assert not any(torch.equal(weights[name], block.weight(name)) for name in weights)
            block.install(Quantized(weights, 0, inputs=rotate))
        turned_BTD = block.forward(turned_BTD)
    plain, turned = (
        model.logits(hidden).double().log_softmax(-1) for hidden in (plain_BTD, turned_BTD)
    )
    kl_BT = (plain.exp() * (plain - turned)).sum(-1)
    assert not torch.equal(plain, turned)
    assert float(kl_BT.mean()) < 1e-6
