"""Results of rollouts per token become sums by sample: in all, by position and by role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from qaudit.core.fidelity import TIE
from qaudit.engine.batches import Batch
from qaudit.engine.tally import Tally
from qaudit.types import ROLES, Corpus, Positions, Roles, RolloutEvidence, RolloutText

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
