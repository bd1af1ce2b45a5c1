"""What `qaudit soup` does once its options are parsed: find the members, fetch, merge, write.

Members of the Hub are fetched as a scan fetches them: all of them if the disk holds all of them
beside the soup, and else one after another into a running sum. What is not ready yet is in a
hidden folder beside the soup, from where the same command goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from qaudit.cli.progress import Progress
from qaudit.cli.terminal import print_result, say
from qaudit.downloads.downloads import Downloads
from qaudit.downloads.record import RECORD_FILE
from qaudit.downloads.sources import read_shapes
from qaudit.downloads.sums import SUMS_FOLDER, Sums
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
from qaudit.recipe import recipe_of
from qaudit.report.format import listing
from qaudit.types import Subject


@dataclass(frozen=True)
class Request:
    """The options of one `soup`."""

    targets: tuple[str, ...]
    text: str | None
    family: str | None
    out: Path
    shard_nbytes: int
    disk_budget: int | None
    allow_pickle: bool
    quiet: bool

    @property
    def begun(self) -> Path:
        """Where what is not ready yet lies."""
        return self.out.with_name(f".{self.out.name}.begun")


def carry_out(request: Request) -> int:
    """Write the soup and print where it lies."""
    soups = [request.text] if request.text else None
    recipe = recipe_of(targets=list(request.targets), soups=soups, family=request.family)
    with Progress(quiet=request.quiet) as bars:
        hub = open_hub(watch=bars) if any(map(is_hub, recipe.targets)) else None
        found = resolve_soup(recipe, hub)
        members = [checkpoint for checkpoint, _ in found.members]
        refuse(members, allow_pickle=request.allow_pickle, trust_remote_code=False)
        if not request.quiet:
            say(_described(found))
        from qaudit.engine.measure import open_weights  # imports torch: after the words
        from qaudit.export.soup_folder import must_be_new, write_soup

        must_be_new(request.out)
        bound = _budget(found, hub, request.disk_budget, request) if hub is not None else None
        with _downloads(found, hub, bound, request) as downloads, downloads.ready(found) as merged:
            weights = merged or open_weights(
                found, allow_pickle=request.allow_pickle, folder=downloads.folder
            )
            out = write_soup(
                found,
                request.out,
                shard_nbytes=request.shard_nbytes,
                allow_pickle=request.allow_pickle,
                weights=weights,
                progress=lambda done, total, what: bars.counted("tensors", done, total),
            )
    print_result(str(out))
    return 0


def _budget(soup: Subject, hub: Hub, budget_nbytes: int | None, request: Request) -> int | None:
    """Return what members may take of the disk, if not all of them may stay there."""
    for checkpoint, _ in soup.members:
        hub.fetcher.settings(checkpoint)
    read_shapes(soup, hub)
    downloads = PlannedDownloads.of((soup,), (), hub, request.begun / RECORD_FILE)
    free = free_disk_nbytes()
    if free_elsewhere_nbytes(request.out) is None:  # the soup is written there as well
        free = max(0, free - soup.first.nbytes)
    bound = price_traffic(downloads, budget_nbytes, free).nbytes_disk_budget
    if not request.quiet:
        for said in summed_notes(downloads, bound):
            say(said)
    return bound


@contextmanager
def _downloads(
    soup: Subject, hub: Hub | None, budget_nbytes: int | None, request: Request
) -> Iterator[Downloads]:
    """Download the members, and leave nothing beside the soup once it is written."""
    downloads = Downloads(
        hub,
        (soup,),
        disk_budget_nbytes=budget_nbytes,
        record=request.begun / RECORD_FILE,
        sums=Sums(request.begun / SUMS_FOLDER, allow_pickle=request.allow_pickle),
    )
    with downloads:
        yield downloads
    with suppress(OSError):  # there is none, or it holds what another one began
        request.begun.rmdir()


def _described(soup: Subject) -> str:
    members = [f"{share:.4g} of {checkpoint.label}" for checkpoint, share in soup.members]
    return f"{soup.label}: {soup.merge} of {listing(members)}"
