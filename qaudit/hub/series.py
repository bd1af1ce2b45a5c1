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

Many repositories hold their weights more than once: as pickles beside safetensors, in the
trainer's own layout, or as shards of an earlier upload that was not removed. The choice is that
of transformers and of the reader of a local folder: the single safetensors file, else the shards
that the index names, and pickles only where there is nothing else. Shards beside a single file are
a doubt. The index is read only where names leave a choice: one complete set of shards `k of n`
needs no request.

Config, tokenizer and index are a few MB and stay when weights are evicted: the next run then
needs no network for them. A checkpoint in a sub-folder often has its tokenizer at the root.
Libraries look in one folder only, so what is missing there is linked from the nearest folder
above that has it: the config with its generation settings as one group, the tokenizer as another,
because a tokenizer put together from two is a third one. An index is only ever taken from the
folder itself.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qaudit.checkpoints import folder as local
from qaudit.checkpoints.safetensors import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    INDEX,
    PICKLE,
    PICKLE_INDEX,
    SINGLE,
    shards_beside,
)
from qaudit.checkpoints.series import Candidate, CheckpointGroup, Knowledge, as_series, tell_apart
from qaudit.checkpoints.stamps import LARGEST_SETTINGS_NBYTES, QUANTIZATION, TOKENIZER
from qaudit.core.course import NO_WEIGHTS
from qaudit.errors import HubError, QauditError, UsageError
from qaudit.families import Family, find, load
from qaudit.hub.answers import HubFile, Revision, check_variables, is_commit, repository_of
from qaudit.support.keys import first_of, nearest
from qaudit.types import HUB, Checkpoint, Recipe, Ref, WeightFile

if TYPE_CHECKING:
    from qaudit.hub.listing import Listing

LONGEST_INDEX_NBYTES = 64_000_000
_MODEL = ("config.json", "generation_config.json", "*processor_config.json")

ReadFile = Callable[[HubFile], bytes]

PlacedFile = tuple[HubFile, str]
"""A file of the repository, and the path at which it is linked."""

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
    groups: list[CheckpointGroup] = []
    for target in targets:
        if listing is not None and is_hub(target):
            groups += _look(listing, target, recipe)
        else:
            groups.append(local.look(target, recipe))
    return as_series(groups)


def _look(listing: Listing, target: str, recipe: Recipe | None) -> Sequence[CheckpointGroup]:
    """Look on the Hub; not where a folder of nearly this name is here, and may be meant."""
    parent, is_named = Path(target).parent, target.startswith(HUB)
    is_path = not is_named and "@" not in target
    if is_path and (near := local.near_folder(Path(target))):
        raise UsageError(
            f"there is no folder `{target}`", hint=f"{near} Of the Hub, write it as `{HUB}{target}`"
        )
    if parent.name and parent.is_dir() and not is_named:
        listing.client.say(f"there is no folder `{target}`: looking for it on the Hub")
    try:
        ref = parse(target)
        if not re.search(r"[*?\[]", ref.location):
            return [_in_repository(listing, ref, recipe)]
        if ref.revision is not None:  # each repository of a glob is a target of its own
            raise UsageError(
                f"`{target}` is a glob of repositories with a revision",
                hint="leave the revision out, or name one repository",
            )
        repos = listing.client.repositories(ref.location)
        if not repos:
            raise HubError(f"no repository matches `{ref.location}`", hint="check the owner's name")
        return [_in_repository(listing, replace(ref, location=repo), recipe) for repo in repos]
    except QauditError as error:
        if is_path:
            error.message = f"there is no folder `{target}`, and on the Hub: {error.message}"
            error.args = (error.message,)
        raise


def parse(target: str) -> Ref:
    """Read the name of a repository, or refuse it."""
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
    alone, repo_name = len(revisions) == 1, repo.partition("/")[2]
    candidates = []
    for revision in revisions:  # a name of its own, or the repository's if that has no other
        name, label = revision.name, revision.name
        names: tuple[str, ...] = (name,)
        if alone and ref.revision is None and name in ("main", "master"):
            label, names = repo_name, (name, repo_name)
        elif is_commit(name):
            label = name[:12]
        candidates.append(Candidate(Ref(repo, name), label, names, knowledge, revision.commit))
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
    for checkpoint in checkpoints:
        pending, files = deque([checkpoint]), None
        while pending:
            part = pending.popleft()
            try:
                if files is None and part.commit is not None:
                    files = tree(part.ref.location, part.commit)
                    if files is not None:  # those in its sub-folders may take its place
                        pending += _in_folders(part, files)
                        part = pending.popleft()
                if files is not None:
                    part = _with_weights(listing, part, files, known_only=known_only)
            except HubError as error:
                if not listing.client.offline:
                    raise
                refusals.append(error)
                part = replace(part, suspect=(*part.suspect, error.message))
            parts.append(part)
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
    weights, doubt, is_pickle = choose_weights(files, subfolder, None if known_only else read)
    if doubt and not weights and listing.is_partial(repo, commit):
        raise HubError(
            f"the weights of `{checkpoint.ref}` are not whole on this machine, and "
            f"`HF_HUB_OFFLINE` keeps it from asking: {doubt}",
            hint=f"fetch the rest while online: `hf download {repo} --revision {commit}`",
        )
    requires: list[Literal["pickle", "remote_code"]] = ["pickle"] if is_pickle else []
    family = _family(checkpoint)
    if family is not None and "remote_code" in family.requires:
        requires.append("remote_code")
    suspect = (*checkpoint.suspect, doubt) if doubt else checkpoint.suspect
    return replace(
        checkpoint,
        files=weights,
        settings=tuple(  # its commit pins its code
            WeightFile(path.removeprefix(start), file.nbytes, file.identity)
            for file, path in settings_files(files, subfolder)
        ),
        requires=tuple(requires),
        suspect=tuple(dict.fromkeys(suspect)),
    )


def _family(checkpoint: Checkpoint) -> Family | None:
    if checkpoint.family is None:
        return None
    family = find(checkpoint.ref.location)
    return family if family and family.family == checkpoint.family else load(checkpoint.family)


# ------------------------------------------------------------------ the weights among files


_SHARDS = r"(.+)-([0-9]{1,9})-of-([0-9]{1,9})\."
# The index, the single file, and how shards are numbered; pickles come last.
_SAFETENSORS = (INDEX, SINGLE, f"{_SHARDS}safetensors")
_PICKLES = (PICKLE_INDEX, PICKLE, f"{_SHARDS}bin")


def choose_weights(
    files: Sequence[HubFile], subfolder: str | None, read: ReadFile | None
) -> tuple[tuple[WeightFile, ...], str | None, bool]:
    """Return the weights of a folder of a revision, a doubt, and whether they are pickles.

    Folders below it have no part. Where names leave a choice and nothing may be read, nothing is
    chosen and nothing noted.
    """
    names = {name: file for name, file in _inside(files, subfolder).items() if "/" not in name}
    adapters = [name for name in ADAPTER_WEIGHTS if name in names and ADAPTER in names][:1]
    chosen: Sequence[str] = [ADAPTER, *adapters] if adapters else []
    doubt, is_pickle = None, bool(adapters) and adapters[0].endswith(".bin")
    for index, single, numbering in (_SAFETENSORS, _PICKLES):
        if single in names or index in names:
            is_pickle = single.endswith(".bin")
            if single in names:
                numbered = sorted(name for name in names if re.fullmatch(numbering, name))
                chosen = [single]
                doubt = shards_beside(single, index, numbered if index in names else [])
            else:
                chosen, doubt = _sharded(names, index, numbering, read)
            break
    else:
        endings = (".safetensors", ".bin", ".pt", ".pth")
        unread = sorted(name for name in names if name.endswith(endings))
        if not chosen:
            doubt = NO_WEIGHTS
            if unread:
                doubt += f" under a name that is read; it has {first_of(unread, 1)}"
    weights = (WeightFile(name, names[name].nbytes, names[name].identity) for name in chosen)
    return tuple(weights), doubt, is_pickle


def folders_with_weights(files: Sequence[HubFile]) -> tuple[str, ...]:
    """Return the folders, at most two deep, that hold weights; the root has no name."""
    names = {*_SAFETENSORS[:2], *_PICKLES[:2], *ADAPTER_WEIGHTS}
    parts = [file.path.rpartition("/") for file in files]
    return tuple(sorted({at for at, _, name in parts if name in names and at.count("/") < 2}))


def _sharded(
    names: Mapping[str, HubFile], index: str, numbering: str, read: ReadFile | None
) -> tuple[Sequence[str], str | None]:
    """Return the names of the shards, and what is wrong where they are none."""
    sets: dict[tuple[str, int], dict[int, str]] = {}
    for name in names:
        if match := re.fullmatch(numbering, name):
            sets.setdefault((match[1], int(match[3])), {})[int(match[2])] = name
    if len(sets) == 1:
        (((_, total), numbered),) = sets.items()
        if len(numbered) == total == max(numbered) and min(numbered) == 1:
            return [numbered[k] for k in sorted(numbered)], None
    if read is None:
        return (), None
    shards = list[str]()
    if 0 < names[index].nbytes <= LONGEST_INDEX_NBYTES:
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            weight_map = json.loads(read(names[index]))["weight_map"]
            shards = sorted({str(name) for name in weight_map.values()})
    if not shards:
        return (), f"`{index}` is not an index of weights"
    if missing := [name for name in shards if name not in names]:
        return (), f"{first_of(missing, 1)} of `{index}` is missing"
    return shards, None


def weights_on_hub(checkpoint: Checkpoint) -> list[HubFile]:
    above = f"{checkpoint.ref.subfolder}/" if checkpoint.ref.subfolder else ""
    return [
        HubFile.identified(above + file.name, file.nbytes, file.sha256) for file in checkpoint.files
    ]


def settings_files(
    files: Sequence[HubFile], subfolder: str | None, *, code: bool = False
) -> tuple[PlacedFile, ...]:
    """Return the small files that a checkpoint needs in its folder."""
    small = [file for file in files if file.nbytes < LARGEST_SETTINGS_NBYTES]
    folders = [subfolder or ""]  # and those above it, up to the root
    while folders[-1]:
        folders.append(folders[-1].rpartition("/")[0])
    group = _matching(small, folders[0], (_SAFETENSORS[0], *QUANTIZATION, ADAPTER))
    for patterns, needs in ((TOKENIZER, TOKENIZER), (_MODEL, _MODEL[:1])):
        with_needs = (folder for folder in folders if _matching(small, folder, needs))
        for folder in itertools.islice(with_needs, 1):  # the nearest
            group |= _matching(small, folder, patterns)
    if code:
        for folder in reversed(folders):  # the nearest of a name wins
            group |= _matching(small, folder, ("*.py",))
    start = f"{subfolder}/" if subfolder else ""
    return tuple((file, f"{start}{name}") for name, file in sorted(group.items()))


def index_file(
    files: Sequence[HubFile], subfolder: str | None, names: Sequence[str]
) -> list[PlacedFile]:
    """Return the index of shards of these names, where the revision has one."""
    pickled = all(name.endswith(".bin") for name in names)
    name = (_PICKLES if pickled else _SAFETENSORS)[0]
    path = f"{subfolder}/{name}" if subfolder else name
    return [(file, path) for file in files if file.path == path]


def _inside(files: Sequence[HubFile], folder: str | None) -> dict[str, HubFile]:
    start = f"{folder}/" if folder else ""
    return {file.path[len(start) :]: file for file in files if file.path.startswith(start)}


def _matching(files: Sequence[HubFile], folder: str, patterns: Sequence[str]) -> dict[str, HubFile]:
    return {
        name: file
        for name, file in _inside(files, folder).items()
        # a star stays within one folder
        if any(name.count("/") == p.count("/") and fnmatchcase(name, p) for p in patterns)
    }
