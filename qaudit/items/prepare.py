"""Requested tasks -> the files they need, and the items they become.

    find (while planning) -> fetch (before any weights) -> read

Data are pinned like texts: a file at a commit, known by the hash of its bytes. What is built is
kept, by everything that decides it: the tasks' own files, the data, the tokenizer, the number of
examples and of items. A task whose data cannot be had, or has no right answers, fails by itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from qaudit.checkpoints.stamps import own_cache, snapshot
from qaudit.errors import (
    CorpusError,
    HubError,
    QauditError,
    SourceError,
    UnreachableError,
    UsageError,
)
from qaudit.hub import Hub
from qaudit.items import files, harness
from qaudit.items.files import Data, find, local, pinned
from qaudit.items.harness import Definition, Leaf, most_items, named
from qaudit.items.tokens import ItemText, PromptedItem, item_text, write_items
from qaudit.items.tokens import read_items as stored_items
from qaudit.sandbox import Templates
from qaudit.saved.results import sha256_of
from qaudit.types import Recipe, TextFile, digest

VERSION = 1
"""Raised when the same tasks and data become other tokens."""


def tasks_of(recipe: Recipe) -> tuple[Definition, ...]:
    if recipe.tasks and recipe.task_data and not Path(recipe.task_data).is_dir():
        raise UsageError(
            f"there is no folder `{recipe.task_data}`",
            hint="name a folder with data sets as org/name: `--set task_data=FOLDER`",
        )
    return harness.definitions(named(recipe.tasks)) if recipe.tasks else ()


def needs_hub(recipe: Recipe) -> bool:
    return bool(recipe.tasks) and not recipe.task_data


def find_item_files(hub: Hub, recipe: Recipe) -> tuple[tuple[TextFile, ...], tuple[str, ...]]:
    """Resolve the data of every task to files at a commit; none of them is fetched.

    Notes name the tasks whose data cannot be had; if these are all of them, the first one's error
    is raised.
    """
    found: dict[tuple[str, str], TextFile] = {}
    failed: dict[str, HubError | SourceError] = {}
    tasks = () if recipe.task_data else tasks_of(recipe)
    for task in tasks:
        try:
            for leaf in task.leaves:
                found |= {(text.source, text.path): text for text in find(hub, Data.of(leaf))}
        except (HubError, SourceError) as error:
            failed[task.name] = error
    if failed and len(failed) == len(tasks):
        name, first = next(iter(failed.items()))
        raise type(first)(
            f"the data of task `{name}` cannot be had: {first.message}",
            hint=first.hint or "leave the task out, or name a folder: `--set task_data=FOLDER`",
        ) from first
    notes = tuple(f"task `{name}` is left out: {why.message}" for name, why in failed.items())
    return tuple(found.values()), notes


def fetch_items(hub: Hub, recipe: Recipe, texts: Sequence[TextFile]) -> dict[str, SourceError]:
    """Fetch and check the data of tasks; return why some of them cannot be had."""
    failed: dict[str, SourceError] = {}
    for task in () if recipe.task_data else tasks_of(recipe):
        try:
            for leaf in task.leaves:
                data = Data.of(leaf)
                try:
                    pins = pinned(data, texts)
                except HubError:
                    list(find(hub, data))  # raises why the plan has no files, if it still holds
                    raise
                for text in pins:
                    hub.fetcher.text(text)
        except (HubError, SourceError, UnreachableError) as error:
            failed[task.name] = SourceError(
                f"its data cannot be had: {error.message}", hint=error.hint
            )
    return failed


@dataclass(frozen=True, eq=False)
class Reading:
    """What turns tasks into items: a recipe, its pinned files, a tokenizer and a window."""

    recipe: Recipe
    texts: Sequence[TextFile]
    tokenizer_sha256: str
    context: int

    def key(self, task: Definition) -> str:
        """Identify the items of a task by everything that decides them."""
        recipe, leaves = self.recipe, []
        for leaf in task.leaves:
            if recipe.task_data:
                folder, splits = self.folder(leaf)
                paths = [path for some in splits.values() for path in some]
                files_of: list[Any] = [(path, sha256_of(folder / path)) for path in paths]
            else:
                pins = pinned(Data.of(leaf), self.texts)
                files_of = [(text.source, text.path, text.sha256) for text in pins]
            leaves.append((leaf.name, leaf.replaced, leaf.shots(recipe.task_shots), files_of))
        parts: list[list[Any]] = []
        for leaf in task.leaves:  # a task's file, and those beside it, which it may include or call
            inside = leaf.file.parent.iterdir() if leaf.file else ()
            beside = sorted(p for p in inside if p.suffix in (".yaml", ".yml", ".py", ""))
            parts.append([(path.name, sha256_of(path)) for path in beside if path.is_file()])
        about = (VERSION, version("lm-eval"), harness.FEWSHOT_SEED, recipe.task_items)
        return digest([about, leaves, parts, self.tokenizer_sha256, self.context])

    def place(self, task: Definition) -> Path:
        return own_cache() / "items" / f"{self.key(task)[:32]}.npz"

    def folder(self, leaf: Leaf) -> tuple[Path, files.Splits]:
        """Return where the data of a task are, and the files of its splits."""
        data = Data.of(leaf)
        if self.recipe.task_data:
            return local(Path(self.recipe.task_data), data)
        pins = pinned(data, self.texts)
        splits = {
            split: tuple(text.path for text in pins if text.source == data.source(split))
            for split in data.splits
        }
        return snapshot(data.repo, pins[0].commit, "dataset"), splits


def counted(reading: Reading) -> ItemText | None:
    """Return the items of all tasks; None where some are not built yet."""
    built = []
    with suppress(QauditError, OSError):
        for task in tasks_of(reading.recipe):
            if (items := stored_items(reading.place(task))) is None:
                return None
            built.append(items)
        return ItemText.together(built)
    return None


def read_items(
    reading: Reading, tokenizer: Any, failed: Mapping[str, SourceError]
) -> tuple[ItemText, dict[str, SourceError]]:
    failed, built = dict(failed), []
    for task in tasks_of(reading.recipe):
        if task.name in failed:
            continue
        try:
            place = reading.place(task)
            items = stored_items(place)
            if items is None:
                items = _build(reading, task, tokenizer)
                write_items(items, place)
            built.append(items)
        except (SourceError, CorpusError, OSError) as error:
            reason = error.message if isinstance(error, QauditError) else str(error)
            failed[task.name] = SourceError(reason, hint=getattr(error, "hint", ""))
    return ItemText.together(built), failed


def _build(reading: Reading, task: Definition, tokenizer: Any) -> ItemText:
    """Have lm-eval write the prompts of a task, keep those that are measured, encode them."""
    prompted: list[harness.Prompt] = []
    with Templates() as templates:
        for leaf in task.leaves:
            with tempfile.TemporaryDirectory(prefix="qaudit-") as scratch:
                source = files.source_of(Data.of(leaf), *reading.folder(leaf), Path(scratch))
                try:
                    shots = reading.recipe.task_shots
                    prompted += harness.prompts(leaf, source, shots, templates)
                except QauditError:
                    raise
                except Exception as error:  # a template or a data set of others may raise anything
                    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                    raise SourceError(
                        f"lm-eval cannot build `{leaf.name}`: {reason}",
                        hint="leave the task out, or look at its data",
                    ) from error
    chosen: Sequence[int] = range(len(prompted))
    most = most_items(reading.recipe.task_items)
    if most is not None and len(prompted) > most:
        order = np.random.default_rng(harness.FEWSHOT_SEED).permutation(len(prompted))
        chosen = sorted(int(position) for position in order[:most])
    items = [
        PromptedItem(task.name, f"{task.name}:{position}", *prompted[position])
        for position in chosen
    ]
    text = item_text(tokenizer, items, reading.context)
    if len(chosen) == len(prompted):
        return text
    drawn = f"{task.name}: {len(chosen)} of {len(prompted)} items, drawn at random"
    return replace(text, notes=(*text.notes, drawn))
