"""Fetching a file of weights, hashed, against the client's own download, which does not hash.

    python -m benchmarks.fetch [MB] [REPEATS]

The local Hub of the tests serves from a process of its own; what counts is the CPU time of the
side that fetches, all its threads together. Each run begins with an empty cache. The time that
sha256 alone takes for as many bytes stands beside them: it is what the client leaves out. The
last row is the same checkpoint once more, now that its stamp is known.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.clock import ROOT, best_of

os.environ["HF_HUB_OFFLINE"] = "0"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
REPO, NAME = "bench/model", "model.safetensors"


@contextmanager
def served(folder: Path, nbytes: int) -> Iterator[str]:
    """Serve one file of random bytes; yield the address."""
    path = folder / "hub" / REPO / "step1" / NAME
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        for _ in range(nbytes // 10**6):
            file.write(os.urandom(10**6))
    command = [sys.executable, "-m", "tests.support.hub", str(folder / "hub"), "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip().removeprefix("HF_ENDPOINT=")
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    repeats = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with served(folder, megabytes * 10**6) as url:
            measure(folder, url, megabytes, repeats)


def measure(folder: Path, url: str, megabytes: int, repeats: int) -> None:
    from huggingface_hub import hf_hub_download

    from qaudit.hub.api import Client
    from qaudit.hub.fetch import Fetcher
    from qaudit.hub.listing import Listing
    from qaudit.types import Checkpoint, Ref, WeightFile

    cache = folder / "cache"
    os.environ |= {"HF_HUB_CACHE": str(cache), "QAUDIT_CACHE": str(folder / "own")}
    client = Client(url)
    listing = Listing(client)
    commit = listing.commit(REPO, "step1")
    (file,) = (f for f in listing.files(REPO, commit) if f.path == NAME)
    weight = WeightFile(file.path, file.nbytes, file.identity)
    checkpoint = Checkpoint(Ref(REPO, "step1"), "step1", (weight,), commit)

    def theirs() -> None:
        shutil.rmtree(cache, ignore_errors=True)
        hf_hub_download(REPO, NAME, revision=commit, endpoint=url, cache_dir=cache)

    def ours() -> None:
        shutil.rmtree(cache, ignore_errors=True)
        again()

    def again() -> None:
        Fetcher(client, listing).weights(checkpoint)

    def hashed() -> None:
        with (folder / "hub" / REPO / "step1" / NAME).open("rb") as bytes_of_it:
            hashlib.file_digest(bytes_of_it, "sha256")

    runs = {"hf_hub_download": theirs, "sha256 alone": hashed, "qaudit": ours, "once more": again}
    best = best_of(runs, repeats)
    print(f"{megabytes} MB over loopback, CPU seconds, the best of {repeats}")
    for label, seconds in best.items():
        ratio = seconds / best["hf_hub_download"]
        print(f"{label:<16} {seconds:7.3f}  {ratio:5.2f} of hf_hub_download")


if __name__ == "__main__":
    main()
