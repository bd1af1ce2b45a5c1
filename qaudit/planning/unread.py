"""Files of the Hub that hold nothing that is read: they are not downloaded.

The towers of a wrapper, and lists of blocks that predict further tokens, are often in shards of
their own. Which these are is known from the configuration and the index, without a weight. What a
plan leaves out does not depend on what is on the disk. Of files that are quantized all are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from qaudit.checkpoints.configuration import is_own_code, read_configuration
from qaudit.checkpoints.safetensors import INDEX, weight_map
from qaudit.errors import QauditError
from qaudit.formats.weights import quantization_of
from qaudit.support.sizes import size
from qaudit.types import Checkpoint, Resolved, Subject, WeightFile

if TYPE_CHECKING:
    from qaudit.hub import Hub

_Key = tuple[str | None, tuple[tuple[str, str], ...]]


def without_unread(resolved: Resolved, hub: Hub | None) -> tuple[Resolved, tuple[str, ...]]:
    """Return what is resolved without files that hold nothing that is read, and notes on them."""
    if hub is None or find_spec("torch") is None:  # an installation that only plans
        return resolved, ()
    seen: dict[_Key, frozenset[str]] = {}
    needed = {c: _needed(c, hub, seen) for c in _checkpoints(resolved)}
    notes = [_note(checkpoint) for checkpoint in needed.values() if checkpoint.unread]
    subjects = tuple(
        replace(s, members=tuple((needed[c], share) for c, share in s.members))
        for s in resolved.subjects
    )
    checkpoints = tuple(needed[c] for c in resolved.checkpoints)
    return replace(resolved, subjects=subjects, checkpoints=checkpoints), tuple(notes)


def whole(subject: Subject) -> Subject:
    """Return a subject with all files of its members, for what is written with their towers."""
    return replace(subject, members=tuple((c.whole, share) for c, share in subject.members))


def _checkpoints(resolved: Resolved) -> list[Checkpoint]:
    members = (c for subject in resolved.subjects for c, _ in subject.members)
    return list(dict.fromkeys((*resolved.checkpoints, *members)))


def _needed(checkpoint: Checkpoint, hub: Hub, seen: dict[_Key, frozenset[str]]) -> Checkpoint:
    """Return a checkpoint without the shards that hold nothing that is read."""
    if checkpoint.commit is None or len(checkpoint.whole.files) < 2:
        return checkpoint
    try:
        folder = hub.fetcher.settings(checkpoint)
        config = read_configuration(folder)
        if not _may_have_unread(config) or quantization_of(folder) is not None:
            return checkpoint
        placed = weight_map(folder / INDEX)
        key = (checkpoint.configuration_sha256, tuple(sorted(placed.items())))
        if key not in seen:
            from qaudit.model.skeleton import unread_in

            unread = unread_in(folder, list(placed))
            read = {file for name, file in placed.items() if name not in unread}
            seen[key] = frozenset(placed.values()) - read if read else frozenset()
    except QauditError:  # what is wrong with it is said where it is opened
        return checkpoint
    return _split(checkpoint.whole, seen[key])


def _may_have_unread(config: Mapping[str, Any]) -> bool:
    """Return whether a model has towers beside its text, or blocks that predict further tokens."""
    towers = any(k.endswith("_config") and k != "quantization_config" for k in config)
    return not is_own_code(config) and (towers or bool(config.get("num_nextn_predict_layers")))


def _split(checkpoint: Checkpoint, names: frozenset[str]) -> Checkpoint:
    def chosen(*, unread: bool) -> tuple[WeightFile, ...]:
        return tuple(file for file in checkpoint.files if (file.name in names) is unread)

    return replace(checkpoint, files=chosen(unread=False), unread=chosen(unread=True))


def _note(checkpoint: Checkpoint) -> str:
    names = ", ".join(f"`{file.name}`" for file in checkpoint.unread[:3])
    more = f" and {len(checkpoint.unread) - 3} more" if len(checkpoint.unread) > 3 else ""
    nbytes = size(sum(file.nbytes for file in checkpoint.unread))
    return f"not downloaded of `{checkpoint.label}`: {names}{more} ({nbytes}), which nothing reads"
