"""What is measured, and on what: checkpoints, soups, documents and how they are cut."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

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
    def sources(self) -> tuple[Checkpoint, ...]:
        """What is read of it: itself, and before it the base that it changes."""
        return (self,) if self.base is None else (self.base, self)

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


PROMPT, REASONING, CALL, ANSWER = ROLES = ("prompt", "reasoning", "call", "answer")
"""What a token of a conversation is: given to the model, or written by it."""

UNSCORED = -1
"""In place of a role: the loss of the token is not counted."""


@dataclass(frozen=True)
class RoleSpan:
    """Characters of a conversation whose tokens are scored, and their role."""

    start: int
    stop: int
    role: str


@dataclass(frozen=True)
class Document:
    """A named text, the unit of analysis."""

    name: str
    text: str
    stratum: str = ""  # the value of the field that `strata` names
    is_chat: bool = False  # a conversation: its template writes what begins it
    # What of a conversation is scored, and whether its last answer alone is; None: no token.
    # Asked only of documents that are measured on, because prefixes are rendered for it.
    spans: Callable[[], tuple[tuple[RoleSpan, ...], bool]] | None = field(
        default=None, compare=False
    )

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


CHOICES = "choices"
"""The task that multiple-choice items of a file make up."""


@dataclass(frozen=True)
class Item:
    """An item of a task: how many options it has, and which are right, counted from zero.

    The likeliest option is the answer; a single one is right where each of its tokens is the
    likeliest.
    """

    task: str
    name: str
    options: int
    right: tuple[int, ...]


@dataclass(frozen=True)
class Protocol:
    """How text becomes windows of tokens, and how many."""

    context: int
    bos: Literal["auto", "always", "never"] = "auto"
    packed: bool = False
    evaluation_documents: int = 64
    calibration_documents: int = 64
    document_tokens: int | None = None
    calibration_seed: int = 0
    item_context: int | None = None  # of options behind their context; None: that of documents


@dataclass(frozen=True, eq=False)
class Window:
    """A run of tokens that goes through the model at once.

    Tokens before `scored_from` are context: they are read, and their loss is not counted. Nor is
    that of tokens of a conversation without a role.
    """

    document: int
    tokens: npt.NDArray[np.int32]
    scored_from: int = 1
    roles: npt.NDArray[np.int8] | None = None  # places in `ROLES`, or `UNSCORED`; None: plain text

    @property
    def scored(self) -> int:
        """Number of tokens whose loss is counted."""
        if self.roles is None:
            return len(self.tokens) - self.scored_from
        return int((self.roles[self.scored_from :] != UNSCORED).sum())


@dataclass(frozen=True)
class EvaluationDocument:
    """What is known of an evaluation document once it is cut: its name, hash and scored bytes."""

    name: str
    sha256: str
    nbytes: int
    stratum: str = ""


@dataclass(frozen=True)
class RolloutChoices:
    """What is asked of a stream about each token of rollouts, beside its loss."""

    ends: tuple[tuple[int, ...], ...]  # groups of tokens, whose probability is summed
    # Temperature, top-k and top-p that the token was drawn with; None: from the model as it is.
    sampler: tuple[float, int | None, float] | None = None


@dataclass(frozen=True, eq=False)
class RolloutText:
    """What a model wrote behind prompts; a window for each sample, its prompt not scored.

    Shapes: S samples.
    """

    windows: tuple[Window, ...]
    prompt: npt.NDArray[np.int64]  # (S,) of each sample, by its index
    greedy: npt.NDArray[np.bool_]  # (S,)
    ends: tuple[tuple[str, tuple[int, ...]], ...]  # tokens that end a turn, or reasoning, by name
    sha256: str  # of the samples as they are in their folder
    target: str = ""  # that wrote them
    weights_sha256: str = ""  # `Subject.content` of it
    # Of samples that were drawn and marked; None: of none.
    mark: npt.NDArray[np.float64] | None = None  # (S,) NaN: not marked
    read: npt.NDArray[np.int64] | None = None  # (S,) tokens that the mark reads
    sampler: tuple[float, int | None, float] | None = None
    unweighed: str = ""  # why marks give no expected score

    @property
    def choices(self) -> RolloutChoices:
        sampler = None if self.mark is None or self.unweighed else self.sampler
        return RolloutChoices(tuple(ids for _, ids in self.ends), sampler)

    @property
    def longest(self) -> int:
        return max(len(window.tokens) for window in self.windows)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Calibration and evaluation text as tokens, with its hashes and the protocol that cut it.

    An option of an item is a window of its own, whose `document` counts (item, option) pairs in
    order, from zero; `items` has how many options each item has.
    """

    protocol: Protocol
    calibration: tuple[Window, ...]
    evaluation: tuple[Window, ...]
    documents: tuple[EvaluationDocument, ...]
    items: tuple[Item, ...] = ()
    item_windows: tuple[Window, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    further: tuple[tuple[Window, ...], ...] = ()  # calibration of the seeds that follow
    failed_tasks: tuple[tuple[str, str], ...] = ()  # and why
    available: int | None = None  # evaluation documents of the text, some thousands at most
    rollouts: RolloutText | None = None
    has_chat_template: bool | None = None  # the tokenizer; None: not looked at
    # Further text that searches choose on and no verdict reads; none where the text is too short.
    search: tuple[Window, ...] = ()
    search_documents: tuple[EvaluationDocument, ...] = ()

    @property
    def draws(self) -> tuple[Corpus, ...]:
        """The same evaluation text with every draw of calibration text, this one first."""
        seed = self.protocol.calibration_seed
        return tuple(
            replace(
                self,
                protocol=replace(self.protocol, calibration_seed=seed + k),
                calibration=windows,
                further=(),
            )
            for k, windows in enumerate((self.calibration, *self.further))
        )

    @property
    def strata(self) -> tuple[str, ...]:
        """The stratum of each evaluation document, or nothing where they are not grouped."""
        strata = tuple(document.stratum for document in self.documents)
        return strata if any(strata) else ()

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(item.task for item in self.items))

    @property
    def windows_by_task(self) -> tuple[tuple[Window, ...], ...]:
        """The options of each task, whose items are side by side."""
        tasks: dict[str, list[Window]] = {}
        for item, windows in self._by_item():
            tasks.setdefault(item.task, []).extend(windows)
        return tuple(map(tuple, tasks.values()))

    def _by_item(self) -> Iterator[tuple[Item, tuple[Window, ...]]]:
        """Yield each item with the windows of its options."""
        windows = iter(self.item_windows)
        for item in self.items:
            yield item, tuple(islice(windows, item.options))

    @cached_property
    def sha256(self) -> str:
        """Identify every token of documents that is fed, every one that is scored, and what for.

        Strata and marks are left out: they group and weigh results, and change none.
        """
        windows: tuple[tuple[Window, ...], ...] = (self.calibration, self.evaluation, ())
        cut = [[_identity(window) for window in part] for part in windows]
        if self.rollouts is not None:
            rollouts = self.rollouts
            rows = (rollouts.prompt, rollouts.greedy, rollouts.read)
            summed = [None if row is None else row.tolist() for row in rows]
            written = [_identity(window) for window in rollouts.windows]
            fed = digest([written, summed, rollouts.mark is None, rollouts.unweighed])
            cut.append([(fed, rollouts.ends, rollouts.choices.sampler)])
        return digest(cut)

    @property
    def text_sha256(self) -> tuple[str, ...]:
        """Identify all that is fed: every draw of calibration text, and what searches choose on."""
        searched = (self.of_search(),) if self.search else ()
        return tuple(corpus.sha256 for corpus in (*self.draws, *searched))

    @cached_property
    def items_sha256(self) -> Mapping[str, str]:
        """Identify, for each task, what it feeds and scores, and the calibration text beside it."""
        hashes = {task: hashlib.sha256() for task in self.tasks}
        for item, windows in self._by_item():
            for window in windows:
                hashes[item.task].update(window.tokens.astype("<i4").tobytes())
            about = (item.right, [(len(w.tokens), w.scored_from) for w in windows])
            hashes[item.task].update(repr(about).encode())
        fed = digest([[w.tokens.tolist(), w.scored_from] for w in self.calibration])
        return {task: digest([fed, sha256.hexdigest()]) for task, sha256 in hashes.items()}

    def without_evaluation(self) -> Corpus:
        """Return the corpus with its calibration text and its items alone."""
        return replace(self, evaluation=(), documents=(), rollouts=None)

    def of_documents(self) -> Corpus:
        return replace(self.of_tasks(()), rollouts=None)

    def of_search(self) -> Corpus:
        """Return what searches choose on: further documents, or those that are judged."""
        plain = self.of_documents()
        if not self.search:
            return plain
        return replace(plain, evaluation=self.search, documents=self.search_documents)

    def of_tasks(self, tasks: Collection[str]) -> Corpus:
        chosen = [each for each in self._by_item() if each[0].task in tasks]
        windows = [window for _, of_item in chosen for window in of_item]
        renumbered = tuple(replace(window, document=k) for k, window in enumerate(windows))
        items = tuple(item for item, _ in chosen)
        return replace(self, items=items, item_windows=renumbered)


def _identity(window: Window) -> tuple[object, ...]:
    plain = (window.document, window.tokens.tolist(), window.scored_from)
    return plain if window.roles is None else (*plain, window.roles.tolist())
