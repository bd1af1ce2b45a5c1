"""Progress of an audit, for a caller that shows it."""

from __future__ import annotations

from collections.abc import Mapping


class Watch:
    """Receives progress; every method does nothing unless a subclass overrides it."""

    def expect(self, costs: Mapping[str, float]) -> None:
        """These subjects come, by label, with what each is planned to cost, in any unit."""

    def subject(self, done: int, total: int, label: str, passes: int = 1) -> None:
        """A subject begins, which takes so many passes; with `done == total` all are done."""

    def block(self, done: int, total: int, what: str) -> None:
        """A subject is at this block; `what` names the work there."""

    def count(self, what: str, done: int, total: int, left_seconds: float | None = None) -> None:
        """So many are done of something that is counted, such as file trees."""

    def download(self, what: str, done_nbytes: int, total_nbytes: int) -> None:
        """A download has come this far; called from several threads."""

    def note(self, text: str) -> None:
        """A passing note, such as a retry or a wait; called from several threads."""


SILENT = Watch()
