"""Near-copies among documents, by the tokens that are cut of them.

Two documents that share text scatter less than two of a kind, and their interval is too narrow:
with each text four times, 69 % hold where 95 were promised. Documents are compared by the runs of
eight tokens that they have (shingles), of which each keeps the 128 with the lowest hashes
(bottom-k, Broder 1997). Those with a third of them in common, which is half of the text of two as
long, are one unit of analysis: their sums are added up, and they are in one half of the documents.
Short documents are not compared: a third of them is a phrase.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

SHINGLE = 8  # tokens
SKETCH = 128  # shingles of a document that are kept
SHORTEST = 32  # tokens of a document that is compared
ALIKE = 1 / 3  # of the shingles of two documents together

Sketch = npt.NDArray[np.uint64]


@dataclass
class NearCopies:
    """Documents by their shingles, in clusters."""

    clusters: list[int] = field(default_factory=list)  # of each document, counted from zero
    _sketches: list[Sketch] = field(default_factory=list)
    _holders: dict[int, list[int]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(set(self.clusters))

    def add(self, tokens: npt.NDArray[np.int32]) -> int:
        """Return the cluster of one more document: that of the first near-copy, or a new one."""
        sketch, number = sketch_of(tokens), len(self.clusters)
        hashes = [int(value) for value in sketch]
        shared = Counter[int]()
        for value in hashes:
            shared.update(self._holders.get(value, ()))
        alike = (
            k
            for k in sorted(shared)
            if _may_be_alike(shared[k], len(sketch), len(self._sketches[k]))
            and _overlap(sketch, self._sketches[k]) >= ALIKE
        )
        first = next(alike, None)
        cluster = self.count if first is None else self.clusters[first]
        self.clusters.append(cluster)
        self._sketches.append(sketch)
        for value in hashes:
            self._holders.setdefault(value, []).append(number)
        return cluster


def sketch_of(tokens: npt.NDArray[np.int32]) -> Sketch:
    """Return the lowest hashes of a document's shingles; none of a short document."""
    if len(tokens) < SHORTEST:
        return np.empty(0, dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), SHINGLE)
    powers = np.array([pow(0x9E3779B97F4A7C15, k, 1 << 64) for k in range(SHINGLE)], np.uint64)
    with np.errstate(over="ignore"):
        hashes = (windows + np.uint64(1)) @ powers
        hashes ^= hashes >> np.uint64(29)
        hashes *= np.uint64(0xBF58476D1CE4E5B9)
        hashes ^= hashes >> np.uint64(32)
    return np.unique(hashes)[:SKETCH]


def _may_be_alike(shared: int, a: int, b: int) -> bool:
    """Return whether sketches with so many shingles in common can be alike: most cannot.

    Documents that share a header or a prompt have some in common with all others.
    """
    return shared >= ALIKE * min(SKETCH, a + b - shared)


def _overlap(a: Sketch, b: Sketch) -> float:
    """Return the share of shingles that two documents have in common, of those of both."""
    both = np.union1d(a, b)[:SKETCH]
    return float((np.isin(both, a) & np.isin(both, b)).mean()) if len(both) else 0.0
