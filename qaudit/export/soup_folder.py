"""A soup as a folder that any library can load: the same bits that were measured, and a card.

An audit merges tensor by tensor while it streams and writes nothing. Here the soup is written,
from the same members by the same merge, one shard in memory at a time; config, tokenizer and
generation settings are those of the first member, as they were in the audit. The folder is made
under another name and renamed when it is complete.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from qaudit.checkpoints.safetensors import grouped, shard_name, write_index
from qaudit.checkpoints.stamps import folder_of
from qaudit.engine.block_pass import open_weights
from qaudit.errors import MachineError, SourceError
from qaudit.export.cards import soup_card
from qaudit.export.contents import copy_settings
from qaudit.export.unfinished import begun_folder, must_be_new, whole_folder
from qaudit.hub import Hub
from qaudit.model.blocks import Weights
from qaudit.support.sizes import size
from qaudit.text.tokenizer import other_tokenizers
from qaudit.types import Subject, digest
from qaudit.version import __version__

SHARD_NBYTES = 2 * 10**9

Progress = Callable[[int, int, str], None]


def write_soup(
    soup: Subject,
    out: Path,
    *,
    shard_nbytes: int = SHARD_NBYTES,
    weights: Weights | None = None,
    hub: Hub | None = None,
    begun: Path | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Path:
    """Write a soup's weights and everything that is needed to load them; return the folder.

    Without `weights` that are merged already, members are merged from their own folders; `begun`
    is the folder of unfinished work, if it is held already.
    """
    must_be_new(out)
    _must_go_together({member.label: folder_of(member) for member, _ in soup.members})
    weights = weights or open_weights(soup, allow_pickle=False)
    held = nullcontext(begun) if begun else begun_folder(out, identity(soup))
    with held as folder, whole_folder(out, folder) as partial:
        needed, free = soup.first.nbytes, shutil.disk_usage(partial).free
        if needed > free:
            raise MachineError(
                f"the soup takes {size(needed)} and {size(free)} are free at `{partial}`",
                hint="give a folder on another disk with `--out`",
            )
        _write_weights(weights, partial, shard_nbytes, progress)
        copy_settings(folder_of(soup.first), partial)
        (partial / "README.md").write_text(soup_card(soup, hub), encoding="utf-8")
    return out


def identity(soup: Subject) -> str:
    return digest(["soup", soup.label, soup.content, __version__])


def _must_go_together(folders: dict[str, Path]) -> None:
    """Refuse members without a configuration, or whose tokens mean different texts."""
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


def _write_weights(weights: Weights, folder: Path, shard_nbytes: int, progress: Progress) -> None:
    names, total = list(weights.names()), 0
    # Four bytes each: the widest that checkpoints come in. A shard may be under the limit.
    shards = list(grouped(names, lambda name: 4 * math.prod(weights.shape(name)), shard_nbytes))
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = shard_name(number, len(shards))
        tensors: dict[str, Tensor] = {}
        for name in shard:
            progress(len(where), len(names), name)
            tensors[name] = weights.read(name).contiguous()
            total += tensors[name].nbytes
            where[name] = file
        save_file(tensors, folder / file, metadata={"format": "pt"})
    progress(len(names), len(names), "")
    write_index(folder, where, total)
