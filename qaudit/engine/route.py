"""How a subject is run: in blocks if that is safe, whole if it fits, else not at all.

A family that a test holds bit-identical to `transformers` runs in blocks. Any other is first
compared with the whole model on one short batch, if it fits in memory; what differs in a bit, or
cannot be taken apart, runs whole. What can neither be checked nor held is refused. Code of a
repository never counts as a tested family, and a note says that it was run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qaudit.core.scheme import Scheme
from qaudit.core.shipped import Shipped
from qaudit.engine.block_pass import Progress, run_blocks
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.resident import run_resident
from qaudit.engine.streams import Observer
from qaudit.engine.tally import Tally
from qaudit.engine.tokens import Feed
from qaudit.errors import ModelError
from qaudit.model.beside import LinkedBlocksError
from qaudit.model.blocks import BlockModel, ExpertOptions, Weights
from qaudit.model.config import read_config
from qaudit.model.device import fits_whole
from qaudit.model.remote import foreign, is_remote, ran
from qaudit.model.self_check import self_check
from qaudit.model.skeleton import find_blocks, load_whole
from qaudit.types import FULL_PRECISION

_EXPERTS_WITHIN = {2: 2e-2, 4: 1e-5, 8: 1e-12}
"""How far logits may be from the whole model's where there are experts, by bytes of a number."""


class Route:
    """How one subject's weights are run."""

    def __init__(
        self,
        folder: Path,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        *,
        trust_remote_code: bool = False,
        experts: ExpertOptions | None = None,
    ) -> None:
        self._experts = experts or ExpertOptions()
        self._folder, self._weights, self._dtype, self._device = folder, weights, dtype, device
        self._trust_remote_code = trust_remote_code

    def follow(
        self,
        feed: Feed,
        schemes: Sequence[Scheme],
        states: HiddenStates,
        progress: Progress,
        observe: Observer,
        *,
        check: bool,
    ) -> Mapping[str, Tally]:
        self._check_vocabulary(feed)
        with self._guarded():
            model, notes = self._in_blocks(check=check)
            if model is not None:
                tallies = run_blocks(model, feed, schemes, states, progress, observe)
                tallies[FULL_PRECISION].note(*notes, *model.notes)
            else:
                whole, blocks = self._load_whole(notes[0])
                computed = [scheme for scheme in schemes if not isinstance(scheme, Shipped)]
                feed = replace(feed, experts=self._experts)
                tallies = dict(run_resident(whole, blocks, feed, computed, progress, observe))
                tallies |= {
                    scheme.spec: _not_whole(scheme) for scheme in schemes if scheme not in computed
                }
                for tally in tallies.values():
                    tally.note(*notes)
        if is_remote(self._folder):
            for tally in tallies.values():
                tally.note(ran(self._folder))
        return tallies

    def _guarded(self) -> AbstractContextManager[None]:
        """Turn what code of a repository raises into an error that names it."""
        if not is_remote(self._folder):
            return nullcontext()
        if not self._fits():
            raise ModelError(
                f"the model in `{self._folder}` is code of its own, which is first run whole, "
                "and does not fit in memory",
                hint="use a machine with more memory",
            )
        return foreign(self._folder, "while it is measured")

    def _in_blocks(self, *, check: bool) -> tuple[BlockModel | None, tuple[str, ...]]:
        """Return the model as blocks and notes of its check, or None and why it runs whole."""
        try:
            if not is_remote(self._folder):
                return self.streamed(check=check)
            with foreign(self._folder, "block by block"):
                return self.streamed(check=True)
        except ModelError as error:
            if not (is_remote(self._folder) or isinstance(error, LinkedBlocksError)):
                raise
            return None, (error.message,)

    def _check_vocabulary(self, feed: Feed) -> None:
        """Refuse text cut by the tokenizer of a model with more tokens than this one."""
        batches = (*feed.calibration, *feed.evaluation)
        highest = max((int(batch.tokens_BT.max()) for batch in batches), default=0)
        config = read_config(
            self._folder, trust_remote_code=self._trust_remote_code
        ).get_text_config()
        vocabulary = int(getattr(config, "vocab_size", None) or highest + 1)
        if highest >= vocabulary:
            raise ModelError(
                f"the model in `{self._folder}` knows {vocabulary} tokens, "
                f"and its tokenizer makes token {highest}",
                hint="take the tokenizer that belongs to the model",
            )

    def streamed(self, *, check: bool) -> tuple[BlockModel, tuple[str, ...]]:
        trusted = self._trust_remote_code
        model = BlockModel(
            self._folder,
            self._weights,
            dtype=self._dtype,
            device=self._device,
            trust_remote_code=trusted,
            experts=self._experts,
        )
        if model.is_streamable and not check:
            return model, ()
        if not self._fits():
            if model.is_streamable:
                return model, ("self-check left out: the whole model does not fit in memory",)
            raise ModelError(
                f"`{model.model_type}` is not a family this engine is tested on, and the whole "
                "model does not fit in memory to check it",
                hint="use a machine with more memory, or `--device` with a larger one",
            )
        whole = load_whole(self._folder, self._weights, self._dtype, trust_remote_code=trusted)
        compared = self_check(model, whole)
        # The library's kernels for experts are others than a product for each.
        close = model.has_experts and compared.difference <= _EXPERTS_WITHIN[self._dtype.itemsize]
        if not (compared.equal or close):
            raise LinkedBlocksError(compared.note, hint="it is run whole instead")
        return model, (compared.note,)

    def _load_whole(self, reason: str) -> tuple[Any, list[nn.Module]]:
        """Load the model as the library has it; `reason` is why it is not run in blocks."""
        if not self._fits():
            raise ModelError(
                f"{reason}, and the whole model does not fit in memory",
                hint="use a machine with more memory",
            )
        model = load_whole(
            self._folder, self._weights, self._dtype, trust_remote_code=self._trust_remote_code
        ).to(self._device)
        _must_be_causal(model, self._folder)
        return model, list(model.get_submodule(find_blocks(model, self._folder)))

    def _fits(self) -> bool:
        return fits_whole(self._weights, self._dtype, self._device)


@torch.no_grad()
def _must_be_causal(model: Any, folder: Path) -> None:
    """Refuse a model that sees tokens ahead: blocks are tried one by one, this one is not."""
    tokens_BT = torch.arange(3, 11, device=model.device)[None]
    other_BT = tokens_BT.clone()
    other_BT[0, -1] = 2
    before, after = (
        model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
        for tokens in (tokens_BT, other_BT)
    )
    if not torch.allclose(before, after, rtol=1e-2, atol=1e-2):
        raise ModelError(
            f"in the model in `{folder}` a token sees tokens after it",
            hint="only decoder language models have a next-token loss to audit",
        )


def _not_whole(scheme: Scheme) -> Tally:
    error = ModelError(
        f"`{scheme.short}` is read block by block, and the model it belongs to runs whole",
        hint="only files of models that run block by block are compared",
    )
    return Tally(error=error)
