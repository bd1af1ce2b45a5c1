"""Does the stream compute what the model computes? One short batch, both ways.

The families in `STREAMABLE` are held bit-identical by tests. For any other the same comparison
can be made on the spot, with the checkpoint at hand: the library loads the same tensors as a
whole model, in its own way, and both read one short batch. It costs the memory of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qaudit.model.blocks import BlockModel
from qaudit.model.routes import Weights
from qaudit.model.skeleton import load_whole

SHAPE = (2, 24)


@dataclass(frozen=True)
class SelfCheck:
    """How far the stream's logits are from the whole model's."""

    equal: bool  # bit for bit
    difference: float  # largest, in units of the largest logit
    tokens: int

    @property
    def note(self) -> str:
        result = "bit-identical to" if self.equal else f"within {self.difference:.1e} of"
        return f"self-check on {self.tokens} tokens: streamed logits {result} the whole model's"


@torch.no_grad()
def self_check(
    folder: Path,
    weights: Weights,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
) -> SelfCheck:
    """Compare the stream with the whole model on a short batch."""
    model = BlockModel(
        folder, weights, dtype=dtype, device=device, trust_remote_code=trust_remote_code
    )
    vocabulary = int(model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(0, vocabulary, SHAPE, generator=generator).to(device)
    hidden_BTD = model.embed(tokens_BT)
    for block in model.blocks():
        hidden_BTD = block.forward(hidden_BTD)
    streamed_BTV = model.logits(hidden_BTD).float()
    whole = load_whole(folder, weights, dtype, trust_remote_code=trust_remote_code).to(device)
    whole_BTV: Tensor = whole(input_ids=tokens_BT, use_cache=False).logits.float()
    scale = float(whole_BTV.abs().max()) or 1.0
    return SelfCheck(
        equal=torch.equal(streamed_BTV, whole_BTV),
        difference=float((streamed_BTV - whole_BTV).abs().max()) / scale,
        tokens=tokens_BT.numel(),
    )
