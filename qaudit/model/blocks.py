"""Any decoder model, one block at a time.

A model is built without memory (`skeleton.py`); its front and head are filled once; its blocks
are filled one after another, the next one read by a thread while the present one computes, so
that at most two are ever resident. What each block must be called with is recorded by running
the model's own front with stubs in place of the blocks (`front.py`), once per shape of batch,
and a block run with those arguments does exactly what it does inside the model: the logits are
bit-identical to `transformers`, which a test holds for every family in `STREAMABLE`.

What was given up: caches, padding masks and packed sequences. Batches are right-padded at
most, which a causal model cannot see from the left.

Does the stream compute what the model computes? One short batch, both ways.

The families in `STREAMABLE` are held bit-identical by tests. For any other the same comparison
can be made on the spot, with the checkpoint at hand: the library loads the same tensors as a
whole model, in its own way, and both read one short batch. It costs the memory of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qaudit.checkpoints.configuration import unreadable
from qaudit.core.fidelity import head_rows
from qaudit.errors import ModelError
from qaudit.model.config import computed_buffers, is_remote
from qaudit.model.device import Copies
from qaudit.model.experts import fuse, is_fused, unfuse
from qaudit.model.front import Front, Inspector
from qaudit.model.groups import Block, ExpertOptions, Group
from qaudit.model.proven import BRANCHING, STREAMABLE
from qaudit.model.routes import Weights
from qaudit.model.skeleton import build_skeleton, fill, must_be_filled
from qaudit.model.stored_names import stored_name
from qaudit.model.structure import Heads, is_linear

__all__ = ["Block", "BlockModel", "ExpertOptions", "Group", "Weights"]


class BlockModel:
    """A causal language model that never exists as a whole."""

    def __init__(
        self,
        folder: Path,
        weights: Weights,
        *,
        dtype: torch.dtype,
        device: torch.device,
        trust_remote_code: bool = False,
        experts: ExpertOptions | None = None,
    ) -> None:
        """Check every tensor's name and shape, and load all that is not in a block."""
        self.device, self.dtype = device, dtype
        self.experts = experts or ExpertOptions()
        self._weights = weights
        self._copies = Copies(device)
        self._skeleton = build_skeleton(folder, weights, dtype, trust_remote_code=trust_remote_code)
        self.config = self._skeleton.model.config
        self.model_type = str(self.config.model_type)
        # Code of a repository may call its model anything, a family that is tested too.
        self.is_streamable = self.model_type in STREAMABLE and not is_remote(folder)
        if is_remote(folder):
            computed = computed_buffers(self.config, folder, dtype)
            self._skeleton = replace(self._skeleton, computed=computed)
        self.notes, self.pad_until = self._skeleton.notes, self._skeleton.fixed_until
        # How many rows of logits to have in memory at once.
        self.head_rows = head_rows(int(self.config.get_text_config().vocab_size), device.type)
        self._blocks = self._skeleton.blocks
        self.num_blocks = len(self._blocks)
        self.front = Front(self._skeleton, device)
        self._fill_front_and_head()
        width = self.front.find_links()
        self.links = self.front.links  # what links the blocks beside hidden states
        self.inspector = Inspector(width, Heads.of(self.config), dtype, device)
        self.left = self.inspector.left  # linears of blocks read that stay as they are, and why

    @property
    def has_experts(self) -> bool:
        return any(is_fused(module) for block in self._blocks for module in block.modules())

    @property
    def linears(self) -> tuple[str, ...]:
        """Return the names of all linears in blocks, as blocks call them, each once."""
        names: dict[str, None] = {}
        for block in self._blocks:
            unfuse(block)
            names |= dict.fromkeys(n for n, m in block.named_modules() if is_linear(m))
            fuse(block)
        return tuple(names)

    @torch.no_grad()
    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Run everything before the first block, and note what blocks are called with."""
        try:
            return self.front.embed(tokens_BT)
        except IndexError as error:  # learned positions end somewhere
            raise ModelError(
                f"this `{self.model_type}` has no position for every token of a window of "
                f"{tokens_BT.shape[1]}",
                hint="use a shorter `--set context=N`",
            ) from error

    @torch.no_grad()
    def takes_branches(self, longest: int) -> bool:
        """Return whether windows of so many tokens may be trees, by what the model itself sees."""
        return self.is_streamable and self.model_type in BRANCHING and self.front.sees_all(longest)

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Run everything after the last block; gradients reach what is given if it takes any."""
        with unreadable(f"the head of this `{self.model_type}` does not run", kind=ModelError):
            return self.front.logits(hidden_BTD)

    @torch.no_grad()
    def target_nll(
        self, hidden_BTD: Tensor, rows_Q: Tensor, targets_Q: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of a token after each of some rows, in fp32, and if it is the likeliest.

        A row may be asked for several tokens; it goes through the head once.
        """
        hidden_ND = hidden_BTD.to(self.device).reshape(-1, hidden_BTD.shape[-1])
        read_U, places_Q = torch.unique(rows_Q, return_inverse=True)
        nll_Q = torch.zeros(len(rows_Q), dtype=torch.float32)
        greedy_Q = torch.zeros(len(rows_Q), dtype=torch.bool)
        for start in range(0, len(read_U), self.head_rows):
            stop = start + self.head_rows
            logits_UV = self.logits(hidden_ND[read_U[start:stop].to(self.device)][None])[0].float()
            some = torch.nonzero((places_Q >= start) & (places_Q < stop)).squeeze(1)
            at_Q = (places_Q[some] - start).to(self.device)
            wanted_Q = targets_Q[some].to(self.device)
            nll_Q[some] = (logits_UV.logsumexp(1)[at_Q] - logits_UV[at_Q, wanted_Q]).cpu()
            greedy_Q[some] = (logits_UV.argmax(1)[at_Q] == wanted_Q).cpu()
        return nll_Q, greedy_Q

    def blocks(self, first: int = 0) -> Iterator[Block]:
        """Yield the blocks in order; each is emptied when the next is asked for."""
        if first >= self.num_blocks:
            return
        # Blocks before the first one run on the probe, where later ones read what they leave.
        for index in (k for k in range(first) if not self.front.is_noted(k)):
            block = self.load(index)
            self._note(block)
            block.release()

        def read_ahead(index: int) -> tuple[Mapping[str, Tensor], torch.cuda.Event | None]:
            """Read one block in a thread; return when it is on the device, too."""
            with self._copies.ahead():
                tensors = self._read(index)
            return tensors, self._copies.sent()

        with ThreadPoolExecutor(1, "read-ahead") as reader:
            ahead = reader.submit(read_ahead, first)
            for index in range(first, self.num_blocks):
                tensors, sent = ahead.result()
                if index + 1 < self.num_blocks:
                    ahead = reader.submit(read_ahead, index + 1)
                self._copies.arrive(sent)
                with torch.no_grad():
                    module = self._filled(index, tensors)
                    groups, notes = self.inspector.look(index, module, self.front.on_probe(index))
                arguments = partial(self.front.arguments, index)
                block = Block(index, module, groups, notes, arguments, self.num_blocks)
                block.experts, block.given = self.experts, self.links.given(index)
                self._note(block)
                del tensors
                try:
                    yield block
                finally:
                    self._copies.give_up()
                    block.release()

    @torch.no_grad()
    def load(self, index: int, groups: tuple[Group, ...] = ()) -> Block:
        """Fill one block as it is; it is the caller's to release.

        Only what linears of `groups` read can be changed: those of a block of the same structure.
        """
        module = self._filled(index, self._read(index))
        block = Block(index, module, groups, (), partial(self.front.arguments, index))
        block.given = self.links.given(index)
        return block

    def _filled(self, index: int, tensors: Mapping[str, Tensor]) -> nn.Module:
        module = self._blocks[index]
        fill(self._skeleton, module, self._prefix(index), tensors)
        must_be_filled(module, f"block {index}")
        unfuse(module)
        return module

    def stored_name(self, index: int, linear: str) -> str:
        """Return the name of a linear's weight in the files, or nothing where it has none."""
        return stored_name(self._skeleton, index, f"{linear}.weight")

    def share_with(self, other: BlockModel) -> None:
        """Use the other model's tensors outside of blocks where they are equal."""
        theirs = dict(other._skeleton.model.named_parameters())
        for name, parameter in self._skeleton.model.named_parameters():
            same = theirs.get(name)  # towers have no values
            if same is not None and not parameter.is_meta and torch.equal(same, parameter):
                parameter.data = same.data

    def _fill_front_and_head(self) -> None:
        blocks, skeleton = self._prefix(""), self._skeleton
        names = [n for n in skeleton.routes if not n.startswith(blocks) and n not in skeleton.idle]
        tensors = skeleton.read(self._weights, names, self.device)
        model = skeleton.model
        fill(self._skeleton, model, "", tensors)
        outside = {name for name in skeleton.missing if not name.startswith(blocks)}
        model.tie_weights(missing_keys=outside, recompute_mapping=False)
        must_be_filled(model, "the model outside its blocks", self._skeleton.idle)
        # The first parameter is zeros where none is read: its device is the model's.
        for module in (model, model.base_model):
            name, first = next(module.named_parameters())
            if first.is_meta:
                zeros = {name: torch.zeros_like(first, device=self.device)}
                module.load_state_dict(zeros, strict=False, assign=True)
                module.requires_grad_(False)

    def _prefix(self, index: int | str) -> str:
        return f"{self._skeleton.blocks_name}.{index}{'.' if index != '' else ''}"

    def _read(self, index: int) -> Mapping[str, Tensor]:
        prefix = self._prefix(index)
        names = [name for name in self._skeleton.routes if name.startswith(prefix)]
        return self._skeleton.read(self._weights, names, self.device, ahead=True)

    @torch.no_grad()
    def _note(self, block: Block) -> None:
        """Note what a block leaves on the probe, where a later one reads it."""
        hidden_BTD = self.inspector.hidden().to(self.dtype)
        self.front.note(block.index, block.module, hidden_BTD)


CHECKED = (2, 24)
"""Windows and tokens of the batch on which a stream is compared with the whole model."""


@torch.no_grad()
def self_check(model: BlockModel, whole: Any) -> float:
    """Return how far the stream's logits are from the whole model's, as a share of the largest."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(0, vocabulary, CHECKED, generator=generator).to(model.device)
    hidden_BTD = model.embed(tokens_BT)
    for block in model.blocks():
        hidden_BTD = block.forward(hidden_BTD)
    model.front.forget()
    streamed_BTV = model.logits(hidden_BTD).float()
    whole_BTV: Tensor = whole.to(model.device)(input_ids=tokens_BT, use_cache=False).logits.float()
    scale = float(whole_BTV.abs().max()) or 1.0
    return float((streamed_BTV - whole_BTV).abs().max()) / scale
