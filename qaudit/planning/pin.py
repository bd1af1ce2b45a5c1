"""What a plan took from the Hub, pinned in `plan.json`, so that the next run takes the same.

A branch moves and a dataset is edited; the numbers in an output folder belong to the commits
they were measured at. A plan holds the recipe as it was written, every checkpoint with its
full commit hash, its files, their sizes and hashes, and every text likewise. The same command
goes on from it and asks the Hub nothing; a plan given as a target does so on another machine.

Only what chooses checkpoints or texts makes it stale: another scheme or another device is
measured on the same commits. Folders on this machine are looked at anew each time, since that
costs little, and where they hold something else the whole plan is made again.

A plan can come from a stranger and its names become paths, so each of them is checked here as
if it had come from the network. What it says about content is checked where files are
read; what it permits is ignored: permissions are given on the command line alone.

A scan into the folder of an audit adds to it; one that measures less has a folder of its own. The
evidence of an earlier scan stays in the folder, but `audit.json` and the card have what the
last plan measured: a narrower one would replace them.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

from qaudit.core.registry import origins, parse_merge, parse_schemes
from qaudit.core.scheme import Scheme, Shipped
from qaudit.errors import MachineError, OtherIdentityError, QauditError, UsageError
from qaudit.hub import Hub
from qaudit.planning.resolve import resolve, still_there
from qaudit.recipe.table import recipe_from
from qaudit.saved.audits import read_audit
from qaudit.saved.codec import is_inside
from qaudit.saved.parts import AGAIN, PLAN, read_plan
from qaudit.types import Pins, Plan, Recipe, Resolved, TextFile, WeightFile

CHOOSES = (
    "targets", "checkpoints", "last", "soups", "calibration",
    "evaluation", "choices", "tasks", "task_data", "schedule", "family", "shipped",
    "reference",
)  # fmt: skip
"""The keys of a recipe that decide what a plan pins."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_IDENTITY = re.compile(r"[0-9a-f]{64}|git:[0-9a-f]{40}")
_REPO = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*")


def is_lock(target: str) -> bool:
    return Path(target).name == PLAN


def same_choice(a: Recipe, b: Recipe) -> bool:
    """Return whether two recipes ask for the same checkpoints and texts."""
    return all(getattr(a, key) == getattr(b, key) for key in CHOOSES)


def moved(before: Resolved, now: Resolved) -> tuple[str, ...]:
    """Return which names stand at another commit than they did before."""
    old, new = (
        {**{(str(c.ref), c.label): c.commit for c in resolved.checkpoints},
         **{(text.source, "text"): text.commit for text in resolved.texts}}
        for resolved in (before, now)
    )  # fmt: skip
    notes = [
        f"`{key[0]}` is at {str(commit)[:10]} now; it was at {str(old[key])[:10]} when this folder "
        "was planned before"
        for key, commit in new.items()
        if key in old and old[key] != commit
    ]
    more = len(notes) - 3
    return (*notes[:3], f"and {more} more revisions moved") if more > 0 else tuple(notes)


def read_lock(path: Path) -> tuple[Recipe, Resolved]:
    """Read what a plan pins; refuse a damaged, foreign, future or hostile one."""
    plan = read_plan(path)
    try:
        requested = recipe_from(asdict(plan.requested))
        for where, wrong in _wrong(plan.resolved):
            raise UsageError(f"{where} {wrong}", hint=AGAIN)
    except UsageError as error:
        raise UsageError(f"the plan `{path}`: {error.message}", hint=error.hint or AGAIN) from error
    return requested, pinned(requested, plan.resolved)


def from_lock(lock: str, targets: Sequence[str], keys: dict[str, Any]) -> tuple[Recipe, Resolved]:
    """Return the pinned recipe, with the settings beside it that choose nothing."""
    if len(targets) > 1:
        raise UsageError(
            f"`{lock}` is a lock, and other targets are given beside it",
            hint="scan a lock by itself",
        )
    if chosen := [key for key in keys if key in CHOOSES and key != "targets"]:
        raise UsageError(
            f"`{lock}` already pins which checkpoints and texts are measured, "
            f"and `{chosen[0]}` would change that",
            hint="leave it out, or scan the targets themselves",
        )
    recipe, resolved = read_lock(Path(lock))
    if not still_there(recipe, resolved):
        raise UsageError(
            f"the folders that `{lock}` was made from have changed since",
            hint="scan the targets themselves",
        )
    recipe = recipe_from({**asdict(recipe), **keys})
    return recipe, pinned(recipe, resolved)


def _wrong(resolved: Resolved) -> Iterator[tuple[str, str]]:
    """Yield what no plan has; of what is on the Hub every name becomes part of a path."""
    for subject in resolved.subjects:
        where = f"`{subject.label}`"
        if not subject.members or (subject.merge is None and subject.members[0][1:] != (1.0,)):
            yield where, "is not one checkpoint"
        elif subject.merge is not None and not subject.is_search:
            parse_merge(subject.merge)  # that of a search is read when schemes are known
    labels = {subject.label for subject in resolved.subjects}
    if not labels or len(labels) < len(resolved.subjects):
        yield "the subjects", "are none, or have a label twice"
    members = (c for subject in resolved.subjects for c, _ in subject.members)
    for checkpoint in dict.fromkeys((*resolved.checkpoints, *resolved.shipped, *members)):
        where = f"`{checkpoint.label}`"
        for file in (*checkpoint.files, *checkpoint.unread, *checkpoint.settings):
            yield from _wrong_file(where, file.name, file)
        if checkpoint.commit is not None:
            yield from _wrong_place(where, checkpoint.ref.location, checkpoint.commit)
            if not is_inside(checkpoint.ref.subfolder or "x"):
                yield where, "leads outside its repository"
            if not checkpoint.files:
                yield where, "has no files"
    for text in resolved.texts:
        yield from _wrong_place(f"`{text.source}`", text.repo, text.commit)
        yield from _wrong_file(f"`{text.source}`", text.path, text)


def _wrong_file(where: str, name: str, file: WeightFile | TextFile) -> Iterator[tuple[str, str]]:
    if not is_inside(name):
        yield where, "has files that lead outside their folder"
    if not _IDENTITY.fullmatch(file.sha256) or file.nbytes < 0:
        yield where, "has files with a hash or a size that is none"


def _wrong_place(where: str, repo: str, commit: str) -> Iterator[tuple[str, str]]:
    if not _REPO.fullmatch(repo):
        yield where, "is in what is no repository"
    if not _COMMIT.fullmatch(commit):
        yield where, "is at what is no full commit hash"


def pinned_or_resolved(
    recipe: Recipe, path: Path, hub: Hub | None = None, *, update: bool = False
) -> Resolved:
    """Use the plan at `path` if its recipe makes the same choice; resolve anew otherwise."""
    before = None
    if path.exists():
        try:
            earlier, before = read_lock(path)
        except UsageError:
            if not update:
                raise
        else:
            same = same_choice(earlier, recipe) and not update
            if same and still_there(recipe, before):
                if hub is not None:
                    check_pins(before, hub)
                return pinned(recipe, before)
    now = resolve(recipe, hub)
    return replace(now, notes=(*now.notes, *moved(before, now))) if before else now


def check_pins(resolved: Resolved, hub: Hub) -> None:
    """Hold the hashes of a plan to its commits, where a listing of the commit is on this machine.

    Hashes find results and cached weights, so that a hash of another checkpoint would give that
    checkpoint's numbers under this commit.
    """
    for checkpoint in (source for c in resolved.checkpoints for source in c.sources):
        if checkpoint.commit is None:
            continue
        settings = () if checkpoint.base else checkpoint.settings  # which are those of the base
        files = hub.listing.known_files(checkpoint.ref.location, checkpoint.commit)
        hashes = {file.identity for file in files or ()}
        for file in (*checkpoint.files, *checkpoint.unread, *settings):
            if hashes and file.sha256 not in hashes:
                raise UsageError(
                    f"the plan gives `{file.name}` of `{checkpoint.label}` the hash "
                    f"{file.sha256[:12]}, and no file at commit {checkpoint.commit[:12]} has it",
                    hint=AGAIN,
                )


def pinned(recipe: Recipe, resolved: Resolved) -> Resolved:
    """Return the resolution of a recipe that chooses the same and may differ elsewhere."""
    read = resolved.recipe
    recipe = replace(recipe, calibration=read.calibration, evaluation=read.evaluation)
    return replace(resolved, recipe=recipe)


NUMERICS = 7
"""Raised whenever a published number changes, or evidence gets another one.

2: evidence has the divergence from full precision, and sums by position in the window.
3: gates and routers stay as they are, and a single file of weights is read before an index.
4: losses take powers of two, and divergences are differences of sums where those are exact enough.
5: evidence has divergences and changed tokens by full precision's confidence, and a hash of what is
not quantized.
6: divergences are sums of products with differences of log-probabilities.
What was measured with another version is measured again.
"""

_LIBRARIES = (
    "torch", "transformers", "tokenizers", "bitsandbytes", "safetensors", "numpy", "scipy",
)  # fmt: skip


def libraries(
    schemes: Iterable[Scheme | type[Scheme]] = (), merges: Iterable[str | None] = ()
) -> dict[str, str]:
    """Return the versions of everything that computes, with what such schemes alone need."""
    schemes = tuple(schemes)
    alone = (scheme.extra[0] for scheme in schemes if scheme.extra)
    distributions = (origin.distribution for origin in origins(schemes, merges))
    return _installed((*_LIBRARIES, *alone, *distributions))


version_of = functools.cache(version)  # each call reads and parses a file
"""Returns the version of an installed distribution."""


def _installed(names: Iterable[str]) -> dict[str, str]:
    versions = {}
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version_of(name)
    return versions


def default_threads() -> int:
    """Return `OMP_NUM_THREADS`, or the number of cores that this process may use."""
    requested = os.environ.get("OMP_NUM_THREADS", "")
    if requested.isdecimal() and int(requested) > 0:
        return int(requested)
    available = getattr(os, "sched_getaffinity", None)
    return len(available(0)) if available else os.cpu_count() or 1


def pinned_libraries(
    schemes: Iterable[Scheme], merges: Iterable[str | None] = ()
) -> dict[str, str]:
    """Return the versions that parts must have; torch must be one of them."""
    versions = libraries(schemes, merges)
    if "torch" not in versions:
        raise MachineError(
            "a plan pins the versions of libraries, and torch is not installed here",
            hint="plan in the environment that the parts run in",
        )
    return versions


def refuse_other_libraries(pins: Pins) -> None:
    """Refuse to measure with other versions than those of the plan, each by its name."""
    here = {**_installed({*_LIBRARIES, *pins.libraries}), "qaudit's numerics": str(NUMERICS)}
    planned = {**pins.libraries, "qaudit's numerics": str(pins.numerics)}
    other = [
        f"{name} {here.get(name, 'missing')} instead of {planned.get(name, 'none')}"
        for name in sorted(here.keys() | planned.keys())
        if here.get(name) != planned.get(name)
    ]
    if other:
        raise OtherIdentityError(
            f"this environment has {', '.join(other)}, and such numbers would not compare",
            hint="run the part in the environment of the plan, or plan again in this one",
        )


TEXTS = ("evaluation", "calibration", "chat_template")
FURTHER = ("choices", "rollouts", "reference")


def must_extend(plan: Plan, out: Path) -> None:
    """Refuse a plan whose audit would lack what the audit in its folder has."""
    try:
        lost = list(_lost(read_audit(out).plan, plan))
    except QauditError:  # there is none, or it is damaged and written anew
        return
    if not lost:
        return
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    numbered = (out.with_name(f"{out.name}-{number}") for number in count(2))
    free = next(path for path in numbered if not path.exists())
    raise UsageError(
        f"`{out}` has an audit, which this scan would replace by one without "
        f"{', '.join(lost[:3])}{more}",
        hint=f"name another folder, as `--out {shlex.quote(str(free))}`; or ask for what both have",
    )


def _lost(before: Plan, plan: Plan) -> Iterator[str]:
    """Yield what the audit has, and the plan has not."""
    subjects = {s.label: s.content for s in plan.subjects}
    other_targets = before.recipe.targets != plan.recipe.targets
    for subject in before.subjects:
        other = other_targets and subjects.get(subject.label) != subject.content
        if subject.label not in subjects or other:
            yield f"`{subject.label}`"
    for scheme in parse_schemes(before.specs):
        if scheme.spec not in plan.specs and not isinstance(scheme, Shipped):
            yield scheme.short
    shipped = {checkpoint.label for checkpoint in plan.shipped}
    yield from (f"`{file.label}`" for file in before.shipped if file.label not in shipped)
    old, new = before.recipe, plan.recipe
    yield from (f"the task `{task}`" for task in old.tasks if task not in new.tasks)
    diagnosed = [text.partition(":")[0] for text in new.diagnostics]
    for name in (text.partition(":")[0] for text in old.diagnostics):
        if not {name, "all"} & {*diagnosed}:
            yield f"the diagnostic `{name}`"
    for name in TEXTS:
        if getattr(old, name) != getattr(new, name):
            yield f"{getattr(old, name) or 'the default'} as its {name.replace('_', ' ')}"
    for name in FURTHER:
        if (value := getattr(old, name)) not in (None, getattr(new, name)):
            yield f"the {name} `{value}`"
    if old.evaluation_documents > new.evaluation_documents:
        yield f"documents beyond {new.evaluation_documents}"
