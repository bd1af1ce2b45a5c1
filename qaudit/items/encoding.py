"""Prompts -> tokens, exactly as lm-eval's own model makes them.

Context and option are encoded as one text, and the option is what that has beyond the context's
own tokens. Without a context the BOS token stands for it, or EOS. What is longer than the model's
context loses its beginning; the last token of an option is never read, so it costs none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from qaudit.errors import CorpusError

Tokens = npt.NDArray[np.int32]
_TOGETHER = 4096  # texts that the tokenizer encodes at once


@dataclass(frozen=True, eq=False)
class Encoded:
    """An option behind its context: tokens from `scored_from` on are the option's."""

    tokens: Tokens
    scored_from: int
    cut_short: bool = False


def encoded(tokenizer: Any, pairs: Sequence[tuple[str, str]], context: int) -> tuple[Encoded, ...]:
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
    left = iter(texts)
    while some := list(islice(left, _TOGETHER)):
        tokens = tokenizer(some, verbose=False, **options)["input_ids"]
        yield from zip(some, map(tuple, tokens), strict=True)


def _texts(tokenizer: Any, context: str, option: str) -> tuple[tuple[str, bool | None], ...]:
    """Return what is encoded for a pair, and whether special tokens are added to it."""
    if context == "":
        return ((option, False),)
    # The BOS of a text that has one already is not put there twice.
    special = False if (bos := _written_prefix(tokenizer)) and context.startswith(bos) else None
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


def _written_prefix(tokenizer: Any) -> str:
    prefix = _prefix_of(tokenizer)
    return "" if prefix is None else str(tokenizer.decode(prefix))


def _prefix_of(tokenizer: Any) -> int | None:
    known = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    return next((int(token) for token in known if token is not None), None)


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
) -> Encoded:
    before, option = parts
    if not option:
        raise CorpusError(
            f"option `{pair[1][:40]}` has no token of its own",
            hint="every option needs text behind the context",
        )
    tokens = (*before, *option)[-(context + 1) :]
    surplus = len(before) + len(option) - len(tokens)
    return Encoded(
        np.array(tokens, dtype=np.int32), max(1, len(before) - surplus), cut_short=surplus > 0
    )
