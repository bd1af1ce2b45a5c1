"""The role of each token that a model wrote: reasoning, call or answer, by markers as tokens.

Rollouts are ids, and their text may tokenize otherwise: markers are looked for as tokens. A marker
of several ordinary tokens may be written with others, joined to its neighbors; so roles are known
only where each marker is a token, or begins and ends with a token that is never joined.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qaudit.types import ANSWER, REASONING, ROLES

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_TAIL = 8  # tokens at the end of a prompt in which a template may begin the reasoning


@dataclass(frozen=True)
class TokenMarker:
    """What begins and ends a role; nothing ends with the answer."""

    role: str
    begin: tuple[int, ...]
    end: tuple[int, ...]


def separable(markers: Sequence[TokenMarker], added: Container[int]) -> tuple[TokenMarker, ...]:
    """Return the markers if tokens tell all of them; `added` tokens are joined to no other."""
    sequences = [ids for marker in markers for ids in (marker.begin, marker.end) if ids]
    is_told = all(len(ids) == 1 or (ids[0] in added and ids[-1] in added) for ids in sequences)
    return tuple(markers) if is_told else ()


def roles_of(
    prompt: Sequence[int], new_ids: Sequence[int], markers: Sequence[TokenMarker]
) -> npt.NDArray[np.int8]:
    """Return the place in `ROLES` of each token that was written."""
    import numpy as np

    tail = tuple(prompt[-_TAIL:])
    ids, first = (*tail, *new_ids), len(tail)
    roles = np.full(len(ids), ROLES.index(ANSWER), dtype=np.int8)
    inside: TokenMarker | None = None
    began = place = 0
    may_be_open = True  # an end of reasoning may come first: the prompt has its begin
    while place < len(ids):
        if inside is None:
            marker = next((m for m in markers if _is_at(ids, place, m.begin)), None)
            if marker is not None:
                inside, began, may_be_open = marker, place, False
                place += len(marker.begin)
                continue
            ended = (m for m in markers if m.role == REASONING and _is_at(ids, place, m.end))
            if may_be_open and (marker := next(ended, None)) is not None:
                inside, began, may_be_open = marker, first, False
        if inside is not None and _is_at(ids, place, inside.end):
            place += len(inside.end)
            roles[began:place] = ROLES.index(inside.role)
            inside = None
            continue
        place += 1
    if inside is not None:
        roles[began:] = ROLES.index(inside.role)
    return roles[first:]


def _is_at(ids: Sequence[int], place: int, wanted: Sequence[int]) -> bool:
    return len(wanted) > 0 and tuple(ids[place : place + len(wanted)]) == tuple(wanted)
