"""Where the data of tasks come from: files of the Hub at a commit, or a folder.

Data are pinned like texts: a file at a commit, known by the hash of its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qaudit.errors import HubError, SourceError
from qaudit.items import files
from qaudit.items.harness import Leaf
from qaudit.saved.results import sha256_of
from qaudit.types import TextFile
from qaudit.whole import read_regular

if TYPE_CHECKING:
    from qaudit.hub import Hub
    from qaudit.hub.listing import Listing


class NotPinnedError(HubError):
    """A plan has no files of a data set."""


@dataclass(frozen=True)
class Data:
    """The data of a task: splits of a repository of the Hub."""

    repo: str
    name: str | None
    splits: tuple[str, ...]
    revision: str

    @classmethod
    def of(cls, leaf: Leaf) -> Data:
        config = leaf.config
        path, kwargs = str(config.get("dataset_path") or ""), config.get("dataset_kwargs") or {}
        if "data_files" in kwargs or "data_dir" in kwargs or "custom_dataset" in config:
            raise SourceError(
                f"`{leaf.name}` chooses among the files of `{path}` itself",
                hint="run it with lm-eval and `qaudit import` its answers",
            )
        name = config.get("dataset_name")
        return cls(path, name, leaf.splits, str(kwargs.get("revision") or "main"))

    def source(self, split: str) -> str:
        """Return the name under which a plan pins the files of a split."""
        return f"hf://datasets/{self.repo}#{self.name or 'default'}/{split}"

    @property
    def readme(self) -> str:
        return f"hf://datasets/{self.repo}#{files.README}"


def find(hub: Hub, data: Data) -> Iterator[TextFile]:
    """Yield the README of a data set, and the files of the splits that are read."""
    listing: Listing = hub.listing
    commit = listing.commit(data.repo, data.revision, kind="dataset")
    by_path = {file.path: file for file in listing.files(data.repo, commit, kind="dataset")}

    def text(source: str, path: str) -> TextFile:
        return TextFile(
            source, data.repo, commit, path, by_path[path].nbytes, by_path[path].identity
        )

    readme = None
    if files.README in by_path and not files.is_archived(data.repo):
        about = text(data.readme, files.README)
        readme = hub.fetcher.text(about).read_bytes()
        yield about
    splits = files.split_files(data.repo, data.name, data.splits, by_path, readme)
    for split, paths in splits.items():
        yield from (text(data.source(split), path) for path in paths)


def pinned(data: Data, texts: Sequence[TextFile]) -> list[TextFile]:
    sources = {data.source(split) for split in data.splits}
    pinned_texts = [text for text in texts if text.source in sources]
    if {text.source for text in pinned_texts} != sources:
        raise NotPinnedError(
            f"the files of `{data.repo}` were not looked up when the audit was planned",
            hint="plan the audit again: `--set update=true`",
        )
    return [*(text for text in texts if text.source == data.readme), *pinned_texts]


@lru_cache(maxsize=256)
def local(root: Path, data: Data) -> tuple[Path, files.Splits]:
    folder = files.local_folder(root, data.repo)
    if folder is None:
        raise SourceError(
            f"there is no folder `{data.repo}` in `{root}`",
            hint=f"hf download --repo-type dataset {data.repo} --local-dir {root / data.repo}",
        )
    readme = folder / files.README
    about = read_regular(readme) if readme.is_file() else None
    paths = files.paths_in(folder)
    return folder, files.split_files(data.repo, data.name, data.splits, paths, about)


def rows_here(leaf: Leaf, task_data: str | None) -> int | None:
    """Count the documents of a task whose data are on this machine, if its files can be counted."""
    data = Data.of(leaf)
    if not data.splits:
        return None
    split = data.splits[0]
    if task_data is None:
        return None
    folder, splits = local(Path(task_data), data)
    return files.rows_of(folder / path for path in splits[split])


def files_sha256(file: Path | None) -> list[Any]:
    """Identify a task's file and those beside it, which it may include or call."""
    if file is None:
        return []
    beside = sorted(
        path for path in file.parent.iterdir() if path.suffix in (".yaml", ".yml", ".py", "")
    )
    return [(path.name, sha256_of(path)) for path in beside if path.is_file()]
