"""Requested tasks -> the files they need, and the items they become.

    find (while planning) -> fetch (before any weights) -> read

Data are pinned like texts: a file at a commit, known by the hash of its bytes. What is built is
kept, by everything that decides it: the tasks' own files, the data, the tokenizer, the number of
examples and of items. A task whose data cannot be had, or has no right answers, fails by itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qaudit.checkpoints.places import own_cache, snapshot
from qaudit.errors import (
    CorpusError,
    HubError,
    QauditError,
    SourceError,
    UnreachableError,
    UsageError,
)
from qaudit.items import files, harness
from qaudit.items.encoding import encoded
from qaudit.items.harness import Definition, Leaf
from qaudit.items.kept import ItemText, keep, kept
from qaudit.items.names import most_items, named
from qaudit.types import Item, Recipe, TextFile, Window, digest

if TYPE_CHECKING:
    from qaudit.hub import Hub
    from qaudit.hub.fetch import Fetcher
    from qaudit.hub.listing import Listing

VERSION = 1
"""Raised when the same tasks and data become other tokens."""

_LOCAL = frozenset({"json", "parquet", "csv", "text", "arrow", "pandas", "xml"})
"""What `datasets` reads by itself from files that a task names."""


@dataclass(frozen=True)
class _Data:
    """Where the data of a task come from: a repository of the Hub, or its own files."""

    repo: str
    name: str | None
    splits: tuple[str, ...]
    revision: str
    own_files: bool

    @classmethod
    def of(cls, leaf: Leaf) -> _Data:
        config = leaf.config
        path, kwargs = str(config.get("dataset_path") or ""), config.get("dataset_kwargs") or {}
        own = path in _LOCAL or Path(path).is_dir()
        if not own and (
            "data_files" in kwargs or "data_dir" in kwargs or "custom_dataset" in config
        ):
            raise SourceError(
                f"`{leaf.name}` chooses among the files of `{path}` itself",
                hint="name a folder with its data in a YAML file of your own",
            )
        name = config.get("dataset_name")
        return cls(path, name, leaf.splits, str(kwargs.get("revision") or "main"), own)

    def source(self, split: str) -> str:
        """Return the name under which a plan pins the files of a split."""
        return f"hf://datasets/{self.repo}#{self.name or 'default'}/{split}"

    @property
    def readme(self) -> str:
        return f"hf://datasets/{self.repo}#{files.README}"


def tasks_of(recipe: Recipe) -> tuple[Definition, ...]:
    """Return the tasks that a recipe requests; a wrong name is refused with the nearest."""
    if recipe.tasks and recipe.task_data and not Path(recipe.task_data).is_dir():
        raise UsageError(
            f"there is no folder `{recipe.task_data}`",
            hint="`--task-data` is a folder with data sets as org/name",
        )
    return harness.definitions(named(recipe.tasks)) if recipe.tasks else ()


def needs_hub(recipe: Recipe) -> bool:
    """Return whether data of a task are on the Hub."""
    if not recipe.tasks or recipe.task_data:
        return False
    return any(not _Data.of(leaf).own_files for one in tasks_of(recipe) for leaf in one.leaves)


# -------------------------------------------------------------------------------- find and fetch


def find_item_files(hub: Hub, recipe: Recipe) -> tuple[TextFile, ...]:
    """Resolve the data of every task to files at a commit; none of them is fetched."""
    found: dict[tuple[str, str], TextFile] = {}
    if recipe.task_data:
        return ()
    for one in tasks_of(recipe):
        for leaf in one.leaves:
            data = _Data.of(leaf)
            if data.own_files or (data.source(data.splits[0]), "") in found:
                continue
            try:
                some = _find(hub, data)
            except (HubError, UnreachableError, SourceError) as error:
                raise type(error)(
                    f"the data of task `{one.name}` cannot be had: {error.message}",
                    hint=error.hint or "leave the task out, or name a folder: `--task-data`",
                ) from error
            found |= {(text.source, text.path): text for text in some}
    return tuple(found.values())


def _find(hub: Hub, data: _Data) -> Iterator[TextFile]:
    """Yield the README of a data set, and the files of the splits that are read."""
    listing: Listing = hub.listing
    commit = listing.commit(data.repo, data.revision, kind="dataset")
    known = {file.path: file for file in listing.files(data.repo, commit, kind="dataset")}

    def text(source: str, path: str) -> TextFile:
        return TextFile(source, data.repo, commit, path, known[path].nbytes, known[path].identity)

    readme = None
    if files.README in known and not files.is_archived(data.repo):
        about = text(data.readme, files.README)
        readme = hub.fetcher.text(about).read_bytes()
        yield about
    splits = files.split_files(data.repo, data.name, data.splits, known, readme)
    for split, paths in splits.items():
        yield from (text(data.source(split), path) for path in paths)


def fetch_items(
    fetcher: Fetcher, recipe: Recipe, texts: Sequence[TextFile]
) -> dict[str, SourceError]:
    """Fetch and check the data of tasks; return why some of them cannot be had."""
    failed: dict[str, SourceError] = {}
    if recipe.task_data:
        return failed
    for one in tasks_of(recipe):
        for leaf in one.leaves:
            data = _Data.of(leaf)
            if data.own_files or one.name in failed:
                continue
            try:
                for text in _pinned(data, texts):
                    fetcher.text(text)
            except (HubError, UnreachableError) as error:
                failed[one.name] = SourceError(
                    f"its data cannot be had: {error.message}", hint=error.hint
                )
    return failed


def _pinned(data: _Data, texts: Sequence[TextFile]) -> list[TextFile]:
    sources = {data.source(split) for split in data.splits}
    pinned = [text for text in texts if text.source in sources]
    if {text.source for text in pinned} != sources:
        raise HubError(
            f"the files of `{data.repo}` were not looked up when the audit was planned",
            hint="plan the audit again: `--update`",
        )
    return [*(text for text in texts if text.source == data.readme), *pinned]


# ------------------------------------------------------------------------------------------ read


@dataclass(frozen=True, eq=False)
class Reading:
    """What turns tasks into items: a recipe, its pinned files, a tokenizer and a window."""

    recipe: Recipe
    texts: Sequence[TextFile]
    tokenizer_sha256: str
    context: int

    def key(self, one: Definition) -> str:
        """Identify the items of a task by everything that decides them."""
        recipe = self.recipe
        leaves = [
            (leaf.name, leaf.replaced, leaf.shots(recipe.task_shots), self._data(leaf))
            for leaf in one.leaves
        ]
        own = [_files_sha256(leaf.file) for leaf in one.leaves]
        about = (VERSION, harness.lm_eval_version(), harness.FEWSHOT_SEED, recipe.task_items)
        return digest([about, leaves, own, self.tokenizer_sha256, self.context])

    def folder(self, leaf: Leaf) -> tuple[Path, files.Splits] | None:
        """Return where the data of a task are, and the files of its splits; None: its own."""
        data = _Data.of(leaf)
        if data.own_files:
            return None
        if self.recipe.task_data:
            return _local(Path(self.recipe.task_data), data)
        pinned = _pinned(data, self.texts)
        splits = {
            split: tuple(text.path for text in pinned if text.source == data.source(split))
            for split in data.splits
        }
        return snapshot(data.repo, pinned[0].commit, "dataset"), splits

    def _data(self, leaf: Leaf) -> list[Any]:
        data = _Data.of(leaf)
        if data.own_files:
            return _own_stamp(leaf)
        if not self.recipe.task_data:
            return [(text.source, text.path, text.sha256) for text in _pinned(data, self.texts)]
        folder, splits = _local(Path(self.recipe.task_data), data)
        return [(path, _sha256(folder / path)) for some in splits.values() for path in some]


def counted(reading: Reading) -> ItemText | None:
    """Return the items of all tasks if they were built before."""
    built = []
    for one in tasks_of(reading.recipe):
        with suppress(QauditError, OSError):
            if (items := kept(_place(reading.key(one)))) is not None:
                built.append(items)
                continue
        return None
    return ItemText.together(built)


def read_items(
    reading: Reading, tokenizer: Any, failed: Mapping[str, SourceError]
) -> tuple[ItemText, dict[str, SourceError]]:
    """Return the items of all tasks, and why some have none."""
    failed, built = dict(failed), []
    for one in tasks_of(reading.recipe):
        if one.name in failed:
            continue
        try:
            place = _place(reading.key(one))
            items = kept(place)
            if items is None:
                items = _build(reading, one, tokenizer)
                keep(items, place)
            built.append(items)
        except (SourceError, CorpusError, OSError) as error:
            reason = error.message if isinstance(error, QauditError) else str(error)
            failed[one.name] = SourceError(reason, hint=getattr(error, "hint", ""))
    return ItemText.together(built), failed


def _place(key: str) -> Path:
    return own_cache() / "items" / f"{key[:32]}.npz"


def _build(reading: Reading, one: Definition, tokenizer: Any) -> ItemText:
    """Have lm-eval write the prompts of a task, keep those that are measured, encode them."""
    prompted: list[harness.Prompted] = []
    for leaf in one.leaves:
        with tempfile.TemporaryDirectory(prefix="qaudit-") as scratch:
            prompted += _prompts(reading, leaf, Path(scratch))
    chosen = _drawn(len(prompted), most_items(reading.recipe.task_items))
    items: list[Item] = []
    pairs: list[tuple[str, str]] = []
    for position in chosen:
        item = prompted[position]
        items.append(Item(one.name, f"{one.name}:{position}", len(item.pairs), item.right))
        pairs += item.pairs
    windows = encoded(tokenizer, pairs, reading.context)
    text = ItemText(
        tuple(items),
        tuple(Window(k, part.tokens, part.scored_from) for k, part in enumerate(windows)),
    )
    notes = []
    if cut := sum(part.cut_short for part in windows):
        notes.append(
            f"{one.name}: {cut} of {len(windows)} options lost the beginning of their context, "
            f"which is longer than {reading.context} tokens"
        )
    if len(chosen) < len(prompted):
        notes.append(f"{one.name}: {len(chosen)} of {len(prompted)} items, drawn at random")
    return ItemText(text.items, text.windows, tuple(notes))


def _prompts(reading: Reading, leaf: Leaf, scratch: Path) -> tuple[harness.Prompted, ...]:
    place = reading.folder(leaf)
    if place is None:
        kwargs = {**(leaf.config.get("dataset_kwargs") or {}), "cache_dir": str(scratch / "arrow")}
        source: dict[str, Any] = {"dataset_kwargs": kwargs}
    else:
        data = _Data.of(leaf)
        source = files.source_of(data.repo, data.name, *place, scratch)
    try:
        return harness.prompts(leaf, source, reading.recipe.task_shots)
    except QauditError:
        raise
    except Exception as error:  # a template or a data set of others may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise SourceError(
            f"lm-eval cannot build `{leaf.name}`: {reason}",
            hint="leave the task out, or look at its data",
        ) from error


def _drawn(count: int, most: int | None) -> Sequence[int]:
    """Return which items are measured: all, or so many, the same for every model."""
    if most is None or count <= most:
        return range(count)
    order = np.random.default_rng(harness.FEWSHOT_SEED).permutation(count)
    return sorted(int(position) for position in order[:most])


@lru_cache(maxsize=256)
def _local(root: Path, data: _Data) -> tuple[Path, files.Splits]:
    folder = files.local_folder(root, data.repo)
    if folder is None:
        raise SourceError(
            f"there is no folder `{data.repo}` in `{root}`",
            hint=f"hf download --repo-type dataset {data.repo} --local-dir {root / data.repo}",
        )
    readme = folder / files.README
    about = readme.read_bytes() if readme.is_file() else None
    paths = files.paths_in(folder)
    return folder, files.split_files(data.repo, data.name, data.splits, paths, about)


def _own_stamp(leaf: Leaf) -> list[Any]:
    """Identify the files that a task names itself."""
    kwargs = leaf.config.get("dataset_kwargs") or {}
    named_files = kwargs.get("data_files") or {}
    flat = named_files.values() if isinstance(named_files, dict) else [named_files]
    paths = [Path(path) for one in flat for path in (one if isinstance(one, list) else [one])]
    root = Path(str(leaf.config.get("dataset_path") or ""))
    if root.is_dir():
        paths += [root / path for path in files.paths_in(root)]
    return [(str(path), _sha256(path) if path.is_file() else "") for path in paths]


def _files_sha256(file: Path | None) -> list[Any]:
    """Identify a task's file and those beside it, which it may include or call."""
    if file is None:
        return []
    beside = sorted(
        path for path in file.parent.iterdir() if path.suffix in (".yaml", ".yml", ".py", "")
    )
    return [(path.name, _sha256(path)) for path in beside if path.is_file()]


def _sha256(path: Path) -> str:
    from qaudit.saved.results import sha256_of

    return sha256_of(path)
