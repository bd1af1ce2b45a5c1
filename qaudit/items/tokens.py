"""Prompts -> tokens, exactly as lm-eval's own model makes them; and on disk, to be read again.

Context and option are encoded as one text, and the option is what that has beyond the context's
own tokens. Without a context the BOS token stands for it, or EOS. What is longer than the model's
context loses its beginning; the last token of an option is never read, so it costs none.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qaudit.errors import CorpusError
from qaudit.types import Item, Window
from qaudit.whole import read_regular, write_whole

PADDED = 32
"""Windows of items are as long as a multiple of this."""

Tokens = npt.NDArray[np.int32]

_TOGETHER = 4096  # texts that the tokenizer encodes at once
_LARGEST_NBYTES = 4_000_000_000


@dataclass(frozen=True, eq=False)
class ItemText:
    """Items, and a window for each of their options in order."""

    items: tuple[Item, ...] = ()
    windows: tuple[Window, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(item.task for item in self.items))

    def tokens(self, *, trees: bool) -> int:
        return sum(self.task_tokens(trees=trees).values())

    def task_tokens(self, *, trees: bool) -> dict[str, int]:
        """Return how many tokens of each task go through a model, padded.

        The options of an item share a tree; without trees, an option that begins another shares
        the window of that one.
        """
        tokens, first = Counter[str](), 0
        for item in self.items:
            some = [w.tokens[:-1] for w in self.windows[first : first + item.options]]
            first += item.options
            if trees:
                shortest = min(map(len, some))
                same = np.all([o[:shortest] == some[0][:shortest] for o in some], axis=0)
                shared = int(np.argmin(same)) if not same.all() else shortest
                sizes = [shared + sum(len(option) - shared for option in some)]
            else:
                ordered = sorted(option.astype(">i8").tobytes() for option in some)
                pairs = zip(ordered, [*ordered[1:], b"-"], strict=True)
                sizes = [len(a) // 8 for a, b in pairs if not b.startswith(a)]
            tokens[item.task] += sum(-(-size // PADDED) * PADDED for size in sizes)
        return dict(tokens)

    @classmethod
    def together(cls, parts: Sequence[ItemText]) -> ItemText:
        """Return the items of several tasks, their windows numbered anew."""
        windows = (window for part in parts for window in part.windows)
        return cls(
            tuple(item for part in parts for item in part.items),
            tuple(Window(k, w.tokens, w.scored_from) for k, w in enumerate(windows)),
            tuple(note for part in parts for note in part.notes),
        )


@dataclass(frozen=True)
class PromptedItem:
    """An item as text: a context and what follows it for each option, and which are right."""

    task: str
    name: str
    pairs: tuple[tuple[str, str], ...]
    right: tuple[int, ...]


def write_items(text: ItemText, path: Path) -> None:
    about = [[list(vars(item).values()) for item in text.items], text.notes]
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        about=np.array(json.dumps(about)),
        lengths=np.array([len(window.tokens) for window in text.windows], dtype=np.int64),
        scored_from=np.array([w.scored_from for w in text.windows], dtype=np.int64),
        tokens=np.concatenate([np.zeros(0, np.int32), *(w.tokens for w in text.windows)]),
    )
    write_whole(path, buffer.getvalue())


def read_items(path: Path) -> ItemText | None:
    """Return the items in a file, or None where it is missing or damaged."""
    try:
        with np.load(io.BytesIO(read_regular(path, _LARGEST_NBYTES)), allow_pickle=False) as part:
            columns = {name: part[name] for name in part.files}
        rows, notes = json.loads(str(columns["about"]))
        items = tuple(Item(task, name, n, tuple(right)) for task, name, n, right in rows)
        tokens = np.split(columns["tokens"], np.cumsum(columns["lengths"])[:-1])
        parts = enumerate(zip(tokens, columns["scored_from"], strict=True))
        windows = tuple(Window(k, part, int(start)) for k, (part, start) in parts)
        if sum(item.options for item in items) == len(windows):
            return ItemText(items, windows, tuple(notes))
    except (OSError, ValueError, LookupError, TypeError, EOFError, zipfile.BadZipFile, zlib.error):
        pass
    return None


def item_text(tokenizer: Any, items: Sequence[PromptedItem], context: int) -> ItemText:
    """Return items of one task as windows, with a note on those that are cut short."""
    pairs = [pair for item in items for pair in item.pairs]
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    prefix = next((int(token) for token in ends if token is not None), None)
    texts = _encoded(tokenizer, pairs, "" if prefix is None else str(tokenizer.decode(prefix)))
    windows, cut = list[Window](), 0
    for (shown, text), (option, *before) in zip(pairs, texts, strict=True):
        if shown:
            (start,) = before
            option = option[len(start) :]
        elif prefix is None:
            raise CorpusError(
                "this tokenizer has neither BOS nor EOS, and items without a context need one",
                hint="take `tokenizer_config.json` of the model they were trained from",
            )
        else:
            start = (prefix,)
            option = option[1:] if option[:1] == start else option
        if not option:
            raise CorpusError(
                f"option `{text[:40]}` has no token of its own",
                hint="every option needs text behind the context",
            )
        tokens = (*start, *option)[-(context + 1) :]
        surplus = len(start) + len(option) - len(tokens)
        cut += surplus > 0
        scored_from = max(1, len(start) - surplus)
        windows.append(Window(len(windows), np.array(tokens, dtype=np.int32), scored_from))
    notes = (
        f"{items[0].task}: {cut} of {len(windows)} options lost the beginning of their context, "
        f"which is longer than {context} tokens",
    )
    rows = (Item(item.task, item.name, len(item.pairs), item.right) for item in items)
    return ItemText(tuple(rows), tuple(windows), notes if cut else ())


def _encoded(
    tokenizer: Any, pairs: Sequence[tuple[str, str]], bos: str
) -> list[list[tuple[int, ...]]]:
    """Return the tokens of each option behind its context, and of its context if it has any."""
    wanted: list[list[tuple[str, bool | None]]] = []
    for context, option in pairs:
        # The BOS of a text that has one already is not put there twice.
        special = False if not context or (bos and context.startswith(bos)) else None
        wanted.append([(context + option, special)])
        wanted[-1] += [(context.rstrip(), special)] if context else []
    tokens: dict[tuple[str, bool | None], tuple[int, ...]] = {}
    for special in (None, False):
        options = {} if special is None else {"add_special_tokens": special}
        some = list(
            dict.fromkeys(text for texts in wanted for text, how in texts if how is special)
        )
        for first in range(0, len(some), _TOGETHER):
            batch = some[first : first + _TOGETHER]
            rows = tokenizer(batch, verbose=False, **options)["input_ids"]
            tokens |= {(text, special): tuple(row) for text, row in zip(batch, rows, strict=True)}
    return [[tokens[text] for text in texts] for texts in wanted]
