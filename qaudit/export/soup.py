"""Recipe -> a soup on the disk: resolve the members, download, merge, write.

Members on the Hub are downloaded as for a scan. What an interrupted command downloaded is recorded
in a hidden folder beside the soup, and the same command resumes.
"""

from __future__ import annotations

from pathlib import Path

from qaudit.checkpoints.stamps import hub_cache
from qaudit.core.doubts import doubts_of_files
from qaudit.downloads.downloads import RECORD_FILE, Downloads
from qaudit.export.unfinished import begun_folder, must_be_new
from qaudit.hub import Hub, open_hub
from qaudit.hub.series import is_hub
from qaudit.planning.footprint import PlannedDownloads, free_disk_nbytes, price_traffic, shares_disk
from qaudit.planning.resolve import resolve_soup
from qaudit.planning.survey import refuse
from qaudit.report.format import listing
from qaudit.settings import Recipe, RunOptions
from qaudit.types import SILENT, Subject, Watch


def export_soup(recipe: Recipe, out: Path, options: RunOptions, *, watch: Watch = SILENT) -> Path:
    must_be_new(out)
    hub = open_hub(watch=watch) if any(map(is_hub, recipe.targets)) else None
    soup = resolve_soup(recipe, hub)
    members = [checkpoint for checkpoint, _ in soup.members]
    refuse(members, allow_pickle=options.allow_pickle, trust_remote_code=False)
    shares = [f"{share:.4g} of {checkpoint.label}" for checkpoint, share in soup.members]
    watch.note(f"{soup.label}: {soup.merge} of {listing(shares)}")
    note_doubts(soup, watch)
    from qaudit.engine.block_pass import open_weights  # imports torch: after the message
    from qaudit.export.soup_folder import identity, write_soup

    with (
        begun_folder(out, identity(soup)) as begun,
        _downloads(soup, hub, (out, begun), options.disk_budget) as downloads,
        downloads.ready(soup),
    ):
        weights = open_weights(soup, allow_pickle=options.allow_pickle, folder=downloads.folder)
        return write_soup(
            soup,
            out,
            weights=weights,
            hub=hub,
            begun=begun,
            progress=lambda done, total, what: watch.count("tensors", done, total),
        )


def note_doubts(subject: Subject, watch: Watch) -> None:
    """Say what is odd about the files of a subject, such as weights beside them that are unread."""
    for checkpoint, _ in subject.members:
        for text in doubts_of_files(checkpoint.suspect):
            watch.note(f"{checkpoint.label}: {text}")


def _downloads(
    soup: Subject, hub: Hub | None, places: tuple[Path, Path], wanted_nbytes: int | None
) -> Downloads:
    out, begun = places
    record = begun / RECORD_FILE
    if hub is None:
        return Downloads(None, (soup,), record=record)
    for checkpoint, _ in soup.members:
        hub.fetcher.settings(checkpoint)
    planned = PlannedDownloads.of((soup,), (), hub, record)
    free = free_disk_nbytes()
    if shares_disk(out, hub_cache()):  # the soup goes to the same disk
        free = max(0, free - soup.first.nbytes)
    budget = price_traffic(planned, wanted_nbytes, free).nbytes_disk_budget
    return Downloads(hub, (soup,), disk_budget_nbytes=budget, record=record)
