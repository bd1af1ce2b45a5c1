"""Which way a subject is run: block by block if that is safe, whole if it fits, else not at all.

A family that a test holds bit-identical to `transformers` is streamed. Any other is first
compared with the whole model on one short batch, when it fits in memory; what does not agree
to the last bit, or cannot be taken apart at all, is run whole. What can neither be checked nor
held is refused with the reason. Code of a repository is never taken for a tested family,
whatever it calls itself, and a note says that it was run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import torch

from qaudit.core.scheme import Scheme
from qaudit.engine.block_pass import Feed, Observer, Progress, Tally, run_blocks
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.resident import run_resident
from qaudit.errors import ModelError
from qaudit.model.blocks import BlockModel, Weights
from qaudit.model.config import read_config
from qaudit.model.remote import foreign, is_remote, ran
from qaudit.model.self_check import self_check
from qaudit.model.skeleton import find_blocks, load_whole
from qaudit.model.tape import LinkedBlocksError
from qaudit.types import FULL_PRECISION


class Way:
    """How one subject's weights are run."""

    def __init__(
        self,
        folder: Path,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        """Decide nothing yet."""
        self._folder, self._weights, self._dtype, self._device = folder, weights, dtype, device
        self._trust_remote_code = trust_remote_code

    def run(
        self,
        feed: Feed,
        schemes: Sequence[Scheme],
        streams: HiddenStates,
        progress: Progress,
        observe: Observer,
        *,
        check: bool,
    ) -> Mapping[str, Tally]:
        """Send everything through, block by block or whole."""
        self._must_know_every_token(feed)
        if is_remote(self._folder):
            return self._remote(feed, schemes, streams, progress, observe)
        try:
            model, notes = self.streamed(check=check)
        except LinkedBlocksError as error:
            return self._whole(error, feed, schemes, progress, observe)
        tallies = run_blocks(model, feed, schemes, streams, progress, observe)
        tallies[FULL_PRECISION].note(*notes)
        return tallies

    def _remote(
        self,
        feed: Feed,
        schemes: Sequence[Scheme],
        streams: HiddenStates,
        progress: Progress,
        observe: Observer,
    ) -> Mapping[str, Tally]:
        """Run code of a repository: whole, unless its stream is shown to be the same."""
        if not self._fits():
            raise ModelError(
                f"the model in `{self._folder}` is code of its own, which is first run whole, "
                "and does not fit in memory",
                hint="use a machine with more memory",
            )
        with foreign(self._folder, "while it is measured"):
            try:
                with foreign(self._folder, "block by block"):
                    model, notes = self.streamed(check=True)
            except ModelError as error:
                tallies = self._whole(error, feed, schemes, progress, observe)
            else:
                tallies = run_blocks(model, feed, schemes, streams, progress, observe)
                tallies[FULL_PRECISION].note(*notes)
        for tally in tallies.values():
            tally.note(ran(self._folder))
        return tallies

    def _must_know_every_token(self, feed: Feed) -> None:
        """Refuse text cut by the tokenizer of a model with more tokens than this one."""
        batches = (*feed.calibration, *feed.evaluation)
        highest = max((int(batch.tokens_BT.max()) for batch in batches), default=0)
        config = read_config(
            self._folder, trust_remote_code=self._trust_remote_code
        ).get_text_config()
        known = int(getattr(config, "vocab_size", None) or highest + 1)
        if highest >= known:
            raise ModelError(
                f"the model in `{self._folder}` knows {known} tokens, "
                f"and its tokenizer makes token {highest}",
                hint="take the tokenizer that belongs to the model",
            )

    def streamed(self, *, check: bool) -> tuple[BlockModel, tuple[str, ...]]:
        """Return the model as blocks, and what checking it said."""
        trusted = self._trust_remote_code
        model = BlockModel(
            self._folder,
            self._weights,
            dtype=self._dtype,
            device=self._device,
            trust_remote_code=trusted,
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
        found = self_check(
            self._folder,
            self._weights,
            dtype=self._dtype,
            device=self._device,
            trust_remote_code=trusted,
        )
        if not found.equal:
            raise LinkedBlocksError(found.note, hint="it is run whole instead")
        return model, (found.note,)

    def _whole(
        self,
        why: ModelError,
        feed: Feed,
        schemes: Sequence[Scheme],
        progress: Progress,
        observe: Observer,
    ) -> Mapping[str, Tally]:
        if not self._fits():
            raise ModelError(
                f"{why.message}, and the whole model does not fit in memory",
                hint="use a machine with more memory",
            ) from why
        model = load_whole(
            self._folder,
            self._weights,
            self._dtype,
            trust_remote_code=self._trust_remote_code,
        ).to(self._device)
        blocks = list(model.get_submodule(find_blocks(model, self._folder)))
        tallies = run_resident(model, blocks, feed, schemes, progress, observe)
        for tally in tallies.values():
            tally.note(why.message)
        return tallies

    def _fits(self) -> bool:
        """Say whether the whole model, and once more its largest part, fits in free memory."""
        count = sum(math.prod(self._weights.shape(name)) for name in self._weights.names())
        needed = 2 * count * self._dtype.itemsize  # the library reads before it casts
        if self._device.type == "cuda" and needed > torch.cuda.mem_get_info(self._device)[0]:
            return False
        return needed < psutil.virtual_memory().available
