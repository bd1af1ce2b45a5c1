"""A part of the card, and how whole parts are left out where all of them are too long.

A table that ends in its middle cannot be told from a short one, so a section is there as a whole
or not at all, and the card names those that are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """A part of the card; where room is short the one with the highest number goes first."""

    title: str
    body: str
    expendable: int

    @property
    def text(self) -> str:
        """The section with its heading."""
        return f"### {self.title}\n\n{self.body}"


def fitted(
    sections: Sequence[Section],
    join: Callable[[Sequence[Section], Sequence[str]], str],
    limit_nbytes: int,
) -> str:
    """Join as many sections as fit; `join` is also given the titles of those left out."""
    kept, left_out = list(sections), list[str]()
    while len((text := join(kept, left_out)).encode()) > limit_nbytes and kept:
        victim = max(kept, key=lambda section: (section.expendable, len(section.body)))
        kept.remove(victim)
        left_out.append(victim.title)
    return text
