"""Refuse files that are not those of the plan, or that change while an audit reads them.

Their hashes are compared with those of the plan when they are opened, which costs nothing where
the hash is remembered, and their stamps when they have been read. Those in the shared cache of
the Hub are treated alike, because other programs may write there.

Of the small files beside weights those are in the plan that decide numbers: configuration, index,
tokenizer, quantization. Which of them a folder has is pinned, too: an `added_tokens.json` that was
not there when the plan was made changes the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path

from qaudit.checkpoints.places import folder_of, own_folder
from qaudit.checkpoints.stamps import Stamp, content_read, hash_of
from qaudit.errors import SourceError
from qaudit.types import Checkpoint, Subject, WeightFile
from qaudit.whole import read_regular

CONFIGURATION = "config.json"
QUANTIZATION = ("quantize_config.json", "quant_config.json")  # of older quantized repositories
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",  # sentencepiece
    "chat_template*",
    "additional_chat_templates/*.jinja",
)
LARGEST_SETTINGS_NBYTES = 100_000_000
"""A larger file is no setting, whatever its name."""

_PINNED = (CONFIGURATION, *QUANTIZATION, *INDEXES, *TOKENIZER)


def settings_in(folder: Path) -> tuple[WeightFile, ...]:
    """Return the small files of a folder with their hashes; one that cannot be read is left out."""
    pinned = []
    for path in sorted(_paths(folder)):
        with suppress(OSError):
            nbytes = path.stat().st_size
            if path.is_file() and nbytes < LARGEST_SETTINGS_NBYTES:
                name = path.relative_to(folder).as_posix()
                pinned.append(WeightFile(name, nbytes, hash_of(path)))
    return tuple(pinned)


def _paths(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from (p for p in folder.iterdir() if any(fnmatchcase(p.name, n) for n in _PINNED))
    yield from folder.glob("additional_chat_templates/*.jinja")
    if _names_code(folder / CONFIGURATION) or _names_code(folder / "tokenizer_config.json"):
        yield from folder.rglob("*.py")


def _names_code(path: Path) -> bool:
    with suppress(OSError, ValueError, RecursionError):
        if path.is_file() and path.stat().st_size < LARGEST_SETTINGS_NBYTES:
            return "auto_map" in json.loads(read_regular(path).decode())
    return False


def refuse_changed_settings(checkpoint: Checkpoint) -> None:
    """Raise for the first small file that is not as it was planned.

    Of a checkpoint on the Hub, files of other tools may be beside those of its commit.
    """
    if not checkpoint.settings:
        return
    folder, owner = folder_of(checkpoint), checkpoint.base or checkpoint
    planned = {file.name: file.sha256 for file in checkpoint.settings}
    if owner.commit is None:
        now = {file.name: file.sha256 for file in settings_in(folder)}
    else:
        now = {name: _as_planned(folder / name, sha256) for name, sha256 in planned.items()}
    for name in sorted(planned.keys() | now.keys()):
        if planned.get(name) != now.get(name):
            change = "was added" if name not in planned else "has changed"
            raise SourceError(
                f"`{name}` of `{checkpoint.label}` {change if name in now else 'was removed'} "
                "since the audit was planned",
                hint=f"restore `{folder / name}`, or plan again to measure what is there now",
            )


def _as_planned(path: Path, planned: str) -> str:
    """Return the hash of a file as its plan writes it."""
    with suppress(OSError):
        if planned.startswith("git:"):
            return f"git:{hash_of(path, 'git')}"
        return hash_of(path)
    return ""


@contextmanager
def unchanged_files(
    subject: Subject, folder: Callable[[Checkpoint], Path] = own_folder
) -> Iterator[dict[str, str]]:
    """Refuse files that are not those of the plan, when they are opened and after the block.

    Yields the hash of every file, by label and name.
    """
    hashes: dict[str, str] = {}
    opened: list[tuple[Path, Stamp | None, Checkpoint]] = []
    members = [checkpoint for checkpoint, _ in subject.members]
    bases = {c.base.content: c.base for c in members if c.base is not None and c.is_adapter}
    for checkpoint in (*members, *bases.values()):
        planned = {file.name: file.sha256 for file in checkpoint.files}
        read = planned | {file.name: file.sha256 for file in checkpoint.settings}
        hashes |= {f"{checkpoint.label}/{name}": sha256 for name, sha256 in read.items()}
        refuse_changed_settings(checkpoint)
        paths = [folder(checkpoint) / name for name in planned]
        opened += [(path, _stamp(path), checkpoint) for path in paths]
        if content_read(checkpoint, folder) != planned:
            raise _changed(checkpoint)
    yield hashes
    for checkpoint in members:
        refuse_changed_settings(checkpoint)
    for path, stamp, checkpoint in opened:
        if _stamp(path) != stamp:
            raise _changed(checkpoint)


def _stamp(path: Path) -> Stamp | None:
    try:
        return Stamp.of(path)
    except OSError:
        return None


def _changed(checkpoint: Checkpoint) -> SourceError:
    return SourceError(
        f"the weights of `{checkpoint.label}` have changed since the audit was planned",
        hint="run the same command again when nothing writes there any more",
    )
