"""Results per token become sums over documents, which is all that intervals need.

Results of rollouts per token become sums by sample: in all, by position and by role.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qaudit.core import statistics
from qaudit.core.fidelity import TIE
from qaudit.engine.batches import Batch
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
    RolloutEvidence,
    RolloutText,
    Routing,
    TaskEvidence,
    Window,
)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def position_edges(context: int) -> Ints:
    """Return the bins of positions in a window: 16, and four times as many each further one."""
    edges = [0]
    while 16 * 4 ** (len(edges) - 1) < context:
        edges.append(16 * 4 ** (len(edges) - 1))
    return np.array([*edges, context], dtype=np.int64)


def sums_by_bin(
    unit_N: Ints, bin_N: Ints, shape: tuple[int, int], values_N: Floats | None = None
) -> Floats:
    """Return sums of N tokens by unit and bin, in this shape; without values how many they are."""
    flat = np.bincount(unit_N * shape[1] + bin_N, values_N, shape[0] * shape[1])
    return flat.astype(np.float64).reshape(shape)


def rollout_evidence(
    corpus: Corpus, batches: Sequence[Batch], tally: Tally, full: Tally | None, first: int
) -> RolloutEvidence | None:
    """Return the sums of each sample; `first` is the place of their batches in the tally.

    Where full precision would not write its own token, by rounding alone, no stream diverges.
    """
    text = corpus.rollouts
    if text is None or not batches:
        return None
    count, has_kl = len(text.windows), len(tally.kl) == len(tally.nll)
    nll, kl, agreed = np.zeros(count), np.zeros(count), np.full(count, -1)
    ends, drawn = np.zeros((count, len(text.ends))), np.zeros(count)
    entropy: Floats | None = np.zeros(count)
    read = np.zeros(count, dtype=np.int64) if text.read is None else text.read
    columns_by: dict[int, Floats] = {}  # (N, 2 + G) of each sample
    for k, batch in enumerate(batches):
        likeliest_BT, ends_BTG, drawn_BT, entropy_BT = tally.chosen[k]
        agrees_BT = likeliest_BT > 0
        if full is not None:
            agrees_BT |= full.chosen[k][0] == TIE
        for row, w in enumerate(batch.windows):
            s = w - len(corpus.evaluation)
            written = slice(batch.starts[row], batch.lengths[row])
            nll_N = tally.nll[first + k][row, written].double()
            kl_N = tally.kl[first + k][row, written].double() if has_kl else torch.zeros_like(nll_N)
            ends_NG = ends_BTG[row, written].double()
            nll[s], kl[s], ends[s] = float(nll_N.sum()), float(kl_N.sum()), ends_NG.sum(0).numpy()
            columns_by[s] = torch.column_stack((nll_N, kl_N, ends_NG)).numpy()
            drawn[s] = float(drawn_BT[row, written][: read[s]].double().sum())
            if entropy_BT is None:
                entropy = None
            elif entropy is not None:
                entropy[s] = float(entropy_BT[row, written][: read[s]].double().sum())
            if text.greedy[s]:
                agreed[s] = int(agrees_BT[row, written].long().cumprod(0).sum())
    finite = all(np.isfinite(values).all() for values in (nll, kl, ends))
    if not finite or np.isnan(drawn).any():
        tally.note("rollouts are not scored: the loss or divergence of one is not finite")
        return None
    return RolloutEvidence(
        sha256=text.sha256,
        prompt=text.prompt,
        tokens=np.array([window.scored for window in text.windows], dtype=np.int64),
        nll_sum=nll,
        agreed=agreed,
        end_names=tuple(name for name, _ in text.ends),
        end_sum=ends,
        kl_sum=kl if has_kl else None,
        mark=text.mark,
        drawn_sum=None if text.mark is None or text.unweighed else drawn,
        entropy_sum=None if text.mark is None or text.unweighed else entropy,
        weights_sha256=text.weights_sha256,
        unweighed=text.unweighed,
        **_parts_of_rollouts(text, [columns_by[s] for s in range(count)], has_kl=has_kl),
    )


def _parts_of_rollouts(
    text: RolloutText, columns: Sequence[Floats], *, has_kl: bool
) -> dict[str, Any]:
    lengths = [len(column_NK) for column_NK in columns]
    values_NK, count = np.concatenate(columns), len(columns)
    sample_N = np.repeat(np.arange(count), lengths)
    edges = position_edges(max(lengths))
    position_N = np.concatenate([np.arange(length) for length in lengths])

    def binned(bin_N: Ints, bins: int) -> tuple[Ints, Floats, Floats | None, Floats]:
        shape = (count, bins)
        tokens = sums_by_bin(sample_N, bin_N, shape).astype(np.int64)
        nll, kl, *ends = (sums_by_bin(sample_N, bin_N, shape, v_N) for v_N in values_NK.T)
        end_sum = np.stack(ends, -1) if ends else np.zeros((*shape, 0))
        return tokens, nll, kl if has_kl else None, end_sum

    bin_N = np.searchsorted(edges, position_N, "right") - 1
    parts: dict[str, Any] = {"positions": Positions(edges, *binned(bin_N, len(edges) - 1))}
    roles = [w.roles[w.scored_from :] for w in text.windows if w.roles is not None]
    if roles:
        role_N = np.concatenate(roles).astype(np.int64)
        parts["roles"] = Roles(ROLES, *binned(role_N, len(ROLES)))
    return parts


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
            kl_counts=statistics.counts_of(kl_N, self.document_N, self.documents),
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
