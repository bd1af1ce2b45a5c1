"""A series on a local Hub, a machine that has nothing yet, and downloads that take no time."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from qaudit.checkpoints.stamps import folder_of
from qaudit.core.registry import parse_schemes
from qaudit.errors import HubError, Interrupted, UnreachableError
from qaudit.hub.series import with_files
from qaudit.text.texts import find_text
from qaudit.types import Checkpoint, Recipe, Ref, Subject, Watch, WeightFile
from tests.support.hub import Hub as Server
from tests.support.models import save_model, save_tokenizer, write_documents
from tests.support.running import EMPTY, run
from tests.support.sample import alone
from tests.support.series import find_series, opened

STEPS = ("step10", "step20", "step30", "step40", "step50")


TEXTS = "hf://datasets/org/text"


@dataclass
class Watched(Watch):
    """A watch that remembers, and looks on whenever something is said."""

    look: Callable[[], object] = lambda: None
    subjects: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    at_block: Callable[[str], object] = lambda label: None

    def subject(self, done, total, label):
        self.look()
        self.subjects.append(label)

    def block(self, done, total, what):
        self.look()
        self.at_block(self.subjects[-1])

    def download(self, what, done_nbytes, total_nbytes):
        self.look()

    def note(self, text):
        self.look()
        self.lines.append(text)


@dataclass
class Place:
    """A Hub with a series and its text, and a machine that has nothing yet."""

    root: Path
    server: Server
    out: Path
    cache: Path
    watch: Watched = field(default_factory=Watched)

    def hub(self):
        """Open the Hub as a new process would."""
        return opened(self.server, self.watch, timeout_seconds=10)

    def checkpoints(self, *targets):
        listing = self.hub().listing
        named = targets or tuple(f"org/series@{step}" for step in STEPS)
        found = [c for name in named for c in find_series(listing, name, recipe())]
        return list(with_files(listing, found))

    def run(self, plan, budget=None, **options):
        options = {"hub": self.hub(), "disk_budget_nbytes": budget, **options}
        return run(plan, self.out, self.watch, **options)

    def weights(self, *revisions):
        """Return the names of the blobs of weights."""
        series = self.checkpoints(*(f"org/series@{r}" for r in revisions))
        return {file.sha256 for c in series for file in c.files}

    def nbytes_of_weights(self, names):
        """Return what the disk holds of these blobs, whole or in the making."""
        found = 0
        for path in self.cache.glob("*/blobs/*"):
            with suppress(FileNotFoundError):  # gone since the folder was read
                found += path.stat().st_size if path.name.split(".")[0] in names else 0
        return found

    def fetched(self, names):
        """Return the blobs of weights that the server sent, in order, each as often as it did."""
        sent = [entry["path"].split("/")[-1] for entry in self.server.asked("GET /cdn/")]
        return [name for name in sent if name in names]


@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    """Return the folders behind the Hub: a series in shards, the same end twice, and text."""
    root = tmp_path_factory.mktemp("shelf")
    tokenizer = root / "tokenizer"
    save_tokenizer(tokenizer)
    for seed, step in enumerate(STEPS):
        folder = root / "hub" / "org" / "series" / step
        save_model(folder, seed)
        _shard(folder)
        shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    hub = root / "hub" / "org"
    shutil.copytree(hub / "series" / "step50", hub / "final" / "v1")
    text = root / "hub" / "datasets" / "org" / "text" / "v1"
    text.mkdir(parents=True)
    write_documents(text / "calibration.jsonl", range(100, 104))
    write_documents(text / "evaluation.jsonl", range(200, 208))
    return root


def _shard(folder):
    """Split a model's file in three, with an index as large models have it."""
    whole = folder / "model.safetensors"
    tensors = sorted(load_file(whole).items())
    whole.unlink()
    weight_map = {}
    for k in range(3):
        file = f"model-{k + 1:05}-of-00003.safetensors"
        part = dict(tensors[k::3])
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


@pytest.fixture
def place(shelf, serve, tmp_path, monkeypatch, without_pictures):
    cache = tmp_path / "cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    yield Place(shelf, serve(shelf / "hub"), tmp_path / "out", cache)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("downloads", "fetch"))]


def recipe(**more):
    plain = {name: f"{TEXTS}/{name}.jsonl" for name in ("calibration", "evaluation")}
    plain |= {"device": "cpu", "dtype": "float32"}
    return Recipe(("org/series",), ("rtn-4bit",), **{**plain, **more})


def soup(*members):
    label = "+".join(member.label for member in members)
    return Subject(label, tuple((m, 1 / len(members)) for m in members), "mean")


def plan_of(subjects, place, **more):
    """Return a plan whose prices nobody looks at."""
    asked = more.pop("recipe", recipe())
    texts = ()
    if place is not None:
        listing = place.hub().listing
        texts = tuple(find_text(listing, str(t)) for t in (asked.calibration, asked.evaluation))
    specs = tuple(scheme.spec for scheme in parse_schemes(asked.schemes))
    plain = replace(EMPTY, recipe=asked, subjects=tuple(subjects), specs=specs, texts=texts)
    return replace(plain, **more)


def numbers(audit):
    return [(s.subject, s.spec, s.ce, s.relative_error) for s in audit.measurements]


class Looking(list[dict[str, Any]]):
    """A log of requests that looks at the disk at each of them."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def append(self, entry):
        self.look()
        super().append(entry)


SOON = 10.0
"""Seconds after which something that should have happened has not."""


def checkpoint(label, *, content="", repo="org/series"):
    """Return a checkpoint of ten bytes on the Hub."""
    file = WeightFile("model.safetensors", 10, content or label)
    return Checkpoint(Ref(repo, label), label, (file,), commit=label.encode().hex().ljust(40, "0"))


def subject(*members):
    return soup(*members) if members[1:] else alone(*members)


@dataclass
class Fake:
    """A fetcher that fetches names: `gates` hold a checkpoint back until they are opened."""

    refused: dict[str, Exception] = field(default_factory=dict)
    gates: dict[str, threading.Event] = field(default_factory=dict)
    disk: set[str] = field(default_factory=set)
    log: list[str] = field(default_factory=list)
    kept: dict[str, set[str]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    stopped: bool = False
    silent: bool = False  # whether no question is answered either

    def nbytes_missing(self, checkpoint):
        return 0 if checkpoint.label in self.disk else checkpoint.nbytes

    def weights(self, checkpoint):
        label = checkpoint.label
        self._note(f"begin {label}")
        if label in self.gates:
            with self.changed:
                self.changed.wait_for(lambda: self.stopped or self.gates[label].is_set(), SOON)
        if self.stopped:
            raise Interrupted("stopped")
        if label in self.refused:
            raise self.refused[label]
        self.disk.add(label)
        self._note(f"fetch {label}")
        return folder_of(checkpoint)

    def evict(self, checkpoint, *, keep=()):
        self.kept[checkpoint.label] = {c.label for c in keep}
        self.disk.discard(checkpoint.label)
        self._note(f"evict {checkpoint.label}")
        return 10

    def break_off(self):
        self._note("break off")
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def commit(self, repo, revision):
        if self.silent:
            raise UnreachableError("silence")
        return revision

    def open(self, label):
        with self.changed:
            self.gates[label].set()
            self.changed.notify_all()

    def until(self, what):
        """Wait until something is in the log."""
        with self.changed:
            return self.changed.wait_for(lambda: what in self.log, SOON)

    def done(self):
        """Return what was fetched and evicted, in order."""
        return [line for line in self.log if not line.startswith("begin")]

    def _note(self, line):
        with self.changed:
            self.log.append(line)
            self.changed.notify_all()


def measure(downloads):
    """Measure everything that is ready; return what was measured and what was refused."""
    seen = []
    for one in downloads.order:
        try:
            with downloads.ready(one):
                seen.append(one.label)
        except HubError as error:
            seen.append(f"{one.label}: {error.message}")
    return seen
