"""Local folders and lists of names as repos.

    ROOT/<owner>/<name>/<revision>/...            a model
    ROOT/datasets/<owner>/<name>/<revision>/...   a dataset
    .../<name>/repo.json                          optional settings, see `SETTINGS`

Folders of revisions become commits of `main` in natural order, and each is a tag that is called
like the folder, or a branch if the settings say so. A folder `main` is what `main` ends at, under
no other name. A folder may escape what a file system forbids: `stage1%2Fstep5` is `stage1/step5`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tests.support.hub.contents import (
    ATTRIBUTES,
    Blob,
    Commit,
    Kind,
    Repository,
    Varied,
    blob_in_memory,
    blob_of,
    blob_on_disk,
    extent_of,
)

SETTINGS = {
    "private": "bool",
    "gated": 'false, "auto" or "manual"',
    "readers": "users who may read although it is private or gated",
    "branch_per_revision": "bool: revisions are branches rather than tags",
    "main": "the revision where main points; null is a main with a README alone",
}
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def natural(text: str) -> list[tuple[int, str]]:
    """Sort numbers as numbers."""
    return [
        (int(part or 0), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", text)
    ]


def repositories_in(root: Path) -> list[Repository]:
    """Return every repo below a folder."""
    owners: list[tuple[Path, Kind]] = [(path, "model") for path in _folders(root)]
    owners = [(path, kind) for path, kind in owners if path.name != "datasets"]
    if (root / "datasets").is_dir():
        owners += [(path, "dataset") for path in _folders(root / "datasets")]
    return [
        repository_of(path, f"{owner.name}/{path.name}", kind)
        for owner, kind in owners
        for path in _folders(owner)
    ]


def _folders(path: Path) -> list[Path]:
    return sorted((p for p in path.iterdir() if p.is_dir()), key=lambda p: natural(p.name))


def repository_of(folder: Path, id_: str, kind: Kind) -> Repository:
    """Return the repo that a folder describes."""
    path, repo = folder / "repo.json", Repository(id_, kind)
    settings: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if unknown := set(settings) - set(SETTINGS):
        raise ValueError(f"{path}: unknown keys {sorted(unknown)}; there are {sorted(SETTINGS)}")
    base = _begin(repo)
    commits: dict[str, Commit] = {}
    for path in sorted(_folders(folder), key=lambda p: p.name == "main"):
        name = unquote(path.name)
        commits[name] = repo.commit(base | files_in(path), f"checkpoint {name}")
    named = repo.branches if settings.get("branch_per_revision") else repo.tags
    named |= {name: commit.id for name, commit in commits.items() if name != "main"}
    if "main" in settings:
        _point_main(repo, settings["main"])
    repo.private, repo.gated = settings.get("private", False), settings.get("gated", False)
    repo.readers = tuple(settings.get("readers", ()))
    return repo


def _begin(repo: Repository) -> dict[str, Blob]:
    """Make the commit that every repo of the Hub begins with; return its files."""
    base = {".gitattributes": blob_in_memory(".gitattributes", ATTRIBUTES)}
    repo.commit(base, "initial commit")
    return base


def _point_main(repo: Repository, revision: str | None) -> None:
    if revision is not None:
        repo.branches["main"] = repo.branches.get(revision) or repo.tags[revision]
        return
    first = next(iter(repo.commits.values()))
    readme = blob_in_memory("README.md", f"# {repo.id}\n\nSee the revisions.\n".encode())
    repo.commit({**first.files, "README.md": readme}, "Say what it is", parent=first.id)


def files_in(folder: Path, without: Collection[Path] = ()) -> dict[str, Blob]:
    """Return the files below a folder by their paths there."""
    paths = (p for p in sorted(folder.rglob("*")) if p.is_file() and p not in without)
    return {path.relative_to(folder).as_posix(): blob_on_disk(path) for path in paths}


# ---------------------------------------------- many names, one folder


def add_names(
    repo: Repository,
    names: Iterable[str],
    folder: Path,
    *,
    main: str | None,
    aliases: Mapping[str, str] | None = None,
    pretend_nbytes: int | None = None,
    hashed: bool = True,
) -> None:
    """Give a repo a branch per name, each with its own commit; see `Hub.add_names`."""
    base = _begin(repo)
    first = repo.branches["main"]
    weights = sorted(path for path in folder.rglob("*") if path.suffix in WEIGHTS)
    extents = _extents(weights, pretend_nbytes)
    shared = base | files_in(folder, without=weights)
    commits = {}
    for name in names:
        own = {}
        for path, (header_nbytes, nbytes) in extents.items():
            inside = path.relative_to(folder).as_posix()
            contents = Varied(path, f"{repo.key}@{name}/{inside}", header_nbytes, nbytes)
            made_up = None if hashed and pretend_nbytes is None else _made_up(contents.name)
            own[inside] = blob_of(path.name, contents, sha256=made_up)
        title = f"checkpoint {name}"
        commits[name] = repo.commit(shared | own, title, parent=first, branch=None)
    repo.branches |= {name: commit.id for name, commit in commits.items()}
    for name, other in (aliases or {}).items():
        files, title = commits[other].files, f"checkpoint {name}"
        repo.branches[name] = repo.commit(files, title, parent=first, branch=None).id
    _point_main(repo, main)


def _made_up(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _extents(weights: list[Path], pretend_nbytes: int | None) -> dict[Path, tuple[int, int]]:
    """Return where each file's data begins and its size, in proportion to what is pretended."""
    extents = {path: extent_of(path) for path in weights}
    if pretend_nbytes is None or not weights:
        return extents
    whole, left = sum(nbytes for _, nbytes in extents.values()), pretend_nbytes
    for path, (header_nbytes, nbytes) in extents.items():
        share = left if path == weights[-1] else pretend_nbytes * nbytes // whole
        extents[path] = (header_nbytes, share)
        left -= share
    return extents
