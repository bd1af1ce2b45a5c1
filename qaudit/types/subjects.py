"""What is audited: places, checkpoints, and subjects made of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

FULL_PRECISION = "fp"
"""The display name and spec of the stream that is never quantized."""

GREEDY = "greedy"
"""In place of a merge: a search among candidates: `greedy:scheme=gptq-4bit`."""


HUB = "hf://"
"""What the name of something on the Hub may begin with."""


@dataclass(frozen=True)
class Ref:
    """The place of a checkpoint: a Hub repo or a local folder, a revision, a sub-folder."""

    location: str
    revision: str | None = None
    subfolder: str | None = None

    @classmethod
    def parse(cls, text: str) -> Ref:
        """Read `[hf://]location[@revision][//subfolder]`."""
        if text.startswith(HUB):
            text = text.removeprefix(HUB).removeprefix("models/")
        head, _, subfolder = text.partition("//")
        location, _, revision = head.partition("@")
        return cls(location, revision or None, subfolder or None)

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        subfolder = f"//{self.subfolder}" if self.subfolder else ""
        return f"{self.location}{revision}{subfolder}"


@dataclass(frozen=True)
class WeightFile:
    """One file of a checkpoint and the hash of its bytes.

    A Hub file without LFS is known by its git id alone: `sha256` is then `git:...`.
    """

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class TextFile:
    """A text that is a file in a Hub dataset, pinned to a commit and to the hash of its bytes."""

    source: str  # as it was requested: hf://datasets/org/name[@revision]/path[::field]
    repo: str
    commit: str
    path: str
    nbytes: int
    sha256: str  # or `git:...`, as for weights


@dataclass(frozen=True)
class Checkpoint:
    """One point of one training run. Never a weight."""

    ref: Ref
    label: str
    files: tuple[WeightFile, ...] = ()
    commit: str | None = None
    family: str | None = None
    stage: str | None = None
    ingredient: int | None = None
    step: int | None = None
    tokens: int | None = None
    learning_rate: float | None = None
    notes: tuple[str, ...] = ()
    suspect: tuple[str, ...] = ()  # why these weights may not belong to the name
    requires: tuple[Literal["pickle", "remote_code"], ...] = ()  # each needs an option
    settings: tuple[WeightFile, ...] = ()  # configuration, tokenizer, index
    unread: tuple[WeightFile, ...] = ()  # hold only towers that text never enters
    base: Checkpoint | None = None
    """The model that an adapter changes; of weights without a configuration, where that is."""

    @property
    def is_adapter(self) -> bool:
        return self.base is not None and bool(self.base.files)

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files) + (self.base.nbytes if self.base else 0)

    @property
    def content(self) -> str:
        """Identify the weights by their bytes, not by their place or name."""
        files: list[Any] = sorted((f.name, f.sha256) for f in self.files)
        return digest([*files, self.base.content] if self.base and self.is_adapter else files)

    @property
    def whole(self) -> Checkpoint:
        """Return the checkpoint with the files that hold nothing that is read."""
        files = sorted((*self.files, *self.unread), key=lambda file: file.name)
        return replace(self, files=tuple(files), unread=()) if self.unread else self

    @property
    def settings_content(self) -> str:
        """Identify the small files beside the weights; empty where an old plan pinned none."""
        return digest([(f.name, f.sha256) for f in self.settings]) if self.settings else ""

    @property
    def configuration_sha256(self) -> str | None:
        """The hash of `config.json`; None where an old plan did not pin it."""
        return next((f.sha256 for f in self.settings if f.name == "config.json"), None)


@dataclass(frozen=True)
class Subject:
    """What is measured: a checkpoint is a soup of one, and there is no second code path."""

    label: str
    members: tuple[tuple[Checkpoint, float], ...]
    merge: str | None = None

    @property
    def kind(self) -> Literal["checkpoint", "soup"]:
        return "checkpoint" if self.merge is None else "soup"

    @property
    def is_search(self) -> bool:
        """Return whether members are candidates, among which a search chooses."""
        return self.merge is not None and self.merge.partition(":")[0] == GREEDY

    @property
    def first(self) -> Checkpoint:
        """The member whose config and tokenizer are used for all."""
        return self.members[0][0]

    @property
    def content(self) -> str:
        """Identify the merged weights; for a checkpoint, its own."""
        if self.merge is None:
            return self.first.content
        return digest([self.merge, [(c.content, weight) for c, weight in self.members]])


def reference_in(subjects: Sequence[Subject], name: str | None) -> Subject | None:
    """Return the one subject of a label or a place; None where there is none, or several."""
    if name is None:
        return None
    labelled = [subject for subject in subjects if subject.label == name]
    alone = [subject for subject in subjects if subject.merge is None]
    wanted = Ref.parse(name)
    placed = [s for s in alone if s.first.ref == wanted] or [
        s for s in alone if s.first.ref.location.rstrip("/") == name.rstrip("/")
    ]
    matching = labelled or placed
    return matching[0] if len(matching) == 1 else None


def digest(value: object) -> str:
    """Return the sha256 of a value's canonical JSON: the one way qaudit makes identities."""
    import json

    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()
