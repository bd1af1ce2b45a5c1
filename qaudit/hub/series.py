"""Names on the Hub -> checkpoints, in the order in which they were trained.

    org/name             every branch and tag
    org/name@revision    that one: a branch, a tag, a pull request, a commit
    org/name//folder     a sub-folder, of `main` or of the revision named before it
    org/name-*           one repository for each checkpoint

The list of names is one call, and it is all that is read of a series with numbered revisions: a
series can have 1,500 of them and a stranger 500 calls in five minutes. Where no name of a
repository holds a number, its series, if there is one, is in sub-folders (`checkpoint-500/`,
a branch `checkpoints`); then the tree of each revision is read at once, which costs nothing
more in the end, because a plan reads it anyway and trees are kept by commit for ever.

The tree of a numbered revision is read once it was chosen. What counts is the tree, never the
name: `series_files` notes where there are no weights, or two sets of them. Branches that the Hub
itself makes (`refs/convert/...`) are no checkpoints; everything else is one, under its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qaudit.checkpoints import folder as local
from qaudit.checkpoints.series import Candidate, CheckpointGroup, Knowledge, as_series, tell_apart
from qaudit.errors import HubError, QauditError, UsageError
from qaudit.families import Family, find, load
from qaudit.hub.connection import check_variables
from qaudit.hub.names import HubFile, Revision, is_commit, repository_of
from qaudit.hub.weights import choose_weights, folders_with_weights, settings_files
from qaudit.support.keys import nearest
from qaudit.types import HUB, Checkpoint, Recipe, Ref, WeightFile

if TYPE_CHECKING:
    from qaudit.hub.listing import Listing

MOST_TREES_FOR_NAMES = 8
"""So many revisions without a number are looked into for sub-folders; more are just names."""


# ------------------------------------------------------------------------------------- targets


def is_hub(target: str) -> bool:
    """Return whether a target is on the Hub; a file or folder of that name on this machine wins."""
    if target.startswith(HUB):
        return True
    if target.endswith((".yaml", ".yml", ".json")) or Path(target).exists():
        return False
    if target.startswith("qaudit-out/"):  # where scans write: no organization
        return False
    return repository_of(target, glob=True) is not None


def find_all(
    targets: Sequence[str], recipe: Recipe | None, open_listing: Callable[[], Listing]
) -> tuple[Checkpoint, ...]:
    """Return the checkpoints of all targets, folders and repositories, under labels that differ.

    No tree is read that names alone do not need, and no file of a folder; the Hub is opened
    only if a target is there.
    """
    check_variables()  # a local audit imports the library of the Hub, too
    listing = open_listing() if any(map(is_hub, targets)) else None
    return as_series(
        group
        for target in targets
        for group in (
            _look(listing, target, recipe)
            if listing is not None and is_hub(target)
            else (local.look(target, recipe),)
        )
    )


def _look(listing: Listing, target: str, recipe: Recipe | None) -> tuple[CheckpointGroup, ...]:
    """Look on the Hub; not where a folder of nearly this name is here, and may be meant."""
    parent = Path(target).parent
    is_path = not target.startswith(HUB) and "@" not in target
    if is_path and (near := local.near_folder(Path(target))):
        raise UsageError(
            f"there is no folder `{target}`", hint=f"{near} Of the Hub, write it as `{HUB}{target}`"
        )
    if parent.name and parent.is_dir() and not target.startswith(HUB):
        listing.client.say(f"there is no folder `{target}`: looking for it on the Hub")
    try:
        ref = parse(target)
        refs = [ref]
        if re.search(r"[*?\[]", ref.location):  # each repository of a glob is a target of its own
            if ref.revision is not None:
                raise UsageError(
                    f"`{target}` is a glob of repositories with a revision",
                    hint="leave the revision out, or name one repository",
                )
            refs = [replace(ref, location=r) for r in listing.client.repositories(ref.location)]
            if not refs:
                raise HubError(
                    f"no repository matches `{ref.location}`", hint="check the owner's name"
                )
        return tuple(_in_repository(listing, each, recipe) for each in refs)
    except QauditError as error:
        if is_path:
            error.message = f"there is no folder `{target}`, and on the Hub: {error.message}"
            error.args = (error.message,)
        raise


def parse(target: str) -> Ref:
    """Read the name of a repository, or refuse it."""
    if target.startswith(f"{HUB}datasets/"):
        raise UsageError(
            f"`{target}` is a text and no model",
            hint="pass it as `--evaluation` or `--calibration`",
        )
    ref = repository_of(target, glob=True)
    if ref is None:
        raise UsageError(
            f"`{target}` is not the name of a repository",
            hint="write `org/name`, `org/name@revision` or `org/name@revision//folder`",
        )
    return replace(ref, subfolder=ref.subfolder.strip("/") if ref.subfolder else None)


# -------------------------------------------------------------------------- from one repository


def _in_repository(listing: Listing, ref: Ref, recipe: Recipe | None) -> CheckpointGroup:
    repo = ref.location
    family = recipe.family if recipe is not None else None
    knowledge = Knowledge.of(load(family) if family else find(repo), recipe)
    revisions = revisions_of(listing, ref)
    alone = len(revisions) == 1
    candidates = [
        _candidate(repo, r, knowledge, alone=alone and ref.revision is None) for r in revisions
    ]
    if ref.subfolder is not None:
        candidates = [_in_folder(candidates[0], ref.subfolder)]
    elif len(candidates) <= MOST_TREES_FOR_NAMES and all(
        c.knowledge.place(name, c.repo).named for c in candidates for name in c.names
    ):
        tree = listing.known_files if listing.client.offline else listing.files
        parts = (spread(c, tree(repo, str(c.commit)) or ()) for c in candidates)
        candidates = [part for some in parts for part in some]
    return CheckpointGroup(tuple(candidates), alone=alone and len(candidates) == 1)


def revisions_of(listing: Listing, ref: Ref) -> tuple[Revision, ...]:
    """Return the revisions of a target, each name once; the branch where a tag has its name."""
    repo = ref.location
    if ref.revision is None and ref.subfolder is None:
        branches_first = sorted(listing.revisions(repo), key=lambda r: r.kind != "branch")
        named = {r.name: r for r in reversed(branches_first) if not r.name.startswith("refs/")}
        if not named:
            raise HubError(
                f"`{repo}` has no branch and no tag", hint="it is empty; name another repository"
            )
        return tuple(named.values())
    revision = ref.revision or "main"
    if not is_commit(revision):
        return (Revision(revision, listing.commit(repo, revision), "branch"),)
    names = []
    try:
        names = [r.name for r in listing.revisions(repo) if r.commit == revision]
    except HubError:
        if not listing.client.offline:  # offline, a commit in the cache needs no name
            raise
    return (Revision(min(names, default=revision), revision, "branch"),)


def _candidate(repo: str, revision: Revision, known: Knowledge, *, alone: bool) -> Candidate:
    """Return a checkpoint, named by its revision, or by its repository if that has no other."""
    name, repo_name = revision.name, repo.partition("/")[2]
    if alone and name in ("main", "master"):
        return Candidate(Ref(repo, name), repo_name, (name, repo_name), known, revision.commit)
    label = name[:12] if is_commit(name) else name
    return Candidate(Ref(repo, name), label, (name,), known, revision.commit)


def _in_folder(candidate: Candidate, subfolder: str, label: str | None = None) -> Candidate:
    label = label or subfolder
    ref = replace(candidate.ref, subfolder=subfolder)
    return replace(candidate, ref=ref, label=label, names=(label, *candidate.names))


def spread(candidate: Candidate, files: Sequence[HubFile]) -> list[Candidate]:
    """Return a revision, or the checkpoints in its sub-folders.

    As for folders on this machine: a checkpoint with numbered ones beneath it is the end of
    their series, and beside weights no folder of any other name is looked at.
    """
    inside = folders_with_weights(files)
    outer = [folder.partition("/")[0] for folder in inside]
    parts = [
        _in_folder(candidate, folder, top if outer.count(top) == 1 else folder)
        for folder, top in zip(inside, outer, strict=True)
        if folder
    ]
    if "" not in inside:
        return parts or [candidate]
    knowledge = candidate.knowledge
    return [*(p for p in parts if not knowledge.place(p.label, candidate.repo).named), candidate]


# ------------------------------------------------------------------- the files of checkpoints


def with_files(
    listing: Listing,
    checkpoints: Iterable[Checkpoint],
    *,
    known_only: bool = False,
    keep_all: bool = False,
) -> tuple[Checkpoint, ...]:
    """Read one tree for each commit: files, what they require, what is odd about them.

    A revision that holds no weights but sub-folders with some becomes several checkpoints.
    With `known_only` no request is sent, and what is not known yet has no files. Checkpoints in
    folders of this machine are left as they are. Offline, what is not in the cache has no files
    either and is marked suspect; if that is all there is, it is an error, unless `keep_all`.
    """
    refusals: list[HubError] = []
    parts: list[Checkpoint] = []
    tree = listing.known_files if known_only else listing.files

    def refuse(checkpoint: Checkpoint, error: HubError) -> None:
        if not listing.client.offline:
            raise error
        refusals.append(error)
        parts.append(replace(checkpoint, suspect=(*checkpoint.suspect, error.message)))

    for checkpoint in checkpoints:
        files = None
        if checkpoint.commit is not None:
            try:
                files = tree(checkpoint.ref.location, checkpoint.commit)
            except HubError as error:
                refuse(checkpoint, error)
                continue
        if files is None:
            parts.append(checkpoint)
            continue
        for part in _in_folders(checkpoint, files):
            try:
                parts.append(_with_weights(listing, part, files, known_only=known_only))
            except HubError as error:
                refuse(part, error)
    if refusals and not keep_all and not any(c.files or c.commit is None for c in parts):
        raise refusals[0]
    return tell_apart(parts)


def _in_folders(checkpoint: Checkpoint, files: Sequence[HubFile]) -> Sequence[Checkpoint]:
    """Return a checkpoint, or those in sub-folders where it has no weights itself."""
    inside, ref = folders_with_weights(files), checkpoint.ref
    if ref.subfolder is not None or not inside or "" in inside:
        return [checkpoint]
    names, knowledge = (ref.revision or "main",), Knowledge(_family(checkpoint))
    whole = Candidate(ref, checkpoint.label, names, knowledge, checkpoint.commit)
    return as_series([CheckpointGroup(tuple(spread(whole, files)), alone=False)])


def _with_weights(
    listing: Listing, checkpoint: Checkpoint, files: Sequence[HubFile], *, known_only: bool
) -> Checkpoint:
    repo, commit = checkpoint.ref.location, str(checkpoint.commit)
    subfolder = checkpoint.ref.subfolder
    start = f"{subfolder}/" if subfolder else ""

    def read(file: HubFile) -> bytes:
        return listing.read(repo, commit, file, 0, file.nbytes)

    if not any(file.path.startswith(start) for file in files) and subfolder:
        folders = {file.path.rpartition("/")[0] for file in files} - {""}
        raise HubError(
            f"there is no folder `{subfolder}` in `{repo}`",
            hint=nearest(subfolder, sorted(folders)),
        )
    chosen = choose_weights(files, subfolder, None if known_only else read)
    if chosen.suspect and not chosen.files and listing.is_partial(repo, commit):
        raise HubError(
            f"the weights of `{checkpoint.ref}` are not whole on this machine, and "
            f"`HF_HUB_OFFLINE` keeps it from asking: {chosen.suspect[0]}",
            hint=f"fetch the rest while online: `hf download {repo} --revision {commit}`",
        )
    requires: list[Literal["pickle", "remote_code"]] = ["pickle"] if chosen.pickled else []
    family = _family(checkpoint)
    if family is not None and "remote_code" in family.requires:
        requires.append("remote_code")
    return replace(
        checkpoint,
        files=chosen.files,
        settings=tuple(  # its commit pins its code
            WeightFile(path.removeprefix(start), file.nbytes, file.identity)
            for file, path in settings_files(files, subfolder)
        ),
        requires=tuple(requires),
        suspect=tuple(dict.fromkeys((*checkpoint.suspect, *chosen.suspect))),
    )


def _family(checkpoint: Checkpoint) -> Family | None:
    if checkpoint.family is None:
        return None
    family = find(checkpoint.ref.location)
    return family if family and family.family == checkpoint.family else load(checkpoint.family)
