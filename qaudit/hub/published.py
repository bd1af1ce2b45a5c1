"""An audit that was published in a repository: fetched, verified, and read like a folder.

    org/name@v1 -> .../snapshots/<commit>/qaudit/{audit.json, evidence/*.npz}

It is fetched as weights are: the revision is pinned to a commit, every file is hashed against the
Hub's listing, what is in the shared cache is not fetched again, and without a network the cache
alone is read. The audit names its evidence with hashes of its own, so that files which belong to
another audit are refused when the folder is read.

An audit may come from a stranger. Only files that its repository lists below
`qaudit/evidence` are fetched, and none larger than per-document sums can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from qaudit.errors import AuditError, HubError, UsageError
from qaudit.hub import Hub, open_hub
from qaudit.hub.names import HubFile, repository_of
from qaudit.saved.audits import read_audit
from qaudit.types import HUB, Watch

FOLDER = "qaudit"
"""The folder of a published audit in its repository."""

AUDIT = f"{FOLDER}/audit.json"
EVIDENCE = f"{FOLDER}/evidence/"
LARGEST_NBYTES = 256_000_000
"""Of one file: an audit of a thousand checkpoints, or the sums of ten million documents."""


def audit_folder(target: str, watch: Watch | None = None) -> Path:
    """Return the folder of an AUDIT of the command line: a folder, its file, or a fetched one."""
    return published_folder(target, watch) if is_published(target) else Path(target)


def is_published(target: str) -> bool:
    """Return whether a target is an audit on the Hub; a folder on this machine wins.

    So does a folder that is missing: `runs/demo`, where there is a `runs`, or `qaudit-out/demo`.
    """
    if target.startswith(HUB):
        return True
    path, ref = Path(target), repository_of(target)
    near = "@" not in target and (path.parent.is_dir() or path.parts[:1] == ("qaudit-out",))
    return ref is not None and not (path.exists() or near)


def published_folder(target: str, watch: Watch | None = None, *, hub: Hub | None = None) -> Path:
    """Fetch the audit that `org/name@revision` holds, with its evidence; return its folder."""
    ref = repository_of(target)
    if ref is None or ref.subfolder is not None:
        raise UsageError(
            f"`{target}` names no repository with an audit",
            hint="write it as `org/name` or `org/name@revision`",
        )
    hub = hub or open_hub(watch)
    commit = hub.listing.commit(ref.location, ref.revision or "main")
    listed = {file.path: file for file in hub.listing.files(ref.location, commit)}
    if AUDIT not in listed:
        raise HubError(
            f"there is no audit in `{ref}`: it has no `{AUDIT}`",
            hint="name a revision that has one, or put one there with `qaudit publish`",
        )
    fetch = partial(hub.fetcher.files, ref.location, commit, str(ref))
    folder = fetch(_small([listed[AUDIT]])) / FOLDER
    try:
        audit = read_audit(folder / "audit.json")
    except AuditError as error:
        raise AuditError(f"in `{ref}`, {error.message}", hint=error.hint) from error
    names = [row.evidence for row in audit.measurements] + [row.evidence for row in audit.tasks]
    paths = dict.fromkeys(f"{FOLDER}/{name}" for name in names)
    fetch(_small([listed[p] for p in paths if p.startswith(EVIDENCE) and p in listed]))
    return folder


def _small(files: Sequence[HubFile]) -> Sequence[HubFile]:
    for file in files:
        if file.nbytes > LARGEST_NBYTES:
            raise HubError(
                f"`{file.path}` has {file.nbytes} bytes, more than an audit's file can have",
                hint="it was not written by qaudit; nothing was fetched",
            )
    return files
