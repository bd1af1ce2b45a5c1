"""Which bits each linear of a mixture gets: chosen before the pass, from calibration text alone.

Some windows of calibration text go forwards through the unquantized model, and what enters each
block is kept; then blocks are read a second time, the last one first, and gradients go backwards.
Each linear is quantized in every width by the moments of half of the windows, and the error is
scored on the other half (`qaudit/core/mixture.py`): scored where it was fitted, GPTQ's error looked
half as large as it was. Experts are scored by the tokens routed to them. Gradients of what blocks
leave beside hidden states for later blocks are left out.

A table is kept as a file, which decides: a pass that begins again, an export and a second scan of
the same text use the same one. No evaluation document is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from qaudit.core.mixture import (
    FITTED,
    FUSED,
    NO_TABLE,
    SCORED,
    Entry,
    Mixture,
    Options,
    Table,
    added_nats,
    any_expert,
    cheapest,
)
from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import Scheme
from qaudit.engine.batches import Batch
from qaudit.engine.gathering import capture_inputs
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.tokens import Feed
from qaudit.errors import SchemeError
from qaudit.model.blocks import Block, BlockModel, Group
from qaudit.model.links import beside, leave
from qaudit.saved.exports import read_table, write_table

Progress = Callable[[int, int, str], None]

_START = "mixing/embedded"

Errors = list[Tensor]
"""The gradient behind a block, of each scored batch."""


class Scored(NamedTuple):
    """What a linear takes in each width."""

    block: int
    name: str
    fused: tuple[str, str]  # what it shares bits with, and its row in the table, where it is tied
    weights: int
    options: Mapping[int, tuple[int, float]]  # by bits: bits of storage, and nats per token


Scores = dict[tuple[object, ...], Sequence[Scored]]
"""Each linear is rounded once for all mixtures that differ in budget, members and ties alone."""


def table_of(
    spec: str,
    model: BlockModel,
    feed: Feed,
    states: HiddenStates,
    progress: Progress,
    scores: Scores,
) -> Table:
    """Return the table in the file of a mixture; make both where there is none."""
    scheme, path = parse_scheme(spec), feed.tables[spec]
    assert isinstance(scheme, Mixture), "another scheme has a table"
    if path.is_file():
        return read_table(path)
    if scheme.table != NO_TABLE:
        raise SchemeError(
            f"the table of `{scheme.short}` is not in `{path.parent}`",
            hint="name its file, as table=table.json",
        )
    rounding = _rounding(scheme)
    if rounding not in scores:
        alike = [m for m in map(parse_scheme, feed.tables) if _rounding(m) == rounding]
        widths = {bits for m in alike if isinstance(m, Mixture) for bits in m.widths}
        scores[rounding] = scores_of(scheme, sorted(widths), model, feed, states, progress)
    options, named = tied(scores[rounding], scheme)
    weights = sum(linear.weights for linear in scores[rounding])
    least = sum(min(stored for stored, _ in option.values()) for option in options.values())
    if least > scheme.budget * weights:
        raise SchemeError(
            f"linears of {scheme.widths[0]} bits take {least / weights:.4g} bits per weight here, "
            f"and the budget is {scheme.budget:g}",
            hint=f"use budget={least / weights + 0.25:.2f} or more, larger groups, or narrower "
            "members",
        )
    bits_of = cheapest(options, scheme.budget * weights)
    rows: dict[str, list[str]] = defaultdict(lambda: ["0"] * model.num_blocks)
    for (block, row), entry in named.items():
        rows[row][block] = str(bits_of[entry])
    table = {name: "".join(row) for name, row in rows.items()}
    write_table(table, path)
    return table


def _rounding(scheme: Scheme) -> tuple[object, ...]:
    """Return what two mixtures have in common if they round a linear of some bits alike."""
    chosen = {field.name for field in fields(Mixture)} - {"kv"}
    return type(scheme), *(getattr(scheme, f.name) for f in fields(scheme) if f.name not in chosen)


def tied(
    scores: Sequence[Scored], scheme: Mixture
) -> tuple[Options, Mapping[tuple[int, str], Entry]]:
    """Return what each entry of a table takes in each width, and the entry of each of its rows."""
    options: dict[Entry, dict[int, tuple[int, float]]] = defaultdict(dict)
    named: dict[tuple[int, str], Entry] = {}
    for linear in scores:
        shared, row = linear.fused if scheme.tie == FUSED else (linear.name, linear.name)
        of_all_blocks = "*" in row and scheme.one_width_of_experts
        entry = (-1, "experts") if of_all_blocks else (linear.block, shared)
        named[linear.block, row] = entry
        for bits in scheme.widths:
            before = options[entry].get(bits, (0, 0.0))
            stored, nats = linear.options[bits]
            options[entry][bits] = before[0] + stored, before[1] + nats
    return dict(sorted(options.items())), dict(sorted(named.items()))


def scores_of(
    scheme: Mixture,
    widths: Sequence[int],
    model: BlockModel,
    feed: Feed,
    states: HiddenStates,
    progress: Progress,
) -> Sequence[Scored]:
    """Return what each linear takes in each width, of the last block first."""
    fitted, scored = split(feed.calibration)
    batches, groups = [*fitted, *scored], list[tuple[Group, ...]]()
    for k, batch in enumerate(batches):
        states.put(_START, k, model.embed(batch.tokens_BT.to(model.device)))
    for block in model.blocks():
        groups.append(block.groups)
        for k in range(len(batches)):
            enter_BTD = states.entering(f"mixing/{block.index}", _START, block, k)
            states.put(f"mixing/{block.index + 1}", k, block.forward(enter_BTD))
    last, first = f"mixing/{model.num_blocks}", len(fitted)
    errors = [_of_head(model, states.get(last, first + k), b) for k, b in enumerate(scored)]
    linears: list[Scored] = []
    for index in reversed(range(model.num_blocks)):
        progress(0, model.num_blocks, f"{scheme.short}, bits of block {index}")
        block = model.load(index, groups[index])
        block.experts = model.experts
        enter = partial(states.entering, f"mixing/{index}", _START, block)
        members = {bits: scheme.member(bits) for bits in widths}
        for group, name, options in _of_block(members, block, feed, batches, errors, enter):
            count, shared = block.weight(name).numel(), (group.name, name)
            if (part := group.expert) is not None:
                shared = f"{part.module} {'down' if part.is_down else 'first'}", any_expert(name)
            linears.append(Scored(index, name, shared, count, options))
        block.release()
        states.drop(f"mixing/{index + 1}")
    states.drop(_START)
    states.drop_given(_START, model.links.passed(model.num_blocks))
    return linears


def split(calibration: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Return windows to quantize on, and others to score on, evenly from short and long ones."""
    whole = sum(sum(batch.lengths) for batch in calibration)
    step = max(1, whole // (2 * FITTED))
    halves: tuple[list[Batch], list[Batch]] = ([], [])
    tokens = [0, 0]
    for batch in calibration[::step]:
        for rows in (slice(0, None, 2), slice(1, None, 2)):
            if batch.windows[rows]:
                into = 0 if tokens[0] <= tokens[1] else 1
                if tokens[into] < (FITTED, SCORED)[into]:
                    halves[into].append(batch.of_rows(rows))
                tokens[into] += sum(batch.lengths[rows])
    return halves if halves[1] else (halves[0], halves[0])


def _of_head(model: BlockModel, hidden_BTD: Tensor, batch: Batch) -> Tensor:
    """Return the gradient of the loss of labels that the model itself draws."""
    draw = torch.Generator(model.device).manual_seed(0)
    width = hidden_BTD.shape[-1]
    error_ND = torch.zeros_like(hidden_BTD).reshape(-1, width)
    hidden_ND = hidden_BTD.detach().to(model.device).reshape(-1, width)
    rows_N = batch.valid_BT().flatten().nonzero().squeeze(1).to(model.device)
    for some_N in rows_N.split(model.head_rows):
        with torch.enable_grad():
            read_ND = hidden_ND[some_N].requires_grad_()
            logits_NV = model.logits(read_ND[None])[0].float()
            drawn_N = torch.multinomial(logits_NV.detach().softmax(-1), 1, generator=draw)[:, 0]
            nll = torch.nn.functional.cross_entropy(logits_NV, drawn_N, reduction="sum")
            (error_ND[some_N],) = torch.autograd.grad(nll, read_ND)
    return error_ND.view_as(hidden_BTD)


def _of_block(
    members: Mapping[int, Scheme],
    block: Block,
    feed: Feed,
    batches: Sequence[Batch],
    errors: Errors,
    enter: Callable[[int], Tensor],
) -> Iterator[tuple[Group, str, Mapping[int, tuple[int, float]]]]:
    """Yield what each linear takes in each width; carry gradients to the block's entrance."""

    def entering(some: range) -> Iterator[tuple[Tensor, Tensor]]:
        return ((enter(k), batches[k].valid_BT()) for k in some)

    scored = range(len(batches) - len(errors), len(batches))
    inputs = capture_inputs(block, entering(range(scored.start)))
    moments = capture_inputs(block, entering(scored))
    fisher = _backwards(block, [enter(k) for k in scored], errors)
    tokens = sum(sum(batches[k].lengths) for k in scored)
    for group in block.groups:
        linears = replace(block.linears(group, inputs.take(group)), column_loop=feed.column_loop)
        moment = moments.take(group)
        read = moment.tokens if moment.seen is None else moment.seen
        options: dict[str, dict[int, tuple[int, float]]] = {name: {} for name in group.linears}
        for bits, member in members.items():
            quantized = member.quantize(linears)
            for name, weight_RC in linears.weights.items():
                nats = 0.0
                if read and name in fisher:
                    change_RC = quantized.weights[name].float() - weight_RC.float()
                    per_token_CC = moment.gram_CC / tokens
                    nats = added_nats(change_RC, per_token_CC, fisher[name] / read)
                options[name][bits] = quantized.stored[name].nbits, nats
        for name in group.linears:
            yield group, name, options[name]


def _backwards(block: Block, entering: Sequence[Tensor], errors: Errors) -> dict[str, Tensor]:
    """Return the sums of g^2 of each linear's rows; replace `errors` by those before the block.

    Padding has no gradient: nothing that is scored reads it.
    """
    fisher: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    hooks = [
        block.module.get_submodule(name).register_forward_hook(
            lambda _, given, out, name=name: outputs.update({name: out})
        )
        for group in block.groups
        for name in group.linears
    ]
    for k, hidden_BTD in enumerate(entering):
        outputs.clear()
        with torch.enable_grad():
            read_BTD = hidden_BTD.detach().to(errors[k].device).requires_grad_()
            out_BTD = block.forward(leave(read_BTD, beside(hidden_BTD)))
            wanted = [read_BTD, *outputs.values()]
            errors[k], *gradients = torch.autograd.grad(
                out_BTD, wanted, errors[k], allow_unused=True
            )
        for name, gradient in zip(outputs, gradients, strict=True):
            if gradient is not None:
                square_R = gradient.float().square().flatten(0, -2).sum(0)
                fisher[name] = fisher[name] + square_R if name in fisher else square_R
    for hook in hooks:
        hook.remove()
    return fisher
