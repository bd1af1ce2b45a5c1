"""A model's own front and head, run with stubs in place of its blocks.

The front tells what enters the first block and what every block is called with, once per shape of
batch. On a short batch, the probe, it also tells what links the blocks, and what each leaves there
for later ones is noted as they are read.

What can be done to each block: which linears read the same input, folds and rotations.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qaudit.checkpoints.configuration import unreadable
from qaudit.core.linears import FoldSource
from qaudit.errors import ModelError, is_out_of_memory
from qaudit.model.groups import Group
from qaudit.model.links import (
    GIVEN,
    Arguments,
    Beside,
    Form,
    Links,
    Recorded,
    Shape,
    Stub,
    Tape,
    beside,
    form_of,
    leave,
)
from qaudit.model.skeleton import Skeleton
from qaudit.model.structure import (
    Fold,
    Heads,
    all_numbers,
    candidates,
    find_structure,
    is_linear,
    must_be_linear,
    residual_rotations,
    true_folds,
    value_rotations,
)

PROBE: Shape = (1, 16)
"""The shape of the short batch on which blocks are looked at."""


@dataclass(eq=False)
class Inspector:
    """Looks at the blocks of one model, and remembers what it proved of each kind of block.

    Every block is run on a short random batch before it is used: once to see which linears read
    the same input, and twice a fold in an fp32 copy, to prove that the folds of the first block
    of its kind leave this very block unchanged. What does not hold is dropped and noted, so that
    a scheme can only ever be offered a scale that the model can absorb.
    """

    width: int  # of the hidden states
    heads: Heads
    dtype: torch.dtype
    device: torch.device
    rotations: bool = False  # whether a scheme asks which outputs can be rotated
    left: dict[str, str] = field(default_factory=dict)  # linears left as they are, and why
    _proved: dict[Any, tuple[Fold, ...]] = field(default_factory=dict)

    def look(
        self, index: int, block: nn.Module, arguments: Arguments
    ) -> tuple[tuple[Group, ...], tuple[str, ...]]:
        """Return a block's groups in order of execution, and notes on folds that do not hold.

        Experts of a layer are alike: folds are proved on the first, in a copy that has no other.
        """
        hidden_BTD = self.hidden()
        # Numbers that contradict each other show here at last.
        contradicts = "numbers in `config.json` may contradict each other"
        with unreadable(f"block {index} cannot be run", contradicts, ModelError):
            entering_BTD = hidden_BTD.to(self.dtype)
            structure = find_structure(block, lambda m: arguments.call(m, entering_BTD))
        must_be_linear(block, f"block {index}", structure)
        self.left |= structure.left
        exact, called = copy.deepcopy(block).float(), arguments.to_float32()
        sampled = dict.fromkeys(map(structure.sampled, structure.readers))
        sample = replace(structure, readers=tuple(sampled))

        def run(module: nn.Module) -> Tensor:
            return all_numbers(called.call(module, hidden_BTD))

        kind = (sample.readers, *(tuple(p.shape) for p in exact.parameters()))
        guesses: Iterable[Fold] = self._proved.get(kind, ())
        if kind not in self._proved:
            must_be_causal(index, exact, called, hidden_BTD)
            guesses = candidates(exact, sample, self.heads)
        folds = true_folds(exact, run, list(guesses))
        lost = [fold for fold in self._proved.setdefault(kind, folds) if fold not in folds]
        fold_of, rotated = {fold.linears: fold for fold in folds}, None
        if self.rotations:
            rotated = value_rotations(exact, run, folds, self.heads.width) | residual_rotations(
                exact, partial(called.call, exact), hidden_BTD, sample.readers, folds
            )
        groups = []
        for linears in structure.readers:
            expert, alike = structure.experts.get(linears), structure.sampled(linears)
            index_C = source = rows = None
            if rotated is not None:
                named = zip(linears, alike, strict=True)
                rows = {own: rotated[like] for own, like in named if like in rotated}
            if (fold := fold_of.get(alike)) is not None:
                is_norm = not is_linear(block.get_submodule(fold.source))
                absorbs = fold.source if expert is None else expert.before[-1]
                source = FoldSource(absorbs, is_norm, fold.offset, fold.one_plus)
                index_C = fold.index_C.to(self.device)
            groups.append(Group("+".join(linears), linears, index_C, source, rows, expert))
        notes = tuple(f"block {index}: scale not folded, {fold.label}" for fold in lost)
        return tuple(groups), notes

    def hidden(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(*PROBE, self.width, generator=generator).to(self.device)


def must_be_causal(index: int, block: nn.Module, arguments: Arguments, hidden_BTD: Tensor) -> None:
    """Refuse a block in which a position can see one after it."""
    half = hidden_BTD.shape[1] // 2
    changed_BTD = hidden_BTD.flip(-1)  # a LayerNorm removes what is added to all
    changed_BTD[0, :half] = hidden_BTD[0, :half]
    before = arguments.call(block, hidden_BTD)[0, :half]
    after = arguments.call(block, changed_BTD)[0, :half]
    if not torch.allclose(before, after, rtol=1e-4, atol=1e-4):
        raise ModelError(
            f"in block {index} a token sees tokens after it",
            hint="only decoder language models have a next-token loss to audit",
        )


_STRANGE = (IndexError, TypeError, ValueError, AttributeError, RuntimeError, KeyError)
"""What a model may raise when stubs are not what it expects of its blocks."""
_HINT = "only models whose blocks are linked by tensors can be streamed"


class Front:
    """What is outside of a model's blocks, and what these are called with."""

    def __init__(self, skeleton: Skeleton, device: torch.device) -> None:
        """Put stubs in place of the blocks."""
        self._skeleton, self._device = skeleton, device
        self._vocabulary = int(skeleton.model.config.get_text_config().vocab_size)
        self._model_type = str(skeleton.model.config.model_type)
        self._recorded: dict[Shape, dict[int, Arguments]] = {}
        self._form: Form | None = None  # of hidden states between blocks
        self._left: dict[int, Beside] = {}  # on the probe, before each block
        self.links = Links()
        self._set_stubs(returns=0)

    def _set_stubs(self, *, returns: int) -> None:
        blocks = self._skeleton.blocks
        self._tape = Tape(len(blocks), returns=returns)
        stubs = [Stub(i, block, self._tape) for i, block in enumerate(blocks)]
        parent, _, attribute = self._skeleton.blocks_name.rpartition(".")
        setattr(self._skeleton.model.get_submodule(parent), attribute, nn.ModuleList(stubs))

    @torch.no_grad()
    def find_links(self) -> int:
        """Find what links the blocks beside hidden states; return the width of these."""
        tokens_BT = torch.arange(PROBE[1])[None] % self._vocabulary
        failures: list[Exception] = []
        for returns in range(4):  # values of this family's blocks: hidden states and others
            self._set_stubs(returns=returns)
            try:
                hidden, first = self._play(tokens_BT)
                _, other = self._play((tokens_BT * 7 + 5) % self._vocabulary)
            except (ModelError, *_STRANGE) as error:
                if is_out_of_memory(error):
                    raise
                failures.append(error)
                continue
            self._form = form_of(hidden, PROBE)
            self.links = Links.of(first, other, lambda: self._moved(tokens_BT))
            hidden_BTD, self._recorded[PROBE] = self._settled(hidden, first)
            self._left = {0: beside(hidden_BTD)}
            if self._left[0] and not torch.equal(
                *(self.logits(hidden_BTD[:, :1], token=token) for token in (0, 1))
            ):
                raise ModelError(
                    f"the head of a `{self._model_type}` reads more than the last block returns",
                    hint=_HINT,
                )
            return hidden_BTD.shape[-1]
        raise ModelError(
            f"the blocks of a `{self._model_type}` cannot stand alone: {failures[0]}", hint=_HINT
        ) from failures[0]

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return what enters the first block, and note what blocks are called with."""
        batch, length = tokens_BT.shape
        hidden_BTD, self._recorded[batch, length] = self.record(tokens_BT)
        return hidden_BTD

    def record(self, tokens_BT: Tensor, **options: Tensor) -> tuple[Tensor, dict[int, Arguments]]:
        """Return what enters the first block, and what blocks are called with."""
        return self._settled(*self._play(tokens_BT, **options))

    def logits(self, hidden_BTD: Tensor, *, token: int = 0) -> Tensor:
        """Run everything after the last block; the value of `token` makes no difference."""
        batch, length, width = hidden_BTD.shape
        # Every position becomes a sequence of its own: heads do not mix positions, and then the
        # model runs on as many single tokens. Those only have to exist; the last stub hands on
        # hidden states of its own.
        played_N1D = hidden_BTD.to(self._device).reshape(-1, 1, width)
        tokens_N1 = torch.full((len(played_N1D), 1), token, device=self._device)
        self._tape.played_BTD = played_N1D if self._form is None else self._form.full(played_N1D)
        try:
            out = self._skeleton.model(input_ids=tokens_N1, use_cache=False, return_dict=True)
        finally:
            self._tape.played_BTD = None
        return out.logits.reshape(batch, length, -1)  # type: ignore[no-any-return]

    def sees_all(self, length: int) -> bool:
        """Return whether each of so many tokens sees all before it, in every block."""
        _, recorded = self.record(torch.zeros(1, length, dtype=torch.long))
        causal_TT = torch.ones(length, length, dtype=torch.bool, device=self._device).tril()
        return all(
            bool(((mask if mask.dtype == torch.bool else mask == 0) == causal_TT).all())
            for arguments in recorded.values()
            for mask in arguments.leaves
            if isinstance(mask, Tensor) and mask.shape[-2:] == (length, length)
        )

    def forget(self) -> None:
        """Drop what was recorded for all shapes of batches."""
        self._recorded = {PROBE: self._recorded[PROBE]}

    def arguments(self, index: int, shape: Shape) -> Arguments:
        if shape not in self._recorded:
            raise ModelError(
                f"a batch of shape {list(shape)} reached block {index} and was never embedded",
                hint="please report this",
            )
        return self._recorded[shape][index]

    def on_probe(self, index: int) -> Arguments:
        """Return what a block is called with on the probe, once those before it were noted."""
        return replace(self._recorded[PROBE][index], beside=self._left.get(index, {}))

    def is_noted(self, index: int) -> bool:
        """Return whether what a block leaves for later ones is noted, if it does."""
        return index + 1 in self._left or not self.links.later(index)

    def note(self, index: int, module: nn.Module, hidden_BTD: Tensor) -> None:
        """Note what a block leaves on the probe, where a later one reads it."""
        if self.links.later(index):
            self._left[index + 1] = beside(self.on_probe(index).call(module, hidden_BTD))

    def numbers_beside(self, index: int) -> int:
        """Return how many numbers of a token wait beside hidden states before a block."""
        given, tensors = self.links.given(index), self._left.get(index, {})
        waiting = [name for name in tensors if name in given or not name.startswith(GIVEN)]
        return sum(tensors[name].numel() for name in waiting) // math.prod(PROBE)

    def _settled(self, hidden: Tensor, recorded: Recorded) -> tuple[Tensor, dict[int, Arguments]]:
        arguments, given = self.links.settle(recorded, self._form)
        return leave(hidden if self._form is None else self._form.flat(hidden), given), arguments

    def _play(self, tokens_BT: Tensor, **options: Tensor) -> tuple[Tensor, Recorded]:
        """Run the model without its head."""
        model = self._skeleton.model
        inside = self._skeleton.blocks_name.startswith(f"{model.base_model_prefix}.")
        headless = model.base_model if inside else model
        input_ids = tokens_BT.to(self._device, torch.long)
        headless(input_ids=input_ids, use_cache=False, return_dict=True, **options)
        return self._tape.rewind()

    def _moved(self, tokens_BT: Tensor) -> Recorded:
        """Return what blocks are called with where each returns other hidden states."""
        self._tape.moves = True
        try:
            return self._play(tokens_BT)[1]
        finally:
            self._tape.moves = False
