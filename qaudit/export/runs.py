"""An exported folder as it runs: loss and KL divergence on the documents of an audit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qaudit.checkpoints.places import folder_of
from qaudit.core import statistics
from qaudit.core.fidelity import Reference, Rows
from qaudit.downloads.downloads import Downloads
from qaudit.engine.batches import make_batches
from qaudit.engine.evidence import evidence_of
from qaudit.engine.measure import open_weights
from qaudit.engine.read_out import rows_of
from qaudit.engine.streams import Feed, Tally
from qaudit.errors import ModelError, is_out_of_memory
from qaudit.executors.ready import make_ready
from qaudit.export.choice import Choice
from qaudit.export.runtimes import Runtime, loaded
from qaudit.model.head import chunk_rows
from qaudit.model.skeleton import load_whole
from qaudit.types import Corpus, Evidence, Interval, Watch

_LOGITS = 2**27  # of one call of a model


@dataclass(frozen=True)
class Run:
    """What was measured, as it was audited and as it runs, on the same documents."""

    audited: Interval  # loss, nats per token
    running: Interval
    difference: Interval
    audited_kl: float | None  # nats per token
    running_kl: float | None


def run(choice: Choice, audited: Evidence, folder: Path, runtime: Runtime, watch: Watch) -> Run:
    """Load an exported folder and the original, and measure both on the audit's documents."""
    ready = make_ready(choice.plan, choice.options, choice.hub)
    machine, subject = ready.machine, choice.subject
    with (
        Downloads(choice.hub, (subject,)) as downloads,
        downloads.ready(subject) as merged,
    ):
        weights = merged or open_weights(
            subject, allow_pickle=choice.options.allow_pickle, folder=downloads.folder
        )
        original = load_whole(folder_of(subject.first), weights, machine.dtype)
    model = loaded(runtime, folder, machine.dtype)
    try:
        evidence = _evidence(model, original, ready.corpus, watch)
    except RuntimeError as error:  # of a kernel that does not take these shapes
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:160]
        raise ModelError(
            f"`{runtime.name}` loads `{folder}` and cannot run it: {reason}",
            hint="export another scheme or format for it",
        ) from error
    tokens = evidence.tokens
    return Run(
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


@torch.no_grad()
def _evidence(model: Any, original: Any, corpus: Corpus, watch: Watch) -> Evidence:
    feed = Feed((), make_batches(corpus.evaluation, corpus.protocol.context))
    tally, full = Tally(), Tally()
    for number, batch in enumerate(feed.evaluation):
        watch.count("batches", number, len(feed.evaluation))
        pairs = list(_compared(model, original, batch.tokens_BT, tally))
        count, length = batch.tokens_BT.shape
        full.read((count, length), [rows for rows, _ in pairs])
        tally.read((count, length), [rows for _, rows in pairs])
    return evidence_of(corpus, feed, tally, full)


def _compared(
    model: Any, original: Any, tokens_BT: Tensor, tally: Tally
) -> Iterator[tuple[Rows, Rows]]:
    """Yield rows of the original, and those of the model beside them."""
    vocabulary = int(original.config.get_text_config().vocab_size)
    step = max(1, _LOGITS // (tokens_BT.shape[1] * vocabulary))
    rows = chunk_rows(vocabulary, tokens_BT.device)
    for some_BT in tokens_BT.split(step):
        targets_N = some_BT[:, 1:].reshape(-1).long()
        original_NV = _logits(original, some_BT)
        logits_NV = _logits(model, some_BT)
        for start in range(0, len(targets_N), rows):
            part = slice(start, start + rows)
            reference = Reference.of(original_NV[part], targets_N[part])
            compared = rows_of(tally, reference, logits_NV[part], targets_N[part])
            yield Rows(reference.nll_N), compared


def _logits(model: Any, tokens_BT: Tensor) -> Tensor:
    logits_BTV: Tensor = model(input_ids=tokens_BT, use_cache=False).logits
    return logits_BTV[:, :-1].flatten(0, 1)
