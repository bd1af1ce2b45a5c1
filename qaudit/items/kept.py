"""Items on disk: what lm-eval and a tokenizer made of a task, to be read again at once."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qaudit.types import Item, Window
from qaudit.whole import read_regular, write_whole

PADDED = 32
"""Windows of items are as long as a multiple of this."""

Ints = npt.NDArray[np.integer]

_LARGEST_NBYTES = 4_000_000_000
_DAMAGED = (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True, eq=False)
class ItemText:
    """Items, and a window for each of their options in order."""

    items: tuple[Item, ...] = ()
    windows: tuple[Window, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """The number of items of each task."""
        return dict(Counter(item.task for item in self.items))

    def tokens(self, *, trees: bool) -> int:
        """Return how many tokens go through a model, padded.

        The options of an item share a tree; without trees, an option that begins another shares
        the window of that one.
        """
        total = first = 0
        for item in self.items:
            some = [w.tokens[:-1] for w in self.windows[first : first + item.options]]
            first += item.options
            sizes = [_tree_size(some)] if trees else _window_sizes(some)
            total += sum(-(-size // PADDED) * PADDED for size in sizes)
        return total

    @classmethod
    def together(cls, parts: Sequence[ItemText]) -> ItemText:
        """Return the items of several tasks, their windows numbered anew."""
        windows = (window for part in parts for window in part.windows)
        return cls(
            tuple(item for part in parts for item in part.items),
            tuple(Window(k, w.tokens, w.scored_from) for k, w in enumerate(windows)),
            tuple(note for part in parts for note in part.notes),
        )


def _tree_size(options: Sequence[Ints]) -> int:
    shortest = min(map(len, options))
    same = np.all([one[:shortest] == options[0][:shortest] for one in options], axis=0)
    shared = int(np.argmin(same)) if not same.all() else shortest
    return shared + sum(len(one) - shared for one in options)


def _window_sizes(options: Sequence[Ints]) -> list[int]:
    ordered = sorted(one.astype(">i8").tobytes() for one in options)
    following = [*ordered[1:], b"-"]
    return [len(a) // 8 for a, b in zip(ordered, following, strict=True) if not b.startswith(a)]


def keep(text: ItemText, path: Path) -> None:
    """Write the items of one task."""
    lengths = [len(window.tokens) for window in text.windows]
    right = [len(item.right) for item in text.items]
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        task=np.array([item.task for item in text.items[:1]]),
        names=np.array([item.name for item in text.items]),
        options=np.array([item.options for item in text.items], dtype=np.int64),
        right_counts=np.array(right, dtype=np.int64),
        right=np.array([one for item in text.items for one in item.right], dtype=np.int64),
        lengths=np.array(lengths, dtype=np.int64),
        scored_from=np.array([w.scored_from for w in text.windows], dtype=np.int64),
        tokens=np.concatenate([np.zeros(0, np.int32), *(w.tokens for w in text.windows)]),
        notes=np.array(text.notes, dtype=np.str_),
    )
    write_whole(path, buffer.getvalue())


def kept(path: Path) -> ItemText | None:
    """Return the items in a file, or None where it is missing or damaged."""
    try:
        with np.load(io.BytesIO(read_regular(path, _LARGEST_NBYTES)), allow_pickle=False) as part:
            columns = {name: part[name] for name in part.files}
        return _read(columns)
    except _DAMAGED:
        return None


def _read(columns: dict[str, np.ndarray]) -> ItemText:
    task = str(columns["task"][0])
    rights = np.split(columns["right"], np.cumsum(columns["right_counts"])[:-1])
    items = tuple(
        Item(task, str(name), int(options), tuple(int(one) for one in right))
        for name, options, right in zip(columns["names"], columns["options"], rights, strict=True)
    )
    tokens = np.split(columns["tokens"], np.cumsum(columns["lengths"])[:-1])
    windows = tuple(
        Window(k, part, int(start))
        for k, (part, start) in enumerate(zip(tokens, columns["scored_from"], strict=True))
    )
    if sum(item.options for item in items) != len(windows):
        raise ValueError("its options are not those of its items")
    return ItemText(items, windows, tuple(map(str, columns["notes"])))
