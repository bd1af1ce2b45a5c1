"""What `qaudit soup` does once its options are parsed: find the members, fetch, merge, write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qaudit.cli.scanning import parse_nbytes
from qaudit.cli.speech import Bars, note, print_result
from qaudit.engine.permissions import refuse
from qaudit.engine.resolve import resolve_soup
from qaudit.recipe import recipe_of
from qaudit.report.format import listing
from qaudit.sources.hub import Hub, open_hub
from qaudit.sources.hub.series import is_hub
from qaudit.types import Subject


@dataclass(frozen=True)
class Request:
    """The options of one `soup`."""

    targets: tuple[str, ...]
    text: str | None
    family: str | None
    out: Path
    shard_size: str
    allow_pickle: bool
    quiet: bool


def carry_out(request: Request) -> int:
    """Write the soup and print where it lies."""
    shard_nbytes = parse_nbytes(request.shard_size)
    soups = [request.text] if request.text else None
    recipe = recipe_of(targets=list(request.targets), soups=soups, family=request.family)
    with Bars(quiet=request.quiet) as bars:
        hub = open_hub(watch=bars) if any(map(is_hub, recipe.targets)) else None
        found = resolve_soup(recipe, hub)
        members = [checkpoint for checkpoint, _ in found.members]
        refuse(members, allow_pickle=request.allow_pickle, trust_remote_code=False)
        if not request.quiet:
            note(_described(found))
        _fetch(found, hub)
        from qaudit.engine.soup_folder import write_soup  # imports torch: after the words

        out = write_soup(
            found,
            request.out,
            shard_nbytes=shard_nbytes,
            allow_pickle=request.allow_pickle,
            progress=lambda done, total, what: bars.counted("tensors", done, total),
        )
    print_result(str(out))
    return 0


def _fetch(soup: Subject, hub: Hub | None) -> None:
    for checkpoint, _ in soup.members:
        if hub is not None and checkpoint.commit is not None:
            hub.fetcher.settings(checkpoint)
            hub.fetcher.weights(checkpoint)


def _described(soup: Subject) -> str:
    members = [f"{share:.4g} of {checkpoint.label}" for checkpoint, share in soup.members]
    return f"{soup.label}: {soup.merge} of {listing(members)}"
