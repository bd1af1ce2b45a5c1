"""Where a checkpoint's files are on this machine. No network, and no library of the Hub.

A Hub checkpoint is in the standard cache that every Hugging Face tool shares, under the
commit it was resolved to; the folder is where it will be even before it is fetched. The rules
for finding the cache are the client's own, repeated here because importing the client takes
longer than planning a local audit; a test compares the two.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePath

from qaudit.types import Checkpoint, TextFile


def hub_cache() -> Path:
    """Return the cache that Hugging Face tools share."""
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if cache:
        return _expanded(cache)
    home = os.environ.get("HF_HOME") or f"{_user_cache()}/huggingface"
    return _expanded(home) / "hub"


def own_cache() -> Path:
    return _expanded(os.environ.get("QAUDIT_CACHE") or f"{_user_cache()}/qaudit")


def _user_cache() -> str:
    return os.environ.get("XDG_CACHE_HOME") or "~/.cache"


def _expanded(path: str) -> Path:
    """Return a path of the environment with its `~` and its `$NAME` filled in, in that order."""
    return Path(os.path.expandvars(Path(path).expanduser()))


def repo_folder(repo: str, kind: str = "model") -> Path:
    """Return the folder of a repository in the shared cache; `kind` is model or dataset."""
    return hub_cache() / f"{kind}s--{repo.replace('/', '--')}"


def snapshot(repo: str, commit: str, kind: str = "model") -> Path:
    return repo_folder(repo, kind) / "snapshots" / commit


def folder_of(checkpoint: Checkpoint) -> Path:
    """Return the folder of a checkpoint's configuration, which exists once it is fetched."""
    return own_folder(checkpoint.base or checkpoint)


def own_folder(checkpoint: Checkpoint) -> Path:
    """Return the folder of a checkpoint's own weights, which exists once they are fetched."""
    ref = checkpoint.ref
    base = snapshot(ref.location, checkpoint.commit) if checkpoint.commit else Path(ref.location)
    return base / ref.subfolder if ref.subfolder else base


def is_gguf(place: PurePath | str) -> bool:
    return str(place).lower().endswith(".gguf")


def weights_of(checkpoint: Checkpoint, folder: Path) -> Path:
    """Return the place of weights: a folder, or the one GGUF file of a checkpoint."""
    names = [file.name for file in checkpoint.files]
    return folder / names[0] if len(names) == 1 and is_gguf(names[0]) else folder


def text_path(text: TextFile) -> Path:
    """Return the path of a text of the Hub, which exists once it is fetched."""
    return snapshot(text.repo, text.commit, "dataset") / text.path
