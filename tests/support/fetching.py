"""Repositories of a few hundred kB, and a fetcher that never waits and remembers what it said."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

from qaudit.hub.api import Client
from qaudit.hub.fetch import Fetcher
from qaudit.hub.listing import Listing
from qaudit.types import Checkpoint, Ref, WeightFile
from tests.support.hub import Hub

REPO = "alice/tiny"
CONFIG = b'{"model_type": "llama"}'
SMALL = {"config.json": CONFIG, "tokenizer.json": b'{"model": {}}', "README.md": b"# tiny\n"}


def bytes_of(name, nbytes=300_000):
    """Return bytes that are the same for a name in every run."""
    return random.Random(name).randbytes(nbytes)


SHARDS = {f"model-0000{k}-of-00003.safetensors": bytes_of(f"shard {k}") for k in (1, 2, 3)}
INDEX = b'{"weight_map": {}}'
REVISIONS = {
    "step1": SMALL | {"model.safetensors": bytes_of("step1")},
    "step2": SMALL | {"model.safetensors": bytes_of("step2")},
    "step3": SMALL | SHARDS | {"model.safetensors.index.json": INDEX},
    "step4": SMALL | SHARDS | {"model.safetensors.index.json": INDEX}
    | {"model-00003-of-00003.safetensors": bytes_of("another third")},
    "step5": SMALL | {"model.safetensors": bytes_of("step1")},  # the weights of step1 again
}  # fmt: skip


def write(root, revisions, repo=REPO):
    """Write revisions as folders that the local Hub serves."""
    for revision, files in revisions.items():
        for path, data in files.items():
            place = root / repo / revision / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
    return root


@dataclass
class Desk:
    """A fetcher of one Hub; it is the watch as well."""

    hub: Hub
    heard: list[str] = field(default_factory=list)
    steps: list[tuple[str, int, int]] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 20.0  # never reached where no fault is silent

    def __post_init__(self):
        pause, say = self.pauses.append, self.heard.append
        limit = self.timeout_seconds
        self.client = Client(self.hub.url, pause=pause, say=say, timeout_seconds=limit)
        self.listing = Listing(self.client)
        options = {"pause": pause, **self.options}
        self.fetcher = Fetcher(self.client, self.listing, watch=self, **options)

    def download(self, what, done_nbytes, total_nbytes):
        self.steps.append((what, done_nbytes, total_nbytes))

    def note(self, text):
        self.heard.append(text)

    def checkpoint(self, revision, repo=REPO, subfolder=None):
        """Return a checkpoint with the weights that lie in its folder."""
        commit = self.listing.commit(repo, revision)
        start = f"{subfolder}/" if subfolder else ""
        files = tuple(
            WeightFile(file.path[len(start) :], file.nbytes, file.identity)
            for file in self.listing.files(repo, commit)
            if file.path.startswith(start) and file.path.endswith((".safetensors", ".bin"))
        )
        return Checkpoint(Ref(repo, revision, subfolder), revision, files, commit)

    def requests(self, pattern="GET .*resolve|GET /cdn"):
        """Count what was asked since the last time, and forget it."""
        found = len(self.hub.asked(pattern))
        self.hub.log.clear()
        return found


def blobs(cache, repo=REPO):
    """Return the names of everything in a repository's folder of bytes."""
    return {p.name for p in (cache / f"models--{repo.replace('/', '--')}" / "blobs").glob("*")}


def sha256(data):
    return hashlib.sha256(data).hexdigest()
