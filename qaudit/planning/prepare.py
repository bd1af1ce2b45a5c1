"""Targets and settings -> a plan that can run: resolved, pinned and priced.

A lock given as a target is used as it is; otherwise the plan in the output folder is kept to,
so that the same command measures the same commits again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qaudit.downloads.downloads import RECORD_FILE
from qaudit.errors import UsageError
from qaudit.hub import Hub, open_hub
from qaudit.hub.series import is_hub
from qaudit.planning.extend import must_extend
from qaudit.planning.pin import (
    check_pins,
    holds_the_hub,
    is_lock,
    other_choices,
    pinned,
    pinned_or_resolved,
    read_lock,
)
from qaudit.planning.plan import make_plan
from qaudit.planning.price import with_needed_again
from qaudit.planning.resolve import needs_hub, still_there
from qaudit.recipe.table import is_recipe, recipe_from, recipe_of, split_settings
from qaudit.saved.parts import PLAN, write_plan
from qaudit.saved.signature import signing_key
from qaudit.settings import Recipe, RunOptions
from qaudit.types import SILENT, Pins, Plan, Ref, Resolved, Watch, digest

LONGEST_NAME = 80  # characters of a default output folder


@dataclass(frozen=True, eq=False)
class Prepared:
    """A plan, and what it needs to run."""

    plan: Plan
    options: RunOptions
    out: Path
    hub: Hub | None
    requested: Recipe  # as it was written
    resolved: Resolved

    def write_plan(self, pins: Pins | None = None) -> None:
        """Write the plan in the output folder, before its text is read without pins."""
        must_extend(self.plan, self.out)
        device, dtype = self.plan.device, self.plan.dtype  # they decide numbers
        requested = recipe_from({**asdict(self.requested), "device": device, "dtype": dtype})
        write_plan(self.plan, requested, self.resolved, pins, self.out)


def prepare(targets: Sequence[str], settings: dict[str, Any], watch: Watch = SILENT) -> Prepared:
    """Resolve, pin and price; nothing is written and no weights are read."""
    keys, options = split_settings(settings)
    if options.sign:
        signing_key("--sign")  # before hours go into what it would sign
    out = options.out or default_folder(targets, settings)
    lock = next((target for target in targets if is_lock(target)), None)
    recipe, resolved = (
        _from_lock(lock, targets, keys) if lock else (recipe_of(targets=[*targets], **keys), None)
    )
    on_hub = needs_hub(recipe) or (resolved is not None and holds_the_hub(resolved))
    hub = open_hub(watch=watch) if on_hub else None
    if resolved is not None and hub is not None:
        check_pins(resolved, hub.listing)
    if resolved is None or options.update:
        path = Path(lock or out / PLAN)
        resolved = pinned_or_resolved(recipe, path, hub, update=options.update)
    plan = make_plan(recipe, options=options, hub=hub, resolved=resolved, record=out / RECORD_FILE)
    evidence = out / "evidence"
    plan = with_needed_again(plan, evidence)
    return Prepared(plan, replace(options, out=out), out, hub, recipe, resolved)


def _from_lock(lock: str, targets: Sequence[str], keys: dict[str, Any]) -> tuple[Recipe, Resolved]:
    """Return the pinned recipe, with the settings beside it that choose nothing."""
    if len(targets) > 1:
        raise UsageError(
            f"`{lock}` is a lock, and other targets are given beside it",
            hint="scan a lock by itself",
        )
    if chosen := other_choices(keys):
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


def default_folder(targets: Sequence[str], settings: Mapping[str, Any]) -> Path:
    """Return `qaudit-out/TARGET`; what `--quick` measures is another question, elsewhere."""
    return Path("qaudit-out") / f"{folder_name(targets)}{'-quick' * bool(settings.get('quick'))}"


def folder_name(targets: Sequence[str]) -> str:
    """Name an output folder after all targets, so that other targets have another one."""
    name = "+".join(re.sub(r"[^A-Za-z0-9._-]+", "-", _short_name(target)) for target in targets)
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{digest(list(targets))[:8]}"


def _short_name(target: str) -> str:
    path = Path(target)
    if is_lock(target):
        return path.absolute().parent.name
    if is_recipe(target):
        return path.stem
    return str(Ref.parse(target)) if is_hub(target) else path.name or path.resolve().name
