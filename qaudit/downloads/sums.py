"""The running sums of a scan: their folders, their members, and which are of no use.

Each is beside the results, in a folder named by its soup's label and content, so that an
interrupted scan continues it and no two soups share one. A sum is removed when its soup is
measured; sums that belong to no soup of a scan are removed as it begins.

A member is compared with the first before anything of it is added: by its configuration here, by
names and shapes of its tensors in the sum. Its files must not change while they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from qaudit.checkpoints.places import folder_of
from qaudit.downloads.running_sum import RunningSum, SummedWeights, remove, sum_of
from qaudit.errors import SourceError
from qaudit.types import Checkpoint, Subject, digest

SUMS_FOLDER = "sums"
"""The folder of running sums in an output folder."""


class Sums:
    """The running sums in one folder."""

    def __init__(self, folder: Path, *, allow_pickle: bool = False) -> None:
        """Look for them in `folder`, which need not be there."""
        self.folder, self._allow_pickle = folder, allow_pickle

    def of(self, soup: Subject) -> RunningSum:
        """Return the sum of a soup, as far as it is on the disk."""
        return RunningSum(self._place(soup), soup)

    def can_sum(self, subject: Subject) -> bool:
        """Say whether a subject can be summed up member by member."""
        contents = [checkpoint.content for checkpoint, _ in subject.members]
        return sum_of(subject) is not None and len(set(contents)) == len(contents)

    def keep(self, soups: Iterable[Subject]) -> None:
        """Remove every sum but those of these soups."""
        kept = {self._place(soup) for soup in soups}
        if self.folder.is_dir():
            for path in sorted(set(self.folder.iterdir()) - kept):
                remove(path)
            self._leave()

    def remove(self, soup: Subject) -> None:
        """Remove the sum of a soup."""
        self.of(soup).remove()
        if self.folder.is_dir():
            self._leave()

    def add(
        self,
        soup: Subject,
        member: Checkpoint,
        folder: Path,
        must_go_on: Callable[[], None] = lambda: None,
    ) -> None:
        """Add a member, whose weights are in `folder`, to the sum of its soup."""
        from qaudit.checkpoints.safetensors import WeightFolder
        from qaudit.checkpoints.stamps import unchanged_weights
        from qaudit.model.agreement import must_be_one_architecture

        first = soup.first
        must_be_one_architecture([first.label, member.label], [folder_of(first), folder_of(member)])
        summed = self.of(soup)
        alone = Subject(member.label, ((member, 1.0),))
        try:
            with unchanged_weights(alone, lambda _: folder):
                summed.add(WeightFolder(folder, allow_pickle=self._allow_pickle), must_go_on)
        except SourceError:  # what was added is of no use
            summed.remove()
            raise

    def weights(self, soup: Subject) -> SummedWeights:
        """Return the merged tensors of a soup whose members are all in."""
        return self.of(soup).weights()

    def _place(self, soup: Subject) -> Path:
        return self.folder / digest([soup.label, soup.content])[:32]

    def _leave(self) -> None:
        if not any(self.folder.iterdir()):
            self.folder.rmdir()
