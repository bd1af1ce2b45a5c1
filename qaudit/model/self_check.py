"""Does the stream compute what the model computes? One short batch, both ways.

The families in `STREAMABLE` are held bit-identical by tests. For any other the same comparison
can be made on the spot, with the checkpoint at hand: the library loads the same tensors as a
whole model, in its own way, and both read one short batch. It costs the memory of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qaudit.model.blocks import BlockModel

SHAPE = (2, 24)


@dataclass(frozen=True)
class SelfCheck:
    """How far the stream's logits are from the whole model's."""

    equal: bool  # bit for bit
    difference: float  # largest, in units of the largest logit

    @property
    def note(self) -> str:
        result = "bit-identical to" if self.equal else f"within {self.difference:.1e} of"
        tokens = SHAPE[0] * SHAPE[1]
        return f"self-check on {tokens} tokens: streamed logits {result} the whole model's"


@torch.no_grad()
def self_check(model: BlockModel, whole: Any) -> SelfCheck:
    """Compare the stream with the whole model on a short batch."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(0, vocabulary, SHAPE, generator=generator).to(model.device)
    hidden_BTD = model.embed(tokens_BT)
    for block in model.blocks():
        hidden_BTD = block.forward(hidden_BTD)
    model.forget()
    streamed_BTV = model.logits(hidden_BTD).float()
    whole_BTV: Tensor = whole.to(model.device)(input_ids=tokens_BT, use_cache=False).logits.float()
    scale = float(whole_BTV.abs().max()) or 1.0
    difference = float((streamed_BTV - whole_BTV).abs().max()) / scale
    return SelfCheck(torch.equal(streamed_BTV, whole_BTV), difference)
