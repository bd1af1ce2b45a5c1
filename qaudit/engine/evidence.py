"""Results per token become sums over documents, which is all that intervals need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qaudit.core import histogram
from qaudit.engine.batches import Batch
from qaudit.engine.rollout_evidence import (
    Floats,
    Ints,
    position_edges,
    rollout_evidence,
    sums_by_bin,
)
from qaudit.engine.tally import Tally
from qaudit.engine.tokens import Feed
from qaudit.types import (
    CONFIDENCE_EDGES,
    ROLES,
    ByConfidence,
    Corpus,
    Evidence,
    Fidelity,
    Positions,
    Roles,
    Routing,
    TaskEvidence,
    Window,
)


def evidence_of(
    corpus: Corpus,
    feed: Feed,
    tally: Tally,
    full: Tally | None = None,
    reference: Tally | None = None,
) -> Evidence:
    whole, documents = tally, slice(sum(not batch.is_rollouts for batch in feed.evaluation))
    of_rollouts = feed.evaluation[documents.stop :]
    rollouts = rollout_evidence(corpus, of_rollouts, whole, full, documents.stop)
    feed = replace(feed, evaluation=feed.evaluation[documents])
    tally, full = tally.of_batches(documents), full and full.of_batches(documents)
    reference = reference and reference.of_batches(documents)
    sums, tokens = document_sums(
        feed.evaluation, tally.nll, corpus.evaluation, len(corpus.documents)
    )
    scored = _Scored.of(corpus, feed)
    fidelity = beside = None
    if tally.kl and full is not None:
        fidelity = scored.fidelity(tally, full, tally.kl, tally.same_top)
    if tally.beside and reference is not None:
        beside = scored.fidelity(tally, reference, *map(list, zip(*tally.beside, strict=True)))
    return Evidence(
        document_sha256=tuple(d.sha256 for d in corpus.documents),
        nll_sum=sums,
        tokens=tokens,
        nbytes=np.array([d.nbytes for d in corpus.documents], dtype=np.int64),
        split=tuple(d.split for d in corpus.documents),
        strata=corpus.strata,
        tasks=tuple(_task_evidence(corpus, tally)),
        fidelity=fidelity,
        positions=scored.positions(tally, corpus.protocol.context, compared=fidelity is not None),
        roles=scored.roles(tally, compared=fidelity is not None),
        expert_tokens=_expert_tokens(tally),
        routing=_routing(corpus, tally),
        output_error=scored.output_error(tally),
        reference=beside,
        rollouts=rollouts,
    )


def _routing(corpus: Corpus, tally: Tally) -> Routing | None:
    if not tally.routing:
        return None
    sums = np.zeros((len(tally.routing), 2, len(corpus.documents)))
    for layer, windows in enumerate(tally.routing.values()):
        count = len(corpus.evaluation)  # windows of rollouts come behind
        ids = np.array([w for some, _ in windows for w in some], dtype=np.int64)
        of_windows = torch.cat([sums_2B.cpu() for _, sums_2B in windows], dim=1).numpy()
        of_windows, ids = of_windows[:, ids < count], ids[ids < count]
        documents = [corpus.evaluation[w].document for w in ids]
        for total_D, of_window in zip(sums[layer], of_windows, strict=True):
            np.add.at(total_D, documents, of_window)
    blocks = np.array([block for block, _ in tally.routing], dtype=np.int64)
    return Routing(blocks, sums[:, 0].round().astype(np.int64), sums[:, 1])


def _expert_tokens(tally: Tally) -> Ints | None:
    if not tally.expert_tokens:
        return None
    widest = max(len(counts) for counts in tally.expert_tokens.values())
    rows = np.full((len(tally.expert_tokens), 1 + widest), -1, dtype=np.int64)
    for row, ((block, _), counts) in zip(rows, tally.expert_tokens.items(), strict=True):
        row[0] = block
        row[[1 + index for index in counts]] = list(counts.values())
    return rows


def _task_evidence(corpus: Corpus, tally: Tally) -> Iterator[TaskEvidence]:
    if tally.options is None or not corpus.items:
        return
    nll, greedy = tally.options
    item_P = np.repeat(np.arange(len(corpus.items)), [item.options for item in corpus.items])
    task_N = np.array([corpus.tasks.index(item.task) for item in corpus.items])
    right_P = np.array([k in item.right for item in corpus.items for k in range(item.options)])
    for number, task in enumerate(corpus.tasks):
        own_P = (task_N == number)[item_P]
        _, items_P = np.unique(item_P[own_P], return_inverse=True)
        yield TaskEvidence(
            task, nll[own_P], items_P.astype(np.int64), right_P[own_P], greedy[own_P]
        )


def document_sums(
    batches: Sequence[Batch], nll: Sequence[Tensor], windows: Sequence[Window], count: int
) -> tuple[Floats, Ints]:
    sums, tokens = np.zeros(count), np.zeros(count, dtype=np.int64)
    for batch, nll_BT in zip(batches, nll, strict=True):
        scored_BT = batch.scored_BT()
        for row, w in enumerate(batch.windows):
            losses_T = nll_BT[row][scored_BT[row]]
            sums[windows[w].document] += float(losses_T.double().sum())
            tokens[windows[w].document] += len(losses_T)
    return sums, tokens


@dataclass(frozen=True, eq=False)
class _Scored:
    """The tokens of documents whose loss counts, in the order of batches: N of them."""

    documents: int
    document_N: Ints
    position_N: Ints
    role_N: Ints | None  # places in `ROLES`; None: plain text
    marked: tuple[Tensor, ...]  # (B, T) of each batch

    @classmethod
    def of(cls, corpus: Corpus, feed: Feed) -> _Scored:
        document, position, role, marked = [], [], [], []
        for batch in feed.evaluation:
            document_BT = torch.full(batch.tokens_BT.shape, -1)
            for row, (w, length) in enumerate(zip(batch.windows, batch.lengths, strict=True)):
                document_BT[row, :length] = corpus.evaluation[w].document
            marked_BT = batch.scored_BT()
            document.append(document_BT[marked_BT].numpy())
            position.append(torch.nonzero(marked_BT)[:, 1].numpy())
            marked.append(marked_BT)
            if batch.roles_BT is not None:
                role.append(batch.roles_BT[marked_BT].numpy().astype(np.int64))
        empty = np.zeros(0, dtype=np.int64)
        return cls(
            len(corpus.documents),
            np.concatenate([empty, *document]),
            np.concatenate([empty, *position]),
            np.concatenate(role) if role else None,
            tuple(marked),
        )

    def values(self, batches: Sequence[Tensor]) -> Floats:
        chosen = [values[marked] for values, marked in zip(batches, self.marked, strict=True)]
        return torch.cat([torch.zeros(0), *chosen]).double().numpy()

    def sums(self, values_N: Floats) -> Floats:
        return np.bincount(self.document_N, values_N, self.documents).astype(np.float64)

    def fidelity(
        self, tally: Tally, full: Tally, kl: Sequence[Tensor], same_top: Sequence[Tensor]
    ) -> Fidelity | None:
        """Return the sums of each document; None, with a note, where one is not finite."""
        kl_N = self.values(kl)
        dp_N = np.exp(-self.values(tally.nll)) - np.exp(-self.values(full.nll))
        if odd := int((~np.isfinite(kl_N) | ~np.isfinite(dp_N)).sum()):
            tally.note(
                f"KL divergence is not measured: it is not finite at {odd} of {len(kl_N)} tokens"
            )
            return None
        largest_D = np.zeros(self.documents)
        np.maximum.at(largest_D, self.document_N, kl_N)
        return Fidelity(
            kl_sum=self.sums(kl_N),
            kl_max=largest_D,
            kl_counts=histogram.counts_of(kl_N, self.document_N, self.documents),
            same_top=self.sums(self.values(same_top)).astype(np.int64),
            squared_dp_sum=self.sums(dp_N**2),
            by_confidence=self.by_confidence(full, kl_N, self.values(same_top) == 0),
        )

    def by_confidence(
        self, full: Tally, kl_N: Floats, flip_N: npt.NDArray[np.bool_]
    ) -> ByConfidence | None:
        if len(full.confidence) != len(self.marked):
            return None
        buckets = len(CONFIDENCE_EDGES) + 1
        bucket_N = np.searchsorted(CONFIDENCE_EDGES, self.values(full.confidence), "right")
        place_N, shape = self.document_N * buckets + bucket_N, (self.documents, buckets)

        def summed(values_N: npt.NDArray[Any] | None) -> Floats:
            sums = np.bincount(place_N, values_N, self.documents * buckets)
            return sums.astype(np.float64).reshape(shape)

        return ByConfidence(
            summed(None).astype(np.int64), summed(kl_N), summed(flip_N).astype(np.int64)
        )

    def output_error(self, tally: Tally) -> Floats | None:
        """Return the sums of each document; None where it is not measured or not finite."""
        if not tally.output_error:
            return None
        error_N = self.values(tally.output_error)
        return self.sums(error_N) if np.isfinite(error_N).all() else None

    def positions(self, tally: Tally, context: int, *, compared: bool) -> Positions:
        """Return the sums of each document by where in its window a token is."""
        edges = position_edges(context)
        bin_N = np.searchsorted(edges, self.position_N, "right") - 1
        return Positions(edges, *self._binned(tally, bin_N, len(edges) - 1, compared))

    def roles(self, tally: Tally, *, compared: bool) -> Roles | None:
        if self.role_N is None:
            return None
        return Roles(ROLES, *self._binned(tally, self.role_N, len(ROLES), compared))

    def _binned(
        self, tally: Tally, bin_N: Ints, bins: int, compared: bool
    ) -> tuple[Ints, Floats, Floats | None]:
        shape = (self.documents, bins)

        def summed(values_N: Floats | None = None) -> Floats:
            return sums_by_bin(self.document_N, bin_N, shape, values_N)

        kl = summed(self.values(tally.kl)) if compared else None
        return summed().astype(np.int64), summed(self.values(tally.nll)), kl
