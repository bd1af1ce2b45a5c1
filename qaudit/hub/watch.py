"""Progress of downloads: bytes of a whole, and what went wrong on the way."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Protocol


class Watch(Protocol):
    """An observer of downloads; called from several threads."""

    def fetched(self, what: str, done_nbytes: int, total_nbytes: int) -> None:
        """Take note that so much of something is there."""

    def said(self, text: str) -> None:
        """Take note of what a person should know."""


class _Silent:
    def fetched(self, what: str, done_nbytes: int, total_nbytes: int) -> None:
        """Do nothing."""

    def said(self, text: str) -> None:
        """Do nothing."""


SILENT: Watch = _Silent()


class Receipt:
    """What a process took from the Hub, and how much it hashed; counted by several threads."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.nbytes_fetched = 0  # over the network, thrown away or not
        self.nbytes_verified = 0  # of files found whole by their hash, fetched or not
        self._lock = Lock()

    def fetched(self, nbytes: int) -> None:
        """Count bytes that came over the network."""
        with self._lock:
            self.nbytes_fetched += nbytes

    def verified(self, nbytes: int) -> None:
        """Count a file whose hash is right."""
        with self._lock:
            self.nbytes_verified += nbytes


class Progress:
    """How much of several blobs has come; what turns out to be wrong counts no more."""

    _STEPS = 500  # a watch need not hear of every piece

    def __init__(self, watch: Watch, what: str, sizes: Mapping[str, int]) -> None:
        """Begin with nothing; `sizes` are the bytes of each blob by its name."""
        self._watch, self._what, self._sizes = watch, what, sizes
        self._total = sum(sizes.values())
        self._done = dict.fromkeys(sizes, 0)
        self._told = -1
        self._lock = Lock()

    def came(self, blob: str, nbytes: int) -> None:
        """Count bytes of a blob, or count them out again where they were wrong."""
        with self._lock:
            self._done[blob] = min(max(self._done[blob] + nbytes, 0), self._sizes[blob])
            done = sum(self._done.values())
            far = abs(done - self._told) * self._STEPS >= self._total
            if done != self._told and (far or done == self._total):
                self._told = done
                self._watch.fetched(self._what, done, self._total)
