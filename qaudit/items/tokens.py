"""Prompts -> tokens, exactly as lm-eval's own model makes them; and on disk, to be read again.

Context and option are encoded as one text, and the option is what that has beyond the context's
own tokens. Without a context the BOS token stands for it, or EOS. What is longer than the model's
context loses its beginning; the last token of an option is never read, so it costs none.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qaudit.errors import CorpusError
from qaudit.types import Item, Window
from qaudit.whole import read_regular, write_whole

PADDED = 32
"""Windows of items are as long as a multiple of this."""

Ints = npt.NDArray[np.integer]
Tokens = npt.NDArray[np.int32]

_TOGETHER = 4096  # texts that the tokenizer encodes at once
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
            sizes = [_tree_size(some)] if trees else _window_sizes(some)
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


def _tree_size(options: Sequence[Ints]) -> int:
    shortest = min(map(len, options))
    same = np.all([option[:shortest] == options[0][:shortest] for option in options], axis=0)
    shared = int(np.argmin(same)) if not same.all() else shortest
    return shared + sum(len(option) - shared for option in options)


def _window_sizes(options: Sequence[Ints]) -> list[int]:
    ordered = sorted(option.astype(">i8").tobytes() for option in options)
    following = [*ordered[1:], b"-"]
    return [len(a) // 8 for a, b in zip(ordered, following, strict=True) if not b.startswith(a)]


@dataclass(frozen=True)
class PromptedItem:
    """An item as text: a context and what follows it for each option, and which are right."""

    task: str
    name: str
    pairs: tuple[tuple[str, str], ...]
    right: tuple[int, ...]


def write_items(text: ItemText, path: Path) -> None:
    lengths = [len(window.tokens) for window in text.windows]
    right = [len(item.right) for item in text.items]
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        task=np.array([item.task for item in text.items[:1]]),
        names=np.array([item.name for item in text.items]),
        options=np.array([item.options for item in text.items], dtype=np.int64),
        right_counts=np.array(right, dtype=np.int64),
        right=np.array([place for item in text.items for place in item.right], dtype=np.int64),
        lengths=np.array(lengths, dtype=np.int64),
        scored_from=np.array([w.scored_from for w in text.windows], dtype=np.int64),
        tokens=np.concatenate([np.zeros(0, np.int32), *(w.tokens for w in text.windows)]),
        notes=np.array(text.notes, dtype=np.str_),
    )
    write_whole(path, buffer.getvalue())


def read_items(path: Path) -> ItemText | None:
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
        Item(task, str(name), int(options), tuple(int(place) for place in right))
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


@dataclass(frozen=True, eq=False)
class EncodedItem:
    """An option behind its context: tokens from `scored_from` on are the option's."""

    tokens: Tokens
    scored_from: int
    cut_short: bool = False


def item_text(tokenizer: Any, items: Sequence[PromptedItem], context: int) -> ItemText:
    """Return items of one task as windows, with a note on those that are cut short."""
    windows = encoded(tokenizer, [pair for item in items for pair in item.pairs], context)
    cut = sum(part.cut_short for part in windows)
    notes = (
        f"{items[0].task}: {cut} of {len(windows)} options lost the beginning of their context, "
        f"which is longer than {context} tokens",
    )
    return ItemText(
        tuple(Item(item.task, item.name, len(item.pairs), item.right) for item in items),
        tuple(Window(k, part.tokens, part.scored_from) for k, part in enumerate(windows)),
        notes if cut else (),
    )


def encoded(
    tokenizer: Any, pairs: Sequence[tuple[str, str]], context: int
) -> tuple[EncodedItem, ...]:
    """Return the tokens of (context, option) pairs, of each the last `context + 1`."""
    texts: dict[tuple[str, bool | None], tuple[int, ...]] = {}
    wanted = [_texts(tokenizer, *pair) for pair in pairs]
    flat = dict.fromkeys(text for some in wanted for text in some)
    for special in (None, False):
        some = [text for text, how in flat if how is special]
        options = {} if special is None else {"add_special_tokens": special}
        for text, tokens in _batches(tokenizer, some, options):
            texts[text, special] = tokens
    return tuple(
        _cut(_pair(tokenizer, pair, [texts[text] for text in some]), pair, context)
        for pair, some in zip(pairs, wanted, strict=True)
    )


def _batches(
    tokenizer: Any, texts: Iterable[str], options: dict[str, bool]
) -> Iterable[tuple[str, tuple[int, ...]]]:
    remaining = iter(texts)
    while some := list(islice(remaining, _TOGETHER)):
        tokens = tokenizer(some, verbose=False, **options)["input_ids"]
        yield from zip(some, map(tuple, tokens), strict=True)


def _texts(tokenizer: Any, context: str, option: str) -> tuple[tuple[str, bool | None], ...]:
    if context == "":
        return ((option, False),)
    # The BOS of a text that has one already is not put there twice.
    prefix = _prefix_of(tokenizer)
    bos = "" if prefix is None else str(tokenizer.decode(prefix))
    special = False if bos and context.startswith(bos) else None
    return ((context + option, special), (context.rstrip(), special))


def _pair(
    tokenizer: Any, pair: tuple[str, str], tokens: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if pair[0] == "":
        option, prefix = tokens[0], _prefix(tokenizer)
        if option[:1] == (prefix,):
            return option[:1], option[1:]
        return (prefix,), option
    whole, before = tokens
    return before, whole[len(before) :]


def _prefix_of(tokenizer: Any) -> int | None:
    candidates = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    return next((int(token) for token in candidates if token is not None), None)


def _prefix(tokenizer: Any) -> int:
    """Return the token that stands for an empty context."""
    if (prefix := _prefix_of(tokenizer)) is not None:
        return prefix
    raise CorpusError(
        "this tokenizer has neither BOS nor EOS, and items without a context need one",
        hint="take `tokenizer_config.json` of the model they were trained from",
    )


def _cut(
    parts: tuple[tuple[int, ...], tuple[int, ...]], pair: tuple[str, str], context: int
) -> EncodedItem:
    before, option = parts
    if not option:
        raise CorpusError(
            f"option `{pair[1][:40]}` has no token of its own",
            hint="every option needs text behind the context",
        )
    tokens = (*before, *option)[-(context + 1) :]
    surplus = len(before) + len(option) - len(tokens)
    return EncodedItem(
        np.array(tokens, dtype=np.int32), max(1, len(before) - surplus), cut_short=surplus > 0
    )
