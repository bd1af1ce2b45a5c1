"""What is said against a checkpoint before anything is compared, as sentences that read back.

Whoever finds checkpoints writes these sentences into `Checkpoint.suspect` and `.notes`; whoever
judges them by their hashes has to know which revisions a sentence speaks of. The sentence is
the one form of it: people read it as it stands, a lock keeps it as text, and it is written and
read in this one place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

NO_WEIGHTS = "it holds no weights"

_FAMILY = "its family's file says"
_SAME, _ONE = "are said to be equal", "are said to be one checkpoint"
_NAMES = re.compile(rf"((?:`[^`]+`(?:, | and )?){{2,}}) (?:{_SAME}|{_ONE})(?::| [(]|$)")


def said_bad(reason: str, source: str | None = None, *, some: bool = False) -> str:
    """Say what a family's file says against a revision, or against some of many like it."""
    which = ", of some revisions like it" if some else ""
    return f"{_FAMILY}{which}: {reason}{_from(source)}"


def is_said_bad(text: str) -> bool:
    """Say whether a sentence is what a family's file says against a revision."""
    return text.startswith(_FAMILY)


def said_same(
    names: Sequence[str], reason: str | None, source: str | None = None, *, one_place: bool = False
) -> str:
    """Say that revisions serve the same weights; those of one place in a run may well do so."""
    said = f"{_listed(names)} {_ONE if one_place else _SAME}"
    return f"{said}: {reason}{_from(source)}" if reason else f"{said}{_from(source)}"


def names_said_same(text: str) -> tuple[str, ...]:
    """Return the revisions that a sentence says to be the same, or none if it says no such."""
    match = _NAMES.match(text)
    return tuple(re.findall("`([^`]+)`", match[1])) if match else ()


def found_in_tree(suspect: Sequence[str]) -> tuple[str, ...]:
    """Return what was found wrong with the files themselves, and not said by anybody."""
    return tuple(t for t in suspect if not is_said_bad(t) and not names_said_same(t))


def _listed(names: Sequence[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return f"{', '.join(quoted[:-1])} and {quoted[-1]}" if len(quoted) > 1 else quoted[0]


def _from(source: str | None) -> str:
    return f" ({source})" if source else ""
