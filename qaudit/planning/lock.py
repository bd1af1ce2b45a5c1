"""What a plan took from the Hub, pinned in `plan.json`, so that the next run takes the same.

A branch moves and a dataset is edited; the numbers in an output folder belong to the commits
they were measured at. The lock holds the recipe as it was written, every checkpoint with its
full commit hash, its files, their sizes and hashes, and every text likewise. The same command
goes on from it and asks the Hub nothing; a lock given as a target does so on another machine.
It is written before anything is fetched, whole or not at all. The `plan.lock.json` of older
versions is read alike.

Only what chooses checkpoints or texts makes a lock stale: another scheme or another device is
measured on the same commits. Folders on this machine are looked at anew each time, since that
costs little, and where they hold something else the whole plan is made again.

A lock can come from a stranger and its names become paths, so each of them is checked here as
if it had come from the network. What a lock says about content is checked where files are
read; what it permits is ignored: permissions are given on the command line alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qaudit.core.registry import parse_merge
from qaudit.errors import AuditError, UsageError
from qaudit.planning.resolve import Resolved, resolve, still_there
from qaudit.recipe.table import recipe_from
from qaudit.saved.codec import decode, parse
from qaudit.saved.documents import LockDocument, Resolution, RunDocument, TextSources
from qaudit.saved.parts import PLAN, RUN_SCHEMA, digest_of
from qaudit.saved.plans import LARGEST_NBYTES, pointers, subjects_in
from qaudit.types import Checkpoint, Recipe, Subject, TextFile
from qaudit.whole import read_regular

if TYPE_CHECKING:
    from qaudit.hub import Hub
    from qaudit.hub.listing import Listing

SCHEMA = "1"
_MARK, _RUN = "qaudit plan", "qaudit run"

_CHOOSES = (
    "targets", "checkpoints", "stages", "every", "last", "limit", "soups", "calibration",
    "evaluation", "choices", "tasks", "task_data", "schedule", "family", "shipped",
    "reference",
)  # fmt: skip
"""The keys of a recipe that decide what a lock holds."""

_AGAIN = "delete it, or pass `--update`, to have the plan made anew"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_IDENTITY = re.compile(r"[0-9a-f]{64}|git:[0-9a-f]{40}")
_REPO = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*")


def is_lock(target: str) -> bool:
    return target.endswith(".lock.json") or Path(target).name == PLAN


def holds_the_hub(resolved: Resolved) -> bool:
    """Return whether there is anything to pin: folders on this machine have no commits."""
    return bool(resolved.texts) or any(c.commit for c in (*resolved.checkpoints, *resolved.shipped))


def same_choice(a: Recipe, b: Recipe) -> bool:
    """Return whether two recipes ask for the same checkpoints and texts."""
    return all(getattr(a, key) == getattr(b, key) for key in _CHOOSES)


def other_choices(keys: Iterable[str]) -> list[str]:
    """Return which of these keys choose checkpoints or texts."""
    return [key for key in keys if key in _CHOOSES and key != "targets"]


def resolution_of(resolved: Resolved, recipe: Recipe) -> Resolution:
    return Resolution(
        recipe=asdict(recipe),
        read=TextSources(resolved.recipe.calibration, resolved.recipe.evaluation),
        checkpoints=tuple(resolved.checkpoints),
        subjects=tuple(pointers(subject, resolved.checkpoints) for subject in resolved.subjects),
        texts=resolved.texts,
        findings=tuple(resolved.findings),
        notes=tuple(resolved.notes),
        local=resolved.local,
        shipped=resolved.shipped,
    )


def moved(before: Resolved, now: Resolved) -> tuple[str, ...]:
    """Return which names stand at another commit than they did before."""
    old = {(str(c.ref), c.label): c.commit for c in before.checkpoints}
    new = {(str(c.ref), c.label): c.commit for c in now.checkpoints}
    old |= {(text.source, "text"): text.commit for text in before.texts}
    new |= {(text.source, "text"): text.commit for text in now.texts}
    both = [(name, old[name], commit) for name, commit in new.items() if name in old]
    changed = [(name, was, commit) for name, was, commit in both if was != commit]
    notes = [
        f"`{name}` is at {str(commit)[:10]} now; it was at {str(was)[:10]} when this folder was "
        "planned before"
        for (name, _), was, commit in changed
    ]
    more = len(notes) - 3
    return (*notes[:3], f"and {more} more revisions moved") if more > 0 else tuple(notes)


def read_lock(path: Path) -> tuple[Recipe, Resolved]:
    """Read a lock of this version; refuse a damaged, foreign, future or hostile one."""
    try:
        document = parse(read_regular(path, LARGEST_NBYTES).decode())
    except FileNotFoundError as error:
        raise UsageError(
            f"there is no lock `{path}`", hint=f"a scan leaves `{PLAN}` in its folder"
        ) from error
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UsageError(f"the lock `{path}` cannot be read: {reason}", hint=_AGAIN) from error
    _check_version(document, path)
    try:
        if "run" in document:
            plan: RunDocument | LockDocument = decode(RunDocument, document, "lock")
        else:
            plan = decode(LockDocument, document, "lock")
        contents = _resolved(plan.resolution if isinstance(plan, RunDocument) else plan)
        if plan.digest and plan.digest != digest_of(document):
            raise UsageError("it was edited: its digest is of other contents", hint=_AGAIN)
        return contents
    except AuditError as error:
        raise UsageError(f"the lock `{path}` is damaged: {error.message}", hint=_AGAIN) from error
    except UsageError as error:
        raise UsageError(
            f"the lock `{path}`: {error.message}", hint=error.hint or _AGAIN
        ) from error


def _check_version(document: Any, path: Path) -> None:
    marks = document if isinstance(document, dict) else {}
    if marks.get("run") != _RUN and marks.get("lock") != _MARK:
        raise UsageError(
            f"`{path}` is not a lock of qaudit", hint=f"name the `{PLAN}` of an output folder"
        )
    version, wrote = marks.get("schema"), marks.get("qaudit")
    schema = RUN_SCHEMA if "run" in marks else SCHEMA
    if not isinstance(version, str) or not re.fullmatch(r"[0-9]{1,6}", version):
        raise UsageError(f"the lock `{path}` does not say its version", hint=_AGAIN)
    if int(version) > int(schema):
        raise UsageError(
            f"the lock `{path}` has schema version {version}, this qaudit reads up to {schema}",
            hint=f"install qaudit {str(wrote)[:20]} or later",
        )


def _resolved(lock: Resolution) -> tuple[Recipe, Resolved]:
    recipe = recipe_from(lock.recipe)
    for place, checkpoint in enumerate(lock.checkpoints):
        _check_checkpoint(checkpoint, f"lock.checkpoints[{place}]")
    for place, checkpoint in enumerate(lock.shipped):
        _check_checkpoint(checkpoint, f"lock.shipped[{place}]")
    for place, text in enumerate(lock.texts):
        _check_text(text, f"lock.texts[{place}]")
    resolved = Resolved(
        recipe=replace(recipe, calibration=lock.read.calibration, evaluation=lock.read.evaluation),
        series=lock.checkpoints,
        checkpoints=lock.checkpoints,
        subjects=_subjects(lock),
        texts=lock.texts,
        findings=lock.findings,
        notes=lock.notes,
        local=lock.local,
        shipped=lock.shipped,
    )
    return recipe, resolved


def _subjects(lock: Resolution) -> tuple[Subject, ...]:
    subjects = subjects_in(lock.subjects, lock.checkpoints, "lock.subjects")
    for place, subject in enumerate(subjects):
        weights, where = (
            [weight for _, weight in subject.members],
            f"lock.subjects[{place}].members",
        )
        if subject.merge is None:
            _expect(weights == [1.0], where, "are not one checkpoint")
        elif not subject.is_search:  # its scheme is read when it is known which are measured
            parse_merge(subject.merge)
        _expect(all(map(math.isfinite, weights)), where, "have odd weights")
    labels = [subject.label for subject in subjects]
    _expect(bool(labels), "lock.subjects", "are none")
    _expect(len(set(labels)) == len(labels), "lock.subjects", "have a label twice")
    return subjects


def _check_checkpoint(checkpoint: Checkpoint, where: str) -> None:
    """Check a checkpoint; of one on the Hub every name becomes part of a path."""
    for file in (*checkpoint.files, *checkpoint.unread, *checkpoint.settings):
        _expect(_is_inside(file.name), f"{where}.files", "lead outside their folder")
        _expect(_IDENTITY.fullmatch(file.sha256), f"{where}.files", "have a hash that is none")
        _expect(file.nbytes >= 0, f"{where}.files", "have a size below zero")
    if checkpoint.commit is not None:
        ref = checkpoint.ref
        _expect(_REPO.fullmatch(ref.location), f"{where}.ref.location", "is no repository")
        _expect(_COMMIT.fullmatch(checkpoint.commit), f"{where}.commit", "is no full commit hash")
        _expect(_is_inside(ref.subfolder or "x"), f"{where}.ref.subfolder", "leads outside")
        _expect(bool(checkpoint.files), f"{where}.files", "are none")


def _check_text(text: TextFile, where: str) -> None:
    _expect(_REPO.fullmatch(text.repo), f"{where}.repo", "is no repository")
    _expect(_COMMIT.fullmatch(text.commit), f"{where}.commit", "is no full commit hash")
    _expect(_is_inside(text.path), f"{where}.path", "leads outside its repository")
    _expect(_IDENTITY.fullmatch(text.sha256), f"{where}.sha256", "is no hash")
    _expect(text.nbytes >= 0, f"{where}.nbytes", "is below zero")


def _is_inside(name: str) -> bool:
    """Return whether a name with slashes stays below the folder it is put in."""
    odd = "\\" in name or not name.isprintable() or len(name) > 1000
    return not odd and not any(part in ("", ".", "..") for part in name.split("/"))


def _expect(holds: object, where: str, wrong: str) -> None:
    if not holds:
        raise UsageError(f"`{where}` {wrong}", hint=_AGAIN)


def pinned_or_resolved(
    recipe: Recipe, path: Path, hub: Hub | None = None, *, update: bool = False
) -> Resolved:
    """Use the lock at `path` if its recipe makes the same choice; resolve anew otherwise."""
    before = None
    if path.exists():
        try:
            earlier, before = read_lock(path)
        except UsageError:
            if not update:
                raise
        else:
            same = not update and same_choice(earlier, recipe)
            if same and still_there(recipe, before):
                if hub is not None:
                    check_pins(before, hub.listing)
                return pinned(recipe, before)
    now = resolve(recipe, hub)
    return replace(now, notes=(*now.notes, *moved(before, now))) if before else now


def check_pins(resolved: Resolved, listing: Listing) -> None:
    """Hold the hashes of a lock to its commits, where a listing of the commit is on this machine.

    Hashes find results and cached weights, so that a hash of another checkpoint would give that
    checkpoint's numbers under this commit.
    """
    for checkpoint in resolved.checkpoints:
        if checkpoint.commit is None:
            continue
        files = listing.known_files(checkpoint.ref.location, checkpoint.commit)
        hashes = {file.identity for file in files or ()}
        for file in (*checkpoint.files, *checkpoint.unread, *checkpoint.settings):
            if hashes and file.sha256 not in hashes:
                raise UsageError(
                    f"the lock gives `{file.name}` of `{checkpoint.label}` the hash "
                    f"{file.sha256[:12]}, and no file at commit {checkpoint.commit[:12]} has it",
                    hint=_AGAIN,
                )


def pinned(recipe: Recipe, resolved: Resolved) -> Resolved:
    """Return the resolution of a recipe that chooses the same and may differ elsewhere."""
    read = resolved.recipe
    recipe = replace(recipe, calibration=read.calibration, evaluation=read.evaluation)
    return replace(resolved, recipe=recipe)
