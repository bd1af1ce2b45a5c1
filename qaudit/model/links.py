"""What links the blocks of a model beside hidden states, found by recording it with stubs.

Three kinds are kept beside hidden states (`beside.py`): what a block returns and a later one is
given, a mapping that is empty before the first block, and tensors that the model makes of its
tokens for a block. Refused are objects that are neither plain nor such a mapping, and what the
model makes of hidden states between two blocks: that would have to be computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from qaudit.errors import ModelError
from qaudit.model.beside import GIVEN, Beside
from qaudit.model.tape import HINT, Arguments, Carried, Form, Returned, Store

_PLAIN = (Tensor, bool, int, float, str, torch.dtype, torch.device, type(None))
_Link = Carried | Store

Recorded = Mapping[int, Arguments]
"""What each block was called with."""


@dataclass(frozen=True, eq=False)
class Links:
    """What each block reads and leaves beside hidden states."""

    reads: Mapping[int, Mapping[int, _Link]] = field(default_factory=dict)  # by block and leaf

    @classmethod
    def of(cls, first: Recorded, other: Recorded, moved: Callable[[], Recorded]) -> Links:
        """Compare recordings of some tokens and others; what differs is not to be of hidden states.

        `moved` records the first tokens once more, with other hidden states behind each block.
        """
        reads: dict[int, dict[int, _Link]] = {}
        stores: dict[int, str] = {}  # by identity, which all blocks are given
        given: dict[int, str] = {}
        for index in first:
            these, others = _leaves(first[index]), _leaves(other[index])
            if len(these) != len(others):
                raise _of_tokens(index)
            reads[index] = {}
            for place, leaf in enumerate(these):
                if isinstance(leaf, Returned):
                    reads[index][place] = Carried(leaf.name)
                elif is_store(leaf):
                    name = stores.setdefault(id(leaf), f"store{len(stores)}")
                    reads[index][place] = Store(name, type(leaf))
                elif not isinstance(leaf, _PLAIN):
                    raise ModelError(
                        f"block {index} is given a `{type(leaf).__name__}`, "
                        "which may carry state between blocks",
                        hint=HINT,
                    )
                elif not _same(leaf, others[place]):
                    if not isinstance(leaf, Tensor):
                        raise _of_tokens(index)
                    name = given.setdefault(id(leaf), f"{GIVEN}{index}.{place}")
                    reads[index][place] = Carried(name)
        if given:
            _must_be_of_tokens(first, moved())
        return cls(reads)

    def settle(self, recorded: Recorded, form: Form | None) -> tuple[dict[int, Arguments], Beside]:
        """Return arguments without what differs between batches, and what is given of these."""
        tensors: dict[str, Tensor] = {}
        settled = {}
        for index, arguments in recorded.items():
            links = self.reads.get(index, {})
            links_in_order = (links.get(place) for place in count())

            def link_of(leaf: Any, links: Iterator[_Link | None] = links_in_order) -> Any:
                link = next(links)
                if isinstance(link, Carried) and link.name.startswith(GIVEN):
                    tensors[link.name] = leaf.contiguous()
                return leaf if link is None else link

            before, after = arguments.changed(link_of)
            settled[index] = replace(
                arguments,
                before=before,
                after=after,
                form=form,
                index=index,
                later=self.later(index),
            )
        return settled, tensors

    def later(self, index: int) -> frozenset[str]:
        """Return the names of all that blocks behind one read."""
        return frozenset(
            link.name
            for block, links in self.reads.items()
            if block > index
            for link in links.values()
        )

    def given(self, index: int) -> frozenset[str]:
        """Return the names of what the model gives a block of its tokens."""
        names = (link.name for link in self.reads.get(index, {}).values())
        return frozenset(name for name in names if name.startswith(GIVEN))

    def passed(self, index: int) -> frozenset[str]:
        """Return the names of what was given to blocks up to one, and to none behind it."""
        names = (name for block in self.reads if block <= index for name in self.given(block))
        return frozenset(names) - self.later(index)


def is_same_call(first: Arguments, other: Arguments) -> bool:
    """Return whether two calls have the same arguments beside hidden states."""
    these, those = _leaves(first), _leaves(other)
    return len(these) == len(those) and all(map(_same, these, those))


def is_store(value: object) -> bool:
    """Return whether a value is an empty mapping, into which blocks may write."""
    return isinstance(value, MutableMapping) and not value


def _must_be_of_tokens(first: Recorded, moved: Recorded) -> None:
    """Refuse what a model makes of hidden states between blocks."""
    for index in first:
        if not all(map(_is_of_tokens, _leaves(first[index]), _leaves(moved[index]))):
            raise ModelError(
                f"what block {index} is given is computed from hidden states between blocks",
                hint=HINT,
            )


def _is_of_tokens(leaf: object, moved: object) -> bool:
    return not isinstance(leaf, Tensor) or _same(leaf, moved)


def _of_tokens(index: int) -> ModelError:
    return ModelError(f"what block {index} is given depends on the tokens", hint=HINT)


def _leaves(arguments: Arguments) -> list[Any]:
    result: list[Any] = []
    arguments.changed(result.append)
    return result


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or torch.equal(a, b)
    if isinstance(a, MutableMapping) or isinstance(b, MutableMapping):
        return a is b or not (a or b)  # stores differ in what blocks wrote into them
    return type(a) is type(b) and a == b
