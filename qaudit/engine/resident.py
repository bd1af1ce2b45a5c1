"""The slow way, for a model whose blocks cannot be run one at a time: whole, and in memory.

Some models link their blocks by more than hidden states (shared caches, inputs per layer).
They are run as the library runs them. A scheme quantizes the blocks in place, first to last,
each calibrated by a pass of the whole model; then the whole model is evaluated and its weights
are put back. That costs the memory of a model and, for a scheme that calibrates, a pass of the
calibration set per block. What is given up is said in a note: a block's groups are calibrated
together instead of one after another, and AWQ's scales are not folded, because no fold can be
proved on a block that does not run alone. To compare a scheme with full precision, every window
goes through the model twice, with its weights as they were and quantized: two models do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qaudit.core.fidelity import ComparedRows, Reference, losses
from qaudit.core.linears import Inputs, Quantized
from qaudit.core.rows import row_parts
from qaudit.core.scheme import NO_CACHE, Calibration, Scheme
from qaudit.engine.batches import Batch
from qaudit.engine.block_pass import Progress
from qaudit.engine.gathering import Captured, Read, capture_inputs, visited
from qaudit.engine.items import make_item_batches, option_sums
from qaudit.engine.perturbation import perturbed, perturbed_inputs
from qaudit.engine.read_out import chosen, rows_of
from qaudit.engine.routing import EVALUATION, BatchPlace, RoutingWatch
from qaudit.engine.streams import Observer
from qaudit.engine.tally import Tally, timed
from qaudit.engine.tokens import REFERENCE, Feed
from qaudit.errors import ModelError
from qaudit.model.blocks import Block
from qaudit.model.experts import Routed, unfuse
from qaudit.model.groups import ExpertOptions, Group
from qaudit.model.structure import find_structure, must_be_linear, notes_of_left
from qaudit.model.tape import hidden_keyword
from qaudit.types import FULL_PRECISION

NOTE = (
    "run whole, not block by block: a block's groups are calibrated together, "
    "and scales are not folded"
)
NOTE_GROUPS = "learned on the products of each group of linears, not on the output of a block"


@torch.no_grad()
def run_resident(
    model: Any,
    blocks: Sequence[nn.Module],
    feed: Feed,
    schemes: Sequence[Scheme],
    progress: Progress = lambda done, total, what: None,
    observe: Observer = lambda scheme, linears, quantized: None,
) -> Mapping[str, Tally]:
    for scheme in schemes:
        if scheme.kv != NO_CACHE:
            raise ModelError(
                f"`{scheme.short}` rounds keys and values block by block, and this model runs "
                "whole",
                hint=f"leave `kv={scheme.kv}` out for this model",
            )
    if feed.experts.replays:
        raise ModelError(
            "`--routing reference` replays the choice of experts block by block, and this model "
            "runs whole",
            hint="leave `--routing reference` out for this model",
        )
    wrapped = tuple(_wrap(model, i, blocks, feed.experts) for i in range(len(blocks)))
    routes = RoutingWatch(feed.evaluation)
    whole = _Whole(model, wrapped, feed, routes)
    tallies = {FULL_PRECISION: Tally(), **{scheme.spec: Tally() for scheme in schemes}}
    if feed.compared and feed.perturbed:
        tallies[REFERENCE] = Tally()
        whole.evaluate(tallies[REFERENCE], original=True)
    if feed.full_precision or (feed.compared and schemes and not feed.perturbed):
        full = tallies[FULL_PRECISION]
        with timed(model.device, full):
            whole.evaluate(full, compared=feed.compared and feed.perturbed)
    shared = whole.full_precision_inputs(schemes)
    for k, scheme in enumerate(schemes):
        progress(k, len(schemes), scheme.short)
        with timed(model.device, tallies[scheme.spec]):
            whole.quantize(scheme, shared, tallies[scheme.spec], observe)
            whole.evaluate(tallies[scheme.spec], compared=feed.compared)
            for block in whole.blocks:
                tallies[scheme.spec].note(*block.notes)
                block.restore()
            tallies[scheme.spec].note_experts(feed.experts)
    for tally in tallies.values():
        tally.note(NOTE)
    return tallies


@dataclass(frozen=True, eq=False)
class _Whole:
    model: Any
    blocks: tuple[Block, ...]
    feed: Feed
    routes: RoutingWatch

    def evaluate(self, tally: Tally, *, compared: bool = False, original: bool = False) -> None:
        """Read out every evaluation batch, one window at a time."""
        logits = self._original_logits if original else self._logits
        with ExitStack() as stack:
            for block in self.blocks if compared else ():
                stack.enter_context(self.routes.watched(block))
            for k, batch in enumerate(self.feed.evaluation):
                count, length = batch.tokens_BT.shape
                windows = []
                for row in range(count):
                    with self.routes.at(BatchPlace(EVALUATION, k, row)):
                        window = batch.part(slice(row, row + 1))
                        windows += self._window(window, logits, tally, compared=compared)
                tally.read((count, length), windows)
        tally.options = self._options()

    def _window(
        self, window: Batch, logits: Callable[[Tensor], Tensor], tally: Tally, *, compared: bool
    ) -> list[ComparedRows]:
        tokens_1T, original_TV = window.tokens_BT, None
        if compared:
            with self.routes.of(tally, is_full=True):
                original_TV = self._original_logits(tokens_1T)[0, :-1]
        with self.routes.of(tally, is_full=False):
            logits_TV = logits(tokens_1T)[0, :-1]
        self.routes.forget()
        targets_T = tokens_1T[0, 1:].to(logits_TV.device, torch.long)
        read = []
        for part in row_parts(logits_TV):
            targets_N = targets_T[part]
            if original_TV is None and not self.feed.compared:
                compared_rows = ComparedRows(losses(logits_TV[part], targets_N))
            elif original_TV is None:  # what others are compared with
                compared_rows = Reference.of(logits_TV[part], targets_N).rows
            else:
                reference = Reference.of(original_TV[part], targets_N)
                compared_rows = rows_of(tally, reference, logits_TV[part], targets_N)
            wrote = original_TV is None
            read.append(
                chosen(window, part, compared_rows, logits_TV[part], targets_N, wrote=wrote)
            )
        return read

    def _original_logits(self, tokens_BT: Tensor) -> Tensor:
        with self._as_it_was():
            return self._run(tokens_BT)

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        with ExitStack() as stack:
            for block in self.blocks:
                stack.enter_context(block.as_it_was())
            yield

    def _options(self) -> tuple[np.ndarray, np.ndarray]:
        nll, greedy = list[Tensor](), list[Tensor]()
        batches = make_item_batches(self.feed.items, branches=False)
        for batch in batches:
            logits_NV = torch.cat([self._logits(one_T[None])[0] for one_T in batch.tokens_BT])
            logits_QV = logits_NV[batch.rows_Q.to(logits_NV.device)].float()
            targets_Q = batch.targets_Q.to(logits_NV.device)
            nll.append(nn.functional.cross_entropy(logits_QV, targets_Q, reduction="none").cpu())
            greedy.append((logits_QV.argmax(1) == targets_Q).cpu())
        return option_sums(batches, nll, greedy, sum(map(len, self.feed.items)))

    def _logits(self, tokens_BT: Tensor) -> Tensor:
        with ExitStack() as stack:
            for block in self.blocks if self.feed.perturbed else ():
                enter = partial(_perturb, block.index)
                stack.enter_context(block.module.register_forward_pre_hook(enter, with_kwargs=True))
            return self._run(tokens_BT)

    def _run(self, tokens_BT: Tensor) -> Tensor:
        out = self.model(input_ids=tokens_BT.to(self.model.device), use_cache=False)
        logits_BTV: Tensor = out.logits
        return logits_BTV

    def full_precision_inputs(self, schemes: Sequence[Scheme]) -> list[Captured | None]:
        """Return each block's statistics in the unquantized model, if a scheme wants them."""
        if not any(s.calibration is Calibration.FULL_PRECISION for s in schemes):
            return [None for _ in self.blocks]
        return [self._capture(block) for block in self.blocks]

    def quantize(
        self, scheme: Scheme, shared: Sequence[Captured | None], tally: Tally, observe: Observer
    ) -> None:
        for block, inputs in zip(self.blocks, shared, strict=True):
            if scheme.calibration.has_stream:
                inputs = self._capture(block, both=scheme.calibration is Calibration.BOTH_STREAMS)
            if scheme.calibration is Calibration.WHOLE_BLOCK:
                tally.note(NOTE_GROUPS)
            options = block.experts
            if scheme.experts_see_all:
                block.experts = options.on_all
            for group in block.groups:
                moments = self._inputs(inputs, group, block)
                linears = block.linears(group, moments)
                linears = replace(linears, column_loop=self.feed.column_loop)
                quantized: Quantized = scheme.quantize(linears)
                tally.count(quantized)
                if moments is not None and moments.seen is not None and group.expert is not None:
                    tally.saw(block.index, group.expert, moments.seen)
                if (said := observe(scheme, linears, quantized)) is not None:
                    tally.note(said)
                block.install(quantized)
            block.experts = options

    def _inputs(self, captured: Captured | None, group: Group, block: Block) -> Inputs | None:
        inputs = None if captured is None else captured.get(group)
        if inputs is None or not self.feed.perturbed:
            return inputs
        return perturbed_inputs(inputs, block.index)

    def _capture(self, block: Block, *, both: bool = False) -> Captured:
        if not both:
            return capture_inputs(block, self._calibration(), forward=self._logits)
        full = [self._original_inputs(block, tokens_BT) for tokens_BT, _ in self._calibration()]
        return capture_inputs(
            block,
            self._calibration(),
            forward=self._logits,
            beside=lambda group, k: full[k][group.door],
        )

    def _original_inputs(self, block: Block, tokens_BT: Tensor) -> dict[str, Tensor]:
        """Return the input of each door of a block in full precision."""
        given: dict[str, Tensor] = {}

        def keep(door: str, read: Read) -> None:
            given[door] = read.hidden_NH if isinstance(read, Routed) else read

        with self._as_it_was(), visited(block, keep):
            self._logits(tokens_BT)
        return given

    def _calibration(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.feed.calibration:
            yield batch.tokens_BT, batch.valid_BT()


def _wrap(model: Any, index: int, blocks: Sequence[nn.Module], experts: ExpertOptions) -> Block:
    """See a block of the whole model as schemes see one, without a way to run it alone."""
    module = blocks[index]
    unfuse(module)
    probe_BT = torch.arange(16, device=model.device)[None]
    structure = find_structure(
        module, lambda _: model(input_ids=probe_BT, use_cache=False).logits, gates=experts.gates
    )
    must_be_linear(module, f"block {index}", structure)
    groups = tuple(
        Group("+".join(linears), linears, expert=structure.experts.get(linears))
        for linears in structure.readers
    )
    notes = notes_of_left(structure.left)
    block = Block(index, module, groups, notes, partial(_cannot_run_alone, index), len(blocks))
    block.experts = experts
    return block


def _perturb(
    index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (perturbed(args[0], index), *args[1:]), kwargs
    name = hidden_keyword(kwargs)
    return args, {**kwargs, name: perturbed(kwargs[name], index)}


def _cannot_run_alone(index: int, shape: tuple[int, int]) -> Any:
    raise AssertionError(f"block {index} of a resident model was asked to run alone")
