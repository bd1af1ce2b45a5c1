"""Recipe -> a soup on the disk: resolve the members, download, merge, write.

Members on the Hub are downloaded as for a scan: all of them if the disk has room for all beside
the soup, else one after another into a running sum. Unfinished work is in a hidden folder
beside the soup, from which the same command resumes.
"""

from __future__ import annotations

from pathlib import Path

from qaudit.downloads.downloads import Downloads
from qaudit.downloads.running_sum import SUMS_FOLDER, Sums
from qaudit.downloads.sources import RECORD_FILE, read_shapes
from qaudit.hub import Hub, open_hub
from qaudit.hub.series import is_hub
from qaudit.planning.permissions import refuse
from qaudit.planning.resolve import resolve_soup
from qaudit.planning.traffic import (
    PlannedDownloads,
    free_disk_nbytes,
    free_elsewhere_nbytes,
    price_traffic,
    summed_notes,
)
from qaudit.report.format import listing
from qaudit.settings import Recipe, RunOptions
from qaudit.types import SILENT, Subject, Watch


def export_soup(
    recipe: Recipe, out: Path, options: RunOptions, *, shard_nbytes: int, watch: Watch = SILENT
) -> Path:
    """Write the one soup of a recipe into a new folder, and return the folder."""
    hub = open_hub(watch=watch) if any(map(is_hub, recipe.targets)) else None
    soup = resolve_soup(recipe, hub)
    members = [checkpoint for checkpoint, _ in soup.members]
    refuse(members, allow_pickle=options.allow_pickle, trust_remote_code=False)
    shares = [f"{share:.4g} of {checkpoint.label}" for checkpoint, share in soup.members]
    watch.note(f"{soup.label}: {soup.merge} of {listing(shares)}")
    from qaudit.engine.measure import open_weights  # imports torch: after the message
    from qaudit.export.soup_folder import identity, must_be_new, write_soup
    from qaudit.export.unfinished import begun_folder

    must_be_new(out)
    with (
        begun_folder(out, identity(soup)) as begun,
        _downloads(soup, hub, (out, begun), options, watch) as downloads,
        downloads.ready(soup) as merged,
    ):
        weights = merged or open_weights(
            soup, allow_pickle=options.allow_pickle, folder=downloads.folder
        )
        return write_soup(
            soup,
            out,
            shard_nbytes=shard_nbytes,
            weights=weights,
            begun=begun,
            progress=lambda done, total, what: watch.count("tensors", done, total),
        )


def _downloads(
    soup: Subject, hub: Hub | None, places: tuple[Path, Path], options: RunOptions, watch: Watch
) -> Downloads:
    """Download the members; what is unfinished stays in the second place."""
    _, begun = places
    return Downloads(
        hub,
        (soup,),
        disk_budget_nbytes=_disk_budget(soup, hub, places, options.disk_budget, watch)
        if hub
        else None,
        record=begun / RECORD_FILE,
        sums=Sums(begun / SUMS_FOLDER, allow_pickle=options.allow_pickle),
    )


def _disk_budget(
    soup: Subject, hub: Hub, places: tuple[Path, Path], wanted_nbytes: int | None, watch: Watch
) -> int | None:
    """Return the disk space for members; none where all of them fit."""
    for checkpoint, _ in soup.members:
        hub.fetcher.settings(checkpoint)
    read_shapes(soup, hub)
    out, begun = places
    planned = PlannedDownloads.of((soup,), (), hub, begun / RECORD_FILE)
    free = free_disk_nbytes()
    if free_elsewhere_nbytes(out) is None:  # the soup goes to the same disk
        free = max(0, free - soup.first.nbytes)
    bound = price_traffic(planned, wanted_nbytes, free).nbytes_disk_budget
    for text in summed_notes(planned, bound):
        watch.note(text)
    return bound
