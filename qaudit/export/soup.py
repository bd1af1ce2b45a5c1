"""Recipe -> a soup on the disk: resolve the members, download, merge, write.

Members on the Hub are downloaded as for a scan. What an interrupted command downloaded is recorded
in a hidden folder beside the soup, and the same command resumes.

An audit merges tensor by tensor while it streams and writes nothing. Here the soup is written,
from the same members by the same merge, one shard in memory at a time, for any library to load:
config, tokenizer and generation settings are those of the first member, as they were in the audit.
The folder is made under another name and renamed when it is complete.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qaudit.checkpoints.safetensors import ShardWriter
from qaudit.checkpoints.stamps import folder_of, hub_cache
from qaudit.core.course import doubts_of_files
from qaudit.downloads.downloads import RECORD_FILE, Downloads, price_traffic
from qaudit.errors import SourceError
from qaudit.export import contents
from qaudit.host import free_disk_nbytes, shares_disk
from qaudit.hub import Hub, open_hub
from qaudit.hub.series import is_hub
from qaudit.planning.resolve import resolve_soup
from qaudit.planning.survey import refuse
from qaudit.report.format import listing
from qaudit.settings import Recipe, RunOptions
from qaudit.text.tokenizer import other_tokenizers
from qaudit.types import SILENT, Subject, Watch, digest
from qaudit.version import __version__

if TYPE_CHECKING:
    from qaudit.model.blocks import Weights

SHARD_NBYTES = 2 * 10**9


def export_soup(recipe: Recipe, out: Path, options: RunOptions, *, watch: Watch = SILENT) -> Path:
    contents.must_be_new(out)
    hub = open_hub(watch=watch) if any(map(is_hub, recipe.targets)) else None
    soup = resolve_soup(recipe, hub)
    shares = [f"{share:.4g} of {checkpoint.label}" for checkpoint, share in soup.members]
    watch.note(f"{soup.label}: {soup.merge} of {listing(shares)}")
    refuse_members(soup, options, watch)
    from qaudit.engine.block_pass import open_weights  # imports torch: after the message

    identity = digest(["soup", soup.label, soup.content, __version__])

    with (
        contents.begun_folder(out, identity) as begun,
        _downloads(soup, hub, (out, begun), options.disk_budget) as downloads,
        downloads.ready(soup),
    ):
        weights = open_weights(soup, allow_pickle=options.allow_pickle, folder=downloads.folder)
        return write_soup(soup, out, weights, begun, hub, watch)


def refuse_members(subject: Subject, options: RunOptions, watch: Watch) -> None:
    """Refuse checkpoints that are not read, and say what is odd, such as weights beside others."""
    members = [checkpoint for checkpoint, _ in subject.members]
    refuse(members, allow_pickle=options.allow_pickle, trust_remote_code=False)
    for checkpoint in members:
        for text in doubts_of_files(checkpoint.suspect):
            watch.note(f"{checkpoint.label}: {text}")


def _downloads(
    soup: Subject, hub: Hub | None, places: tuple[Path, Path], wanted_nbytes: int | None
) -> Downloads:
    out, begun = places
    record, budget = begun / RECORD_FILE, None
    if hub is not None:
        for checkpoint, _ in soup.members:
            hub.fetcher.settings(checkpoint)
        free = free_disk_nbytes(hub_cache())
        if shares_disk(out, hub_cache()):  # the soup goes to the same disk
            free = max(0, free - soup.first.nbytes)
        traffic = price_traffic(hub, (soup,), (), wanted_nbytes, free, record)
        budget = traffic.nbytes_disk_budget
    return Downloads(hub, (soup,), disk_budget_nbytes=budget, record=record)


def write_soup(
    soup: Subject,
    out: Path,
    weights: Weights,
    begun: Path,
    hub: Hub | None = None,
    watch: Watch = SILENT,
) -> Path:
    """Write a soup's weights and everything that is needed to load them; return the folder.

    `begun` is the folder of unfinished work.
    """
    folders = {member.label: folder_of(member) for member, _ in soup.members}
    for folder in folders.values():
        if not (folder / "config.json").is_file():
            raise SourceError(
                f"no `config.json` in `{folder}`",
                hint="a checkpoint folder has one beside its weights",
            )
    if pair := other_tokenizers(folders):
        raise SourceError(
            f"`{pair[0]}` and `{pair[1]}` cannot be merged: their tokenizers differ",
            hint="a soup needs members that were trained on the same tokens",
        )
    with contents.whole_folder(out, begun) as partial:
        contents.must_fit(partial, soup.first.nbytes, "the soup takes {}")
        shards, names = ShardWriter(partial, SHARD_NBYTES), list(weights.names())
        for number, name in enumerate(names):
            watch.count("tensors", number, len(names))
            shards.add({name: weights.read(name).contiguous()})
        shards.finish()
        watch.count("tensors", len(names), len(names))
        contents.copy_settings(folder_of(soup.first), partial)
        (partial / contents.README).write_text(contents.soup_card(soup, hub), encoding="utf-8")
    return out
