"""The documents that a diagnostic uses: chosen by content, the same for every subject."""

from __future__ import annotations

from dataclasses import dataclass

from qaudit.types import Corpus, Window, digest


@dataclass(frozen=True, eq=False)
class Chosen:
    """The chosen documents of a corpus."""

    documents: tuple[int, ...]  # indices in the corpus
    windows: tuple[tuple[Window, ...], ...]
    sha256: str

    @classmethod
    def of(cls, corpus: Corpus, documents: int) -> Chosen:
        """Choose the first documents in the order of their hashes."""
        scored = {window.document for window in corpus.evaluation if window.scored}
        order = sorted(scored, key=lambda d: corpus.documents[d].sha256)[:documents]
        windows = [tuple(w for w in corpus.evaluation if w.document == d) for d in order]
        hashes = [corpus.documents[d].sha256 for d in order]
        return cls(tuple(order), tuple(windows), digest(hashes))
