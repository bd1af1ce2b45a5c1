"""What parts measured in another folder, copied into this one: by content, never over anything."""

from __future__ import annotations

import shutil
from pathlib import Path

from qaudit.errors import UsageError, not_written
from qaudit.executors.on_disk import OnDisk, evidence_of
from qaudit.saved.hashes import FolderHashes
from qaudit.saved.parts import last_round, read_round, read_run, read_unit, unit_path, write_unit
from qaudit.saved.results import sha256_of
from qaudit.types import Run, units_of
from qaudit.whole import partial_name


def merge(source: Path, out: Path, run: Run) -> int:
    """Copy the units that `out` lacks; returns how many. Both folders have the same plan."""
    other, _ = read_run(source)
    if other.identity != run.identity:
        raise UsageError(
            f"`{source}` was measured by another plan than `{out}`",
            hint="copy the folder of the plan to each place, and run the parts there",
        )
    here, there = OnDisk(run, out), OnDisk(run, source)
    copied = 0
    for number in range(1, last_round(out) + 1):
        for unit in units_of(read_round(run, out, number)):
            mine, document = read_unit(run, unit, out), read_unit(run, unit, source)
            whole = here.is_whole(mine) and mine is not None and mine.error is None
            if not whole and document is not None and there.is_whole(document):
                for name in dict.fromkeys(evidence_of(document)):
                    _copy(source / name, out / name)
                write_unit(document, unit_path(run, unit, out))
                copied += 1
    return copied


def _copy(source: Path, path: Path) -> None:
    partial = partial_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, partial)
        FolderHashes(path.parent).record(path.name, sha256_of(partial))
        partial.replace(path)
    except OSError as error:
        raise not_written(path, error) from error
    finally:
        partial.unlink(missing_ok=True)
