"""The contents that subjects need: where each can be downloaded, and which are on the disk.

Planning and downloading use the same view of the disk. Nothing here asks the Hub for sizes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qaudit.checkpoints.places import hub_cache
from qaudit.downloads.schedule import DownloadSchedule
from qaudit.errors import HubError, MachineError, UnreachableError, not_written
from qaudit.host import shared_file_system
from qaudit.types import Checkpoint, Ref, Subject
from qaudit.whole import write_whole

if TYPE_CHECKING:
    from qaudit.hub import Hub


RECORD_FILE = "fetched.json"
"""The name of the record in an output folder."""


class EvictionRecord:
    """The contents that a scan with a disk budget downloaded and has not evicted yet.

    A budget is for what a scan adds to the disk. A scan that is killed leaves weights behind; the
    next one has to count and evict them, and must not evict what was there before. So contents
    are recorded beside the results before their first byte comes. The file is there as long as
    the list is not empty; without a path nothing is recorded.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._contents = _recorded(path) if path else frozenset[str]()

    def __contains__(self, content: str) -> bool:
        return content in self._contents

    def add(self, content: str) -> None:
        self._set(self._contents | {content})

    def remove(self, content: str) -> None:
        self._set(self._contents - {content})

    def _set(self, contents: frozenset[str]) -> None:
        if self._path is None or contents == self._contents:
            return
        self._contents = contents
        if contents:
            write_whole(self._path, json.dumps(sorted(contents), indent=1))
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise not_written(self._path, error) from error


def refuse_shared_cache() -> None:
    """Refuse to remove weights from a cache whose readers on other hosts are not visible here."""
    if kind := shared_file_system(hub_cache()):
        raise MachineError(
            f"a disk budget removes weights from the cache `{hub_cache()}`, which is on a network "
            f"file system ({kind}): processes on other hosts may read them, and their locks are "
            "not visible here",
            hint="set HF_HUB_CACHE to a folder on a disk of this host, or make room for all "
            "weights and leave out `--disk-budget`",
        )


def _recorded(path: Path) -> frozenset[str]:
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # of a damaged list nothing is evicted
        return frozenset()
    return frozenset(map(str, contents)) if isinstance(contents, list) else frozenset()


class _FileError(HubError):
    """A file cannot be downloaded, while the Hub answers."""


class Sources:
    """The contents that subjects need, the checkpoints that hold each, and those on the disk."""

    def __init__(self, hub: Hub, subjects: Sequence[Subject], record: EvictionRecord) -> None:
        """Find every checkpoint of a content, the one that is cheapest to fetch first."""
        self._hub, self._record = hub, record
        fetcher = hub.fetcher
        places: dict[str, dict[Ref, Checkpoint]] = {}
        for subject in subjects:
            for checkpoint in _remote(subject):
                places.setdefault(checkpoint.content, {})[checkpoint.ref] = checkpoint
        self.sources = {
            key: sorted(refs.values(), key=fetcher.nbytes_missing) for key, refs in places.items()
        }
        missing = {key: fetcher.nbytes_missing(names[0]) for key, names in self.sources.items()}
        whole = {key for key, nbytes in missing.items() if not nbytes}
        self.present = frozenset(key for key in whole if key in record)
        self.cached = frozenset(whole - self.present)
        self.nbytes = {
            key: self.sources[key][0].nbytes if key in record else nbytes
            for key, nbytes in missing.items()
        }
        self.on_disk = {key: self.sources[key][0] for key in whole}
        self._failed_before = False  # whether the content before could not be had

    def fetch(self, key: str) -> Checkpoint:
        if key not in self.cached:
            self._record.add(key)
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
            self.on_disk[key] = checkpoint
            self._failed_before = False
            return checkpoint
        self._failed_before = any(isinstance(failure, _FileError) for failure in failures)
        raise failures[0]

    def _of_this_one(self, checkpoint: Checkpoint, error: UnreachableError) -> HubError:
        """Return the error of one checkpoint if the Hub answers and its files do not come.

        After two in a row the scan ends, as it does where the Hub does not answer.
        """
        if self._failed_before:
            raise error
        self._hub.client.commit(checkpoint.ref.location, str(checkpoint.commit))
        return _FileError(error.message, hint="run the same command again later")

    def evict(self, key: str) -> None:
        """Remove a content from the disk, but for files that others share with it."""
        gone = self.on_disk.pop(key, None)
        for checkpoint in [gone] if gone else self.sources[key]:
            self._hub.fetcher.evict(checkpoint, keep=tuple(self.on_disk.values()))
        self._record.remove(key)

    def stop(self) -> None:
        """End every download within a chunk, even if no bytes come any more."""
        self._hub.fetcher.stop()
        self._hub.client.break_off()


def _remote(subject: Subject) -> list[Checkpoint]:
    members = [checkpoint.base or checkpoint for checkpoint, _ in subject.members]
    return [checkpoint for checkpoint in members if checkpoint.commit is not None]


def download_schedule(
    subjects: Sequence[Subject], sources: Sources | None, budget: int | None
) -> DownloadSchedule:
    """Return the schedule that a plan prices and that `Downloads` follows."""
    labels = tuple(subject.label for subject in subjects)
    if sources is None:
        return DownloadSchedule(tuple(() for _ in subjects), {}, budget=budget, labels=labels)
    return DownloadSchedule(
        needs=tuple(tuple(dict.fromkeys(c.content for c in _remote(s))) for s in subjects),
        nbytes=sources.nbytes,
        cached=sources.cached,
        present=sources.present,
        budget=budget,
        labels=labels,
    )
