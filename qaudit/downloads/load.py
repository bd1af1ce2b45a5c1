"""The contents that subjects need: where each may come from, and which lie on the disk already.

Whoever prices a scan and whoever fetches for it look at the disk with the same eyes. Nothing here
asks the Hub: how large a running sum is follows from headers that a plan has read, and where none
is known (pickles), from the files, as if every number in them took two bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qaudit.checkpoints.places import folder_of
from qaudit.checkpoints.safetensors import headers
from qaudit.downloads.brought import Brought
from qaudit.downloads.itinerary import Sum, Trip
from qaudit.downloads.pieces import PIECE
from qaudit.downloads.running_sum import Shapes, growing_nbytes
from qaudit.errors import HubError, SourceError, UnreachableError
from qaudit.hub.weights import files_on_hub
from qaudit.types import Checkpoint, Ref, Subject

if TYPE_CHECKING:
    from qaudit.downloads.sums import Sums
    from qaudit.hub import Hub


class _BrokenError(HubError):
    """A file does not come, and the Hub answers."""


class Load:
    """The contents that subjects need, where each may come from, and which lie on the disk."""

    def __init__(self, hub: Hub, subjects: Sequence[Subject], brought: Brought) -> None:
        """Find every name of a content, the one that is cheapest to fetch first."""
        self._hub, self._brought = hub, brought
        fetcher = hub.fetcher
        found: dict[str, dict[Ref, Checkpoint]] = {}
        for subject in subjects:
            for checkpoint in _remote(subject):
                found.setdefault(checkpoint.content, {})[checkpoint.ref] = checkpoint
        self.sources = {
            key: sorted(names.values(), key=fetcher.nbytes_missing) for key, names in found.items()
        }
        missing = {key: fetcher.nbytes_missing(names[0]) for key, names in self.sources.items()}
        whole = {key for key, nbytes in missing.items() if not nbytes}
        self.present = frozenset(key for key in whole if key in brought)
        self.cached = frozenset(whole - self.present)
        self.nbytes = {
            key: self.sources[key][0].nbytes if key in brought else nbytes
            for key, nbytes in missing.items()
        }
        self.lying = {key: self.sources[key][0] for key in whole}
        self._broken_before = False  # whether the content before was given up

    def bring(self, key: str) -> Checkpoint:
        """Fetch and check a content under one of its names; fail if none of them can be had."""
        if key not in self.cached:
            self._brought.add(key)
        failures = []
        for checkpoint in self.sources[key]:
            try:
                self._hub.fetcher.weights(checkpoint)
            except HubError as error:
                failures.append(error)
                continue
            except UnreachableError as error:
                failures.append(self._of_this_one(checkpoint, error))
                continue
            self.lying[key] = checkpoint
            self._broken_before = False
            return checkpoint
        self._broken_before = any(isinstance(failure, _BrokenError) for failure in failures)
        raise failures[0]

    def _of_this_one(self, checkpoint: Checkpoint, error: UnreachableError) -> HubError:
        """Make it the failure of one checkpoint where the Hub answers and its files do not come.

        Two in a row are no longer an accident of one file: then the scan ends, as it does where
        the Hub does not answer either.
        """
        if self._broken_before:
            raise error
        self._hub.client.commit(checkpoint.ref.location, str(checkpoint.commit))
        return _BrokenError(error.message, hint="run the same command again later")

    def evict(self, key: str) -> None:
        """Take a content off the disk, but for what others share with it."""
        gone = self.lying.pop(key, None)
        for checkpoint in [gone] if gone else self.sources[key]:
            self._hub.fetcher.evict(checkpoint, keep=tuple(self.lying.values()))
        self._brought.remove(key)

    def stop(self) -> None:
        """Let whatever is being fetched end within a chunk, even if none comes any more."""
        self._hub.fetcher.stop()
        self._hub.client.break_off()

    def sum_of(self, soup: Subject, sums: Sums) -> Sum:
        """Return what the running sum of a soup takes, and how far it is."""
        running = sums.of(soup)
        shapes = running.shapes or self._shapes(soup)
        return Sum(
            members=tuple(checkpoint.content for checkpoint, _ in soup.members),
            growing_nbytes=growing_nbytes(shapes.values()) if shapes else _at_most(soup.first),
            merged_nbytes=soup.first.nbytes,
            begun=running.exists,
            added=running.added,
        )

    def _shapes(self, soup: Subject) -> Shapes:
        """Return the shapes of a soup's tensors, which are the same in all members."""
        for checkpoint, _ in soup.members:
            if checkpoint.commit is None or checkpoint.content in self.lying:
                try:
                    found = headers(folder_of(checkpoint))
                except SourceError:
                    continue
                return {name: tensor.shape for name, tensor in found.items()}
        for checkpoint in self._alike(soup):
            files, repo = files_on_hub(checkpoint), checkpoint.ref.location
            known = self._hub.listing.known_shapes(repo, str(checkpoint.commit), files)
            if known:
                return {name: shape for name, (_, shape) in known.items()}
        return {}

    def _alike(self, soup: Subject) -> list[Checkpoint]:
        """Return the members, and all whose files have the names and sizes that theirs have."""
        members = _remote(soup)
        forms = {_form(checkpoint) for checkpoint in members}
        others = [c for names in self.sources.values() for c in names if _form(c) in forms]
        return list(dict.fromkeys([*members, *others]))


def ask_for_shapes(soup: Subject, hub: Hub) -> None:
    """Read the headers of one member if none of them lies here, so that a sum can be priced."""
    members = _remote(soup)
    if len(members) < len(soup.members):
        return
    for checkpoint in members:
        if not hub.fetcher.nbytes_missing(checkpoint):
            return
    first = soup.first
    if "pickle" not in first.requires:
        hub.listing.shapes(first.ref.location, str(first.commit), files_on_hub(first))


def _at_most(checkpoint: Checkpoint) -> int:
    """Bound what a sum takes where no shape is known."""
    return 4 * checkpoint.nbytes + min(8 * PIECE, 4 * checkpoint.nbytes)


def _form(checkpoint: Checkpoint) -> tuple[object, ...]:
    files = tuple((file.name, file.nbytes) for file in checkpoint.files)
    return checkpoint.ref.location, checkpoint.ref.subfolder, files


def _remote(subject: Subject) -> list[Checkpoint]:
    return [checkpoint for checkpoint, _ in subject.members if checkpoint.commit is not None]


def trip_of(
    subjects: Sequence[Subject], load: Load | None, budget: int | None, sums: Sums | None = None
) -> Trip:
    """Return what subjects need of a load: the same for whoever prices it and whoever fetches."""
    summed = enumerate(subjects) if load and sums else ()
    return Trip(
        needs=tuple(
            tuple(dict.fromkeys(c.content for c in _remote(subject))) if load else ()
            for subject in subjects
        ),
        nbytes=load.nbytes if load else {},
        cached=load.cached if load else frozenset(),
        present=load.present if load else frozenset(),
        budget=budget,
        labels=tuple(subject.label for subject in subjects),
        sums={
            position: load.sum_of(subject, sums)
            for position, subject in summed
            if load and sums and sums.can_sum(subject)
        },
    )
