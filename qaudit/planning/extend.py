"""A scan into the folder of an audit adds to it; one that measures less has a folder of its own.

The evidence of an earlier scan stays in the folder, but `audit.json` and the card have what the
last plan measured: a narrower one would replace them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from qaudit.core.registry import parse_schemes
from qaudit.core.shipped import Shipped
from qaudit.errors import QauditError, UsageError
from qaudit.report.card.protocol import command
from qaudit.saved.audits import read_audit
from qaudit.saved.codec import FILE
from qaudit.settings import Recipe
from qaudit.types import Plan

SELECTIONS = ("checkpoints", "stages", "every", "last", "limit")
LISTS = ("schemes", "soups", "shipped", "tasks", "diagnostics")
TEXTS = ("evaluation", "calibration", "chat_template")
FURTHER = ("choices", "rollouts", "reference")


def must_extend(plan: Plan, out: Path) -> None:
    """Refuse a plan whose audit would lack what the audit in its folder has."""
    if not (out / FILE).is_file():
        return
    try:
        before = read_audit(out).plan
    except QauditError:  # damaged: it is written anew
        return
    lost = list(_lost(before, plan))
    if not lost:
        return
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    both = _together(before.recipe, plan.recipe)
    folder = shlex.quote(str(out))
    adding = "" if both is None else f"; or add to it: `{command(both)} --out {folder}`"
    raise UsageError(
        f"`{out}` has an audit, which this scan would replace by one without "
        f"{', '.join(lost[:3])}{more}",
        hint=f"name another folder, as `--out {shlex.quote(str(_free(out)))}`{adding}",
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


def _together(before: Recipe, recipe: Recipe) -> Recipe | None:
    """Return a recipe of both; None where they differ in more than how much they measure."""
    if before.targets != recipe.targets:
        return None
    if any(getattr(before, name) != getattr(recipe, name) for name in TEXTS):
        return None
    further: dict[str, Any] = {
        name: getattr(recipe, name) or getattr(before, name) for name in FURTHER
    }
    selected = [{name: getattr(one, name) for name in SELECTIONS} for one in (before, recipe)]
    if selected[0] != selected[1]:
        if all(any(one.values()) for one in selected):
            return None
        further |= next(one for one in selected if not any(one.values()))
    for name in LISTS:
        further[name] = tuple(dict.fromkeys((*getattr(before, name), *getattr(recipe, name))))
    documents = max(before.evaluation_documents, recipe.evaluation_documents)
    bits = (*before.bits, *recipe.bits) if before.bits and recipe.bits else ()
    return replace(
        recipe, **further, bits=tuple(dict.fromkeys(bits)), evaluation_documents=documents
    )


def _free(out: Path) -> Path:
    return next(
        path for number in count(2) if not (path := out.with_name(f"{out.name}-{number}")).exists()
    )
