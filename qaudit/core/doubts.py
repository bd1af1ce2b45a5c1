"""Doubts about a checkpoint before anything is compared, as sentences that can be parsed again.

The rooms that find checkpoints write these sentences into `Checkpoint.suspect` and `.notes`; the
judge, which compares hashes, has to know which revisions a sentence names. The sentence is
the one form of it: people read it, a lock keeps it as text, and it is written and
read in this one place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

NO_WEIGHTS = "it holds no weights"

_REPORT = "its family's file says"
_EQUAL, _ONE = "are said to be equal", "are said to be one checkpoint"
_NAMES = re.compile(rf"((?:`[^`]+`(?:, | and )?){{2,}}) (?:{_EQUAL}|{_ONE})(?::| [(]|$)")


def bad_report(reason: str, source: str | None = None, *, some: bool = False) -> str:
    """Return the sentence that a family's file has against a revision, or some of several."""
    which = ", of some revisions like it" if some else ""
    return f"{_REPORT}{which}: {reason}{_from(source)}"


def is_bad_report(text: str) -> bool:
    """Whether a sentence is one of a family's file against a revision."""
    return text.startswith(_REPORT)


def equal_report(
    names: Sequence[str], reason: str | None, source: str | None = None, *, one_place: bool = False
) -> str:
    """Say that revisions serve the same weights; those of one place in a run may well do so."""
    claim = f"{_listed(names)} {_ONE if one_place else _EQUAL}"
    return f"{claim}: {reason}{_from(source)}" if reason else f"{claim}{_from(source)}"


def names_in_equal_report(text: str) -> tuple[str, ...]:
    """Return the revisions that a sentence calls the same, or none if it is another sentence."""
    match = _NAMES.match(text)
    return tuple(re.findall("`([^`]+)`", match[1])) if match else ()


def doubts_of_files(suspect: Sequence[str]) -> tuple[str, ...]:
    """Return the doubts that come from the files themselves and not from a family's file."""
    return tuple(t for t in suspect if not is_bad_report(t) and not names_in_equal_report(t))


def _listed(names: Sequence[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return f"{', '.join(quoted[:-1])} and {quoted[-1]}" if len(quoted) > 1 else quoted[0]


def _from(source: str | None) -> str:
    return f" ({source})" if source else ""
