"""An exported folder as it runs: loss and KL divergence on the documents of an audit.

Full precision goes through in blocks first, and only its hidden states are kept, in memory up to
a limit and in files past it. Then the folder is loaded in its runtime: the one model that is in
memory as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qaudit.checkpoints.stamps import folder_of
from qaudit.core import statistics
from qaudit.core.fidelity import ComparedRows, Reference, row_parts
from qaudit.downloads.downloads import Downloads
from qaudit.engine.batches import make_batches
from qaudit.engine.block_pass import Route, open_weights, opened_states
from qaudit.engine.evidence import evidence_of
from qaudit.engine.read_out import rows_of
from qaudit.engine.routing import RoutingWatch
from qaudit.engine.tally import Tally
from qaudit.engine.tokens import Feed, Tokens
from qaudit.errors import ModelError, is_out_of_memory
from qaudit.executors.ready import Ready, make_ready
from qaudit.export.choice import ExportChoice
from qaudit.export.runtimes import Loaded, Program, loaded, without_bars
from qaudit.model.proven import pad_until
from qaudit.types import FULL_PRECISION, Corpus, Evidence, Interval, Watch

_LOGITS = 2**27  # of one call of a model


@dataclass(frozen=True)
class RuntimeRun:
    """What was measured, as it was audited and as it runs, on the same documents."""

    audited: Interval  # loss, nats per token
    running: Interval
    difference: Interval
    audited_kl: float | None  # nats per token
    running_kl: float | None

    @property
    def kl_difference(self) -> float | None:
        if self.running_kl is None or self.audited_kl is None:
            return None
        return self.running_kl - self.audited_kl


def run(
    choice: ExportChoice, audited: Evidence, folder: Path, runtime: Program, watch: Watch
) -> RuntimeRun:
    ready = make_ready(choice.plan, choice.options, choice.hub)
    protocol = ready.corpus.protocol
    limit = pad_until([folder])
    feed = Feed((), make_batches(ready.corpus.evaluation, protocol.context, pad_until=limit))
    with _reference(choice, ready, feed, watch) as reference, without_bars():
        model = loaded(runtime, folder, ready.machine.dtype)
        try:
            evidence = _evidence(model, reference, ready.corpus, feed, watch)
        except RuntimeError as error:  # of a kernel that does not take these shapes
            if is_out_of_memory(error):
                raise
            reason = " ".join(str(error).split())[:160]
            raise ModelError(
                f"`{runtime.name}` loads `{folder}` and cannot run it: {reason}",
                hint="export another scheme or format for it",
            ) from error
    tokens = evidence.tokens
    return RuntimeRun(
        statistics.cross_entropy(audited.nll_sum, tokens),
        statistics.cross_entropy(evidence.nll_sum, tokens),
        statistics.outright(evidence.nll_sum, audited.nll_sum, tokens),
        _mean_kl(audited),
        _mean_kl(evidence),
    )


def _mean_kl(evidence: Evidence) -> float | None:
    if evidence.fidelity is None:
        return None
    return float(evidence.fidelity.kl_sum.sum() / evidence.tokens.sum())


@contextmanager
def _reference(choice: ExportChoice, ready: Ready, feed: Feed, watch: Watch) -> Iterator[Tokens]:
    """Send the documents through full precision, block by block."""
    machine, subject = ready.machine, choice.subject
    with (
        opened_states(machine) as states,
        Downloads(choice.hub, (subject,)) as downloads,
        downloads.ready(subject),
    ):
        weights = open_weights(
            subject, allow_pickle=choice.options.allow_pickle, folder=downloads.folder
        )
        route = Route(folder_of(subject.first), weights, machine.dtype, machine.device)
        model, _ = route.streamed()
        routes = RoutingWatch(feed.evaluation)
        tokens = Tokens(model, feed, states, routes)
        with torch.no_grad():
            tokens.embed(calibration=False)
            for block in model.blocks():
                watch.block(block.index, model.num_blocks, "full precision")
                tokens.evaluate(FULL_PRECISION, block)
                tokens.drop_embedded(block.index)
            watch.block(model.num_blocks, model.num_blocks, "full precision")
        yield tokens


@torch.no_grad()
def _evidence(
    model: Loaded, reference: Tokens, corpus: Corpus, feed: Feed, watch: Watch
) -> Evidence:
    tally, full = Tally(), Tally()
    for number, batch in enumerate(feed.evaluation):
        watch.count("batches", number, len(feed.evaluation))
        count, length = batch.tokens_BT.shape
        hidden_BTD = reference.states.get(f"evaluation/{FULL_PRECISION}", number)[:, :-1]
        rows = list(_compared(model, reference, batch.tokens_BT, hidden_BTD, tally))
        tally.read((count, length), _joined([own for own, _ in rows]))
        full.read((count, length), _joined([theirs for _, theirs in rows if theirs is not None]))
    return evidence_of(corpus, feed, tally, full)


def _joined(chunks: Sequence[ComparedRows]) -> dict[str, Tensor]:
    """Return all rows of a batch by name."""
    names = vars(chunks[0]) if chunks else ()
    parts = {name: [getattr(chunk, name) for chunk in chunks] for name in names}
    return {n: torch.cat(rows) for n, rows in parts.items() if all(r is not None for r in rows)}


def _compared(
    model: Loaded,
    reference: Tokens,
    tokens_BT: Tensor,
    hidden_BTD: Tensor,
    tally: Tally,
) -> Iterator[tuple[ComparedRows, ComparedRows | None]]:
    step = max(1, _LOGITS // (tokens_BT.shape[1] * model.vocabulary))
    for start in range(0, len(tokens_BT), step):
        some_BT = tokens_BT[start : start + step].long()
        targets_N = some_BT[:, 1:].reshape(-1)
        if model.losses is not None:
            yield ComparedRows(model.losses(some_BT).reshape(-1).float()), None
            continue
        logits_NV = model.logits(some_BT).flatten(0, 1)
        hidden_ND = hidden_BTD[start : start + step].flatten(0, 1)
        yield from _chunks(reference, hidden_ND, logits_NV, targets_N, tally)


def _chunks(
    reference: Tokens, hidden_ND: Tensor, logits_NV: Tensor, targets_N: Tensor, tally: Tally
) -> Iterator[tuple[ComparedRows, ComparedRows]]:
    """Compare rows of logits with those that full precision's head makes, a few at a time."""
    rows = reference.model.head_rows
    for first in range(0, len(targets_N), rows):
        chunk = slice(first, first + rows)
        own_NV = reference.model.logits(hidden_ND[None, chunk])[0].to(logits_NV.device)
        for part in row_parts(own_NV):
            theirs = Reference.of(own_NV[part], targets_N[chunk][part])
            rows_N = rows_of(tally, theirs, logits_NV[chunk][part], targets_N[chunk][part])
            yield rows_N, ComparedRows(theirs.nll_N)
