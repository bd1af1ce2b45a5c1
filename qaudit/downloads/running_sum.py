"""A soup whose members are added to a sum on the disk one after another: bit for bit the same.

Where a merge is one weighted sum, no two members are needed at once. The sum is on the disk in
double precision, and each member is added by the steps that `core/merge.py` takes where all
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qaudit.checkpoints.places import folder_of
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.checkpoints.unchanged import unchanged_files
from qaudit.core import merge as merging
from qaudit.core.merge import WeightedSum
from qaudit.core.registry import parse_merge
from qaudit.downloads.pieces import PIECE, Piece, Shapes, SummedWeights, flush_folder, torch_dtype
from qaudit.errors import MachineError, SourceError, not_written
from qaudit.types import Checkpoint, Subject, digest
from qaudit.whole import remove_stale, write_whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from qaudit.model.blocks import Weights

FORMAT = 1
RECORD = "sum.json"
SUMS_FOLDER = "sums"
"""The folder of running sums in an output folder."""


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
        weighted = sum_of(soup)
        assert weighted is not None, f"`{soup.label}` is no sum"
        self._folder, self._sum = folder, weighted
        self._labels = [checkpoint.label for checkpoint, _ in soup.members]
        self._identity = digest(
            [FORMAT, [c.content for c, _ in soup.members], weighted.coefficients, weighted.divisor]
        )
        self._set_shapes(self._recorded_shapes())

    @property
    def exists(self) -> bool:
        """Return whether anything of this sum is on the disk."""
        return bool(self.shapes)

    @property
    def added(self) -> int:
        """How many members are in as a whole; of another one a part may be in."""
        return min((p.added for pieces in self._pieces.values() for p in pieces), default=0)

    def add(self, member: Weights, must_go_on: Callable[[], None] = lambda: None) -> None:
        """Add the next member, wherever it is not in yet; `must_go_on` may break it off."""
        turn = self.added
        try:
            if self.shapes:
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
        return SummedWeights(self.shapes, self._pieces)

    def remove(self) -> None:
        remove(self._folder)
        self._set_shapes({})

    def _recorded_shapes(self) -> Shapes:
        try:
            record = json.loads((self._folder / RECORD).read_text(encoding="utf-8"))
            if record["sum"] != self._identity:
                return {}
            return {str(name): tuple(map(int, shape)) for name, shape in record["tensors"]}
        except (OSError, ValueError, TypeError, KeyError):
            return {}

    def _set_shapes(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self._pieces = {
            name: tuple(
                Piece(
                    self._folder / f"{number:06}-{start // PIECE:05}.sum",
                    start,
                    min(start + PIECE, math.prod(shape)),
                )
                for start in range(0, math.prod(shape) or 1, PIECE)
            )
            for number, (name, shape) in enumerate(shapes.items())
        }

    def _begin(self, first: Weights) -> None:
        """Make a place for the sum, with the names and shapes of the first member."""
        shapes = {name: tuple(first.shape(name)) for name in first.names()}
        record = {"sum": self._identity, "tensors": [[n, list(s)] for n, s in shapes.items()]}
        remove(self._folder)
        self._folder.mkdir(parents=True)
        write_whole(self._folder / RECORD, json.dumps(record))
        self._set_shapes(shapes)

    def _must_agree(self, member: Weights, turn: int) -> None:
        """Refuse a member whose tensors are not those of the first; remove what a kill left."""
        from qaudit.model.merged import must_agree

        remove_stale(self._folder)
        must_agree(self._labels[0], self.weights(), self._labels[turn], member)

    def _add(self, name: str, piece: Piece, part: Tensor, turn: int) -> None:
        """Write a piece with a member more in it, unless that is done."""
        from qaudit.model.merged import must_be_equal

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
        slices = part.split(merging.SLICE)
        if dtype.is_floating_point:
            piece.write(turn + 1, dtype, self._sums(piece, slices, turn, dtype))
            return
        if head:  # whole numbers have no sum
            for first, other in zip(piece.slices(), slices, strict=True):
                must_be_equal(name, self._labels[0], first, self._labels[turn], other)
        piece.write(turn + 1, dtype, slices)

    def _sums(
        self, piece: Piece, parts: Sequence[Tensor], turn: int, dtype: torch.dtype
    ) -> Iterator[Tensor]:
        """Yield the sum with these slices in it; with the last member's, what it ends as."""
        coefficient, is_last = self._sum.coefficients[turn], turn == len(self._labels) - 1
        for wide, part in zip(piece.slices() if turn else parts, parts, strict=True):
            if turn:
                merging.add_to_sum(wide, part, coefficient)
                total = wide
            else:
                total = merging.start_sum(part, coefficient)
            if is_last:
                rounded = total.new_empty(total.shape, dtype=dtype)
                merging.end_sum(total, self._sum.divisor, rounded)
                total = rounded
            yield total


class Sums:
    """The running sums of a scan, beside its results.

    Each is in a folder named by its soup's label and content, so that an interrupted scan
    continues it and no two soups share one.
    """

    def __init__(self, folder: Path, *, allow_pickle: bool = False) -> None:
        self.folder, self._allow_pickle = folder, allow_pickle

    def of(self, soup: Subject) -> RunningSum:
        return RunningSum(self._place(soup), soup)

    def can_sum(self, subject: Subject) -> bool:
        """Return whether a subject can be summed up member by member."""
        contents = [checkpoint.content for checkpoint, _ in subject.members]
        return sum_of(subject) is not None and len(set(contents)) == len(contents)

    def keep(self, soups: Iterable[Subject]) -> None:
        """Remove every sum but those of these soups."""
        useful = {self._place(soup) for soup in soups}
        if self.folder.is_dir():
            for path in sorted(set(self.folder.iterdir()) - useful):
                remove(path)
        self._remove_empty_folder()

    def remove(self, soup: Subject) -> None:
        self.of(soup).remove()
        self._remove_empty_folder()

    def add(
        self,
        soup: Subject,
        member: Checkpoint,
        folder: Path,
        must_go_on: Callable[[], None] = lambda: None,
    ) -> None:
        """Add a member, whose weights are in `folder`, to the sum of its soup.

        It is compared with the first before anything of it is added: by its configuration here,
        by names and shapes of its tensors in the sum.
        """
        from qaudit.model.config import must_be_one_architecture

        first = soup.first
        must_be_one_architecture([first.label, member.label], [folder_of(first), folder_of(member)])
        summed = self.of(soup)
        alone = Subject(member.label, ((member, 1.0),))
        try:
            with unchanged_files(alone, lambda _: folder):
                summed.add(WeightFolder(folder, allow_pickle=self._allow_pickle), must_go_on)
        except SourceError:  # what was added is of no use
            summed.remove()
            raise

    def weights(self, soup: Subject) -> SummedWeights:
        return self.of(soup).weights()

    def _place(self, soup: Subject) -> Path:
        return self.folder / digest([soup.label, soup.content])[:32]

    def _remove_empty_folder(self) -> None:
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()


def nbytes_in(folder: Path) -> int:
    """Return what the files in a folder take of the disk."""
    if not folder.is_dir():
        return 0
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def remove(folder: Path) -> None:
    """Remove a folder, its record last, so that what is left is known for what it is."""
    if not folder.is_dir():
        return
    try:
        for path in sorted(folder.iterdir(), key=lambda path: path.name == RECORD):
            path.unlink()
        folder.rmdir()
    except OSError as error:
        raise not_written(folder, error) from error
