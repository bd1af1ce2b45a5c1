"""A soup whose members are added to a sum on the disk one after another: bit for bit the same.

Where a merge is one weighted sum, no two members are needed at once. The sum is on the disk in
double precision, and each member is added by the steps that `core/combine.py` takes where all
members are side by side. After the last member the sum is divided, rounded once to the dtype of
the first member, and takes no more than that did.

The sum is stored in pieces, each with or without a member (`pieces`); after a kill, a member is
added where it is missing. A record names what is summed, by content and weight, and any other
sum in its place counts as nothing. Given up: checksums, because what could damage a piece later
can damage a result too; and a journal for writing in place, which would write everything twice
to save the room of one piece.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from qaudit.core import combine
from qaudit.core.merge import WeightedSum
from qaudit.core.registry import parse_merge
from qaudit.downloads.pieces import PIECE, Piece, flush, flush_folder, torch_dtype
from qaudit.errors import MachineError, not_written
from qaudit.types import Subject, digest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from qaudit.model.blocks import Weights

FORMAT = 1
RECORD = "sum.json"
Shapes = Mapping[str, tuple[int, ...]]


def sum_of(subject: Subject) -> WeightedSum | None:
    """Return the sum that a soup is, or None if its members are needed side by side."""
    if subject.merge is None or subject.is_search or subject.is_release:
        return None
    return parse_merge(subject.merge).as_sum([share for _, share in subject.members])


def growing_nbytes(shapes: Iterable[Sequence[int]]) -> int:
    """Return what a sum takes of the disk at most, while members are added to it."""
    counts = [math.prod(shape) for shape in shapes]
    return 8 * (sum(counts) + min(PIECE, max(counts, default=0)))


class RunningSum:
    """The sum of those members of a soup that have passed by, in a folder of its own."""

    def __init__(self, folder: Path, soup: Subject) -> None:
        """Read the record of the folder; anything but a sum of this soup counts as nothing."""
        formed = sum_of(soup)
        assert formed is not None, f"`{soup.label}` is no sum"
        self._folder, self._formed = folder, formed
        self._labels = [checkpoint.label for checkpoint, _ in soup.members]
        self._identity = digest(
            [FORMAT, [c.content for c, _ in soup.members], formed.coefficients, formed.divisor]
        )
        self._shapes = self._recorded()

    @property
    def exists(self) -> bool:
        """Return whether anything of this sum is on the disk."""
        return bool(self._shapes)

    @property
    def shapes(self) -> Shapes:
        """The shapes of its tensors, as far as it exists."""
        return self._shapes

    @property
    def added(self) -> int:
        """How many members are in as a whole; of another one a part may be in."""
        return min((piece.added for some in self._pieces.values() for piece in some), default=0)

    @property
    def is_whole(self) -> bool:
        """Say whether every member is in."""
        return self.added == len(self._labels)

    @property
    def nbytes(self) -> int:
        """Bytes of it on the disk."""
        return nbytes_in(self._folder)

    def add(self, member: Weights, must_go_on: Callable[[], None] = lambda: None) -> None:
        """Add the next member, wherever it is not in yet; `must_go_on` may break it off."""
        turn = self.added
        try:
            if self._shapes:
                self._must_agree(member, turn)
            else:
                self._begin(member)
            for name, pieces in self._pieces.items():
                if any(piece.added <= turn for piece in pieces):
                    flat = member.read(name).reshape(-1)
                    for piece in pieces:
                        must_go_on()
                        self._add(name, piece, flat[piece.start : piece.stop], turn)
            flush_folder(self._folder)
        except OSError as error:
            raise not_written(self._folder, error) from error

    def weights(self) -> SummedWeights:
        """Return the merged tensors, once every member is in."""
        return SummedWeights(self._shapes, self._pieces)

    def remove(self) -> None:
        """Take the sum off the disk."""
        remove(self._folder)
        self._set_shapes({})

    # ---------------------------------------------------------------------------- what is there

    def _recorded(self) -> Shapes:
        try:
            record = json.loads((self._folder / RECORD).read_text(encoding="utf-8"))
            if record["sum"] != self._identity:
                return {}
            return {str(name): tuple(map(int, shape)) for name, shape in record["tensors"]}
        except (OSError, ValueError, TypeError, KeyError):
            return {}

    def _set_shapes(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self.__dict__.pop("_pieces", None)

    @cached_property
    def _pieces(self) -> dict[str, tuple[Piece, ...]]:
        return {
            name: tuple(
                Piece(
                    self._folder / f"{number:06}-{start // PIECE:05}.sum",
                    start,
                    min(start + PIECE, math.prod(shape)),
                )
                for start in range(0, math.prod(shape) or 1, PIECE)
            )
            for number, (name, shape) in enumerate(self._shapes.items())
        }

    # ------------------------------------------------------------------------------- one member

    def _begin(self, first: Weights) -> None:
        """Make a place for the sum, with the names and shapes of the first member."""
        shapes = {name: tuple(first.shape(name)) for name in first.names()}
        record = {"sum": self._identity, "tensors": [[n, list(s)] for n, s in shapes.items()]}
        remove(self._folder)
        self._folder.mkdir(parents=True)
        partial = self._folder / f"{RECORD}.partial"
        with partial.open("wb") as file:
            file.write(json.dumps(record).encode())
            flush(file)
        partial.replace(self._folder / RECORD)
        self._set_shapes(shapes)

    def _must_agree(self, member: Weights, turn: int) -> None:
        """Refuse a member whose tensors are not those of the first; clear what a kill left."""
        from qaudit.model.merged import must_agree

        for partial in self._folder.glob("*.partial"):
            partial.unlink()
        must_agree(self._labels[0], self.weights(), self._labels[turn], member)

    def _add(self, name: str, piece: Piece, part: Tensor, turn: int) -> None:
        """Write a piece with a member more in it, unless that is done."""
        head = piece.head
        added = head.added if head else 0
        if added > turn:
            return
        if added < turn:
            raise MachineError(
                f"the running sum in `{self._folder}` was changed while it was added to",
                hint="let one scan at a time write there, then run the same command again",
            )
        dtype = torch_dtype(head.result) if head else part.dtype
        slices = part.split(combine.SLICE)
        if dtype.is_floating_point:
            piece.write(turn + 1, dtype, self._sums(piece, slices, turn, dtype))
        else:
            if head:
                self._must_be_equal(name, piece, slices, turn)
            piece.write(turn + 1, dtype, slices)

    def _sums(
        self, piece: Piece, parts: Sequence[Tensor], turn: int, dtype: torch.dtype
    ) -> Iterator[Tensor]:
        """Yield the sum with these slices in it; with the last member's, what it ends as."""
        coefficient, last = self._formed.coefficients[turn], turn == len(self._labels) - 1
        for wide, part in self._paired(piece, parts, turn):
            if turn:
                combine.add(wide, part, coefficient)
            else:
                wide = combine.begun(part, coefficient)
            if last:
                ended = wide.new_empty(wide.shape, dtype=dtype)
                combine.end(wide, self._formed.divisor, ended)
                yield ended
            else:
                yield wide

    def _paired(
        self, piece: Piece, parts: Sequence[Tensor], turn: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair what is in the file with what comes to it; in the beginning nothing is."""
        return zip(piece.slices() if turn else parts, parts, strict=True)

    def _must_be_equal(self, name: str, piece: Piece, parts: Sequence[Tensor], turn: int) -> None:
        """Refuse whole numbers that differ: they have no sum."""
        from qaudit.model.merged import must_be_equal

        for first, other in zip(piece.slices(), parts, strict=True):
            must_be_equal(name, self._labels[0], first, self._labels[turn], other)


class SummedWeights:
    """The tensors of a whole sum; may be read by several threads."""

    def __init__(self, shapes: Shapes, pieces: Mapping[str, Sequence[Piece]]) -> None:
        """Take the tensors' shapes, and the files of their elements."""
        self._shapes, self._pieces = shapes, pieces

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; those of the first member, whose dtypes they have."""
        heads = (piece.head for pieces in self._pieces.values() for piece in pieces)
        return sum(head.nbytes for head in heads if head)

    def names(self) -> Sequence[str]:
        """Return the tensor names, in the order of the first member."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        """Read a merged tensor."""
        import torch

        pieces = self._pieces[name]
        head = pieces[0].head
        merged = torch.empty(
            math.prod(self._shapes[name]), dtype=torch_dtype(head.result if head else "")
        )
        for piece in pieces:
            target = merged[piece.start : piece.stop]
            for place, part in zip(target.split(combine.SLICE), piece.slices(), strict=True):
                place.copy_(part)
        return merged.reshape(self._shapes[name])


def nbytes_in(folder: Path) -> int:
    """Return what the files in a folder take of the disk."""
    if not folder.is_dir():
        return 0
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def remove(folder: Path) -> None:
    """Take a folder off the disk, its record last, so that what is left is known for what it is."""
    if not folder.is_dir():
        return
    try:
        for path in sorted(folder.iterdir(), key=lambda path: path.name == RECORD):
            path.unlink()
        folder.rmdir()
    except OSError as error:
        raise not_written(folder, error) from error
