"""Rollouts by transformers: the whole model, with its cache, on the device.

Each sample has random numbers of its own, by its prompt and its number, so that an interrupted
run goes on with the same ones. Rows of a batch have prompts of one length: nothing is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from qaudit.core.fidelity import draw, log_probabilities
from qaudit.errors import ModelError
from qaudit.rollouts.folder import DrawSettings, DueSample
from qaudit.text.rollouts import Rollout


class _Choice(LogitsProcessor):
    """Leaves one token of each row: what is drawn from logits is the same on every device."""

    def __init__(self, rows: Sequence[DueSample], drawing: DrawSettings) -> None:
        self._greedy = torch.tensor([row.greedy for row in rows])
        self._sampler = drawing.sampler
        self._random = [torch.Generator().manual_seed(row.seed(drawing.seed)) for row in rows]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not bool(torch.isfinite(scores.max(-1).values).all()):
            raise ModelError(
                "the model's logits are not finite while it generates",
                hint="generate with `--set dtype=float32`, or check the weights with `qaudit scan`",
            )
        likely = scores.argmax(-1)
        uniform = torch.stack([torch.rand((), generator=g) for g in self._random])
        s = self._sampler
        drawn = draw(log_probabilities(scores, s.temperature, s.top_k, s.top_p), uniform)
        chosen = torch.where(self._greedy.to(scores.device), likely, drawn)
        alone = torch.full_like(scores, -torch.inf)
        return alone.scatter(-1, chosen[:, None], 0.0)


@torch.no_grad()
def generate(model: Any, rows: Sequence[DueSample], drawing: DrawSettings) -> list[Rollout]:
    """Return the rollouts of rows whose prompts have one length."""
    tokens = torch.tensor([row.prompt.ids for row in rows], device=model.device)
    end_ids = drawing.end_ids
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=drawing.max_tokens,
        do_sample=False,
        use_cache=True,
        eos_token_id=list(end_ids) or None,
        pad_token_id=end_ids[0] if end_ids else 0,
    )
    out = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        generation_config=settings,
        logits_processor=LogitsProcessorList([_Choice(rows, drawing)]),
    )
    rollouts = []
    for row, ids in zip(rows, out[:, tokens.shape[1] :].tolist(), strict=True):
        end = next((k for k, token in enumerate(ids) if token in end_ids), None)
        ids = ids if end is None else ids[: end + 1]  # what is behind is padding
        rollouts.append(row.rollout(ids, finished=end is not None))
    return rollouts
