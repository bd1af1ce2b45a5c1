"""Targets and settings -> a plan that can run: resolved, pinned and priced. No weight is read.

A lock given as a target is used as it is; otherwise the plan in the output folder is kept to,
so that the same command measures the same commits again. What needs a permission is refused before
anything is downloaded, what cannot fit in memory or on the disk before the first byte of weights,
with what would fit.

A scan into the folder of an audit adds to it; one that measures less has a folder of its own. The
evidence of an earlier scan stays in the folder, but `audit.json` and the card have what the
last plan measured: a narrower one would replace them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from qaudit.checkpoints.stamps import hub_cache
from qaudit.core.registry import origins, parse_schemes
from qaudit.core.scheme import Scheme, Shipped
from qaudit.diagnostics.registry import origins_of
from qaudit.downloads.schedule import RECORD_FILE, price_traffic
from qaudit.errors import QauditError, UsageError
from qaudit.host import available_nbytes, default_stream_limit, free_disk_nbytes
from qaudit.hub import Hub, open_hub
from qaudit.hub.series import is_hub
from qaudit.planning import pin
from qaudit.planning.footprint import Footprint
from qaudit.planning.passes import (
    Pricing,
    calibrated,
    class_notes,
    passes_of,
    price_otherwise,
    with_draws,
)
from qaudit.planning.price import (
    ITEMSIZE,
    START_SECONDS,
    Load,
    begins_again_notes,
    choose_audited,
    choose_column_loop,
    device_notes,
    diagnoses_of,
    kept_specs,
    nbytes_to_keep,
    price_of,
    seconds_range,
)
from qaudit.planning.resolve import choose, needs_hub, proposed_soups, still_there
from qaudit.planning.shipped import reading_shipped, with_shipped
from qaudit.planning.sizes import text_size
from qaudit.planning.survey import LONGEST_CONTEXT, Survey, allowed_notes, expert_notes
from qaudit.recipe.table import is_recipe, recipe_from, recipe_of, split_settings
from qaudit.report.protocol import command
from qaudit.saved.audits import checkpoints_of, read_audit
from qaudit.saved.codec import FILE
from qaudit.saved.exports import pinned_tables
from qaudit.saved.parts import PLAN, write_plan
from qaudit.saved.signature import signing_key
from qaudit.settings import RunOptions
from qaudit.support.sizes import size
from qaudit.text.corpus import make_protocol
from qaudit.types import (
    SILENT,
    Pins,
    Plan,
    Price,
    Recipe,
    Ref,
    Resolved,
    Traffic,
    Watch,
    digest,
    reference_in,
)

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
        pinned_tables(parse_schemes(self.requested.schemes), self.out / "evidence", keep=True)
        device, dtype = self.plan.device, self.plan.dtype  # they decide numbers
        requested = recipe_from({**asdict(self.requested), "device": device, "dtype": dtype})
        write_plan(self.plan, requested, self.resolved, pins, self.out)


def prepare(targets: Sequence[str], settings: dict[str, Any], watch: Watch = SILENT) -> Prepared:
    """Resolve, pin and price; nothing is written and no weights are read."""
    keys, options = split_settings(settings)
    if options.sign:
        signing_key("--set sign=true")  # before hours go into what it would sign
    out = options.out or default_folder(targets, settings)
    lock = next((target for target in targets if pin.is_lock(target)), None)
    resolved: Resolved | None = None
    if lock:
        recipe, resolved = _from_lock(lock, targets, keys)
    else:
        recipe = recipe_of(targets=[*targets], **keys)
    on_hub = needs_hub(recipe)
    if resolved is not None:  # folders on this machine have no commits
        read = (*(source for c in resolved.checkpoints for source in c.sources), *resolved.shipped)
        on_hub = on_hub or bool(resolved.texts) or any(c.commit for c in read)
    hub = open_hub(watch=watch) if on_hub else None
    if resolved is not None and hub is not None:
        pin.check_pins(resolved, hub)
    if resolved is None or options.update:
        path = Path(lock or out / PLAN)
        resolved = pin.pinned_or_resolved(recipe, path, hub, update=options.update)
    plan = make_plan(recipe, options=options, hub=hub, resolved=resolved, record=out / RECORD_FILE)
    return Prepared(plan, replace(options, out=out), out, hub, recipe, resolved)


def _from_lock(lock: str, targets: Sequence[str], keys: dict[str, Any]) -> tuple[Recipe, Resolved]:
    """Return the pinned recipe, with the settings beside it that choose nothing."""
    if len(targets) > 1:
        raise UsageError(
            f"`{lock}` is a lock, and other targets are given beside it",
            hint="scan a lock by itself",
        )
    if chosen := [key for key in keys if key in pin.CHOOSES and key != "targets"]:
        raise UsageError(
            f"`{lock}` already pins which checkpoints and texts are measured, "
            f"and `{chosen[0]}` would change that",
            hint="leave it out, or scan the targets themselves",
        )
    recipe, resolved = pin.read_lock(Path(lock))
    if not still_there(recipe, resolved):
        raise UsageError(
            f"the folders that `{lock}` was made from have changed since",
            hint="scan the targets themselves",
        )
    recipe = recipe_from({**asdict(recipe), **keys})
    return recipe, pin.pinned(recipe, resolved)


def default_folder(targets: Sequence[str], settings: Mapping[str, Any]) -> Path:
    """Return `qaudit-out/TARGET`; what `--quick` measures is another question, elsewhere."""
    return Path("qaudit-out") / f"{folder_name(targets)}{'-quick' * bool(settings.get('quick'))}"


def folder_name(targets: Sequence[str]) -> str:
    """Name an output folder after all targets, so that other targets have another one."""
    names = []
    for target in targets:
        path = Path(target)
        if pin.is_lock(target):
            names.append(path.absolute().parent.name)
        elif is_recipe(target):
            names.append(path.stem)
        elif is_hub(target):
            names.append(str(Ref.parse(target)))
        else:
            names.append(path.name or path.resolve().name)
    name = "+".join(re.sub(r"[^A-Za-z0-9._-]+", "-", name) for name in names)
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{digest(list(targets))[:8]}"


KEPT_SECONDS = 300.0  # of a pass, after which the engine keeps it at a block
DEFAULTS = RunOptions()


def make_plan(
    recipe: Recipe,
    *,
    options: RunOptions = DEFAULTS,
    hub: Hub | None = None,
    resolved: Resolved | None = None,
    record: Path | None = None,
) -> Plan:
    """Resolve and price a recipe; refuse what is not permitted and what cannot fit.

    In `record` an earlier run of the same scan listed its downloads that may be evicted.
    """
    resolved, schemes, seen, hub = choose(recipe, options, hub, resolved)
    traffic = _fetched(resolved, hub, options.disk_budget, record)
    plan, footprint = _planned(resolved, schemes, seen, traffic, options)
    downloads = traffic.nbytes_disk_peak if traffic else 0
    kept = kept_specs(options.keep, schemes)
    kept_nbytes = nbytes_to_keep(kept, plan.subjects, seen.largest)
    footprint.refuse_short_disk(record.parent if record else Path(), downloads, kept_nbytes)
    merges = [subject.merge for subject in plan.subjects]
    beside = "quantized weights beside downloads"
    plugins = (*origins(schemes, merges), *origins_of(recipe.diagnostics))
    return replace(
        plan,
        notes=(
            *resolved.notes,
            *seen.notes,
            *(seen.references if not any(p.is_quantized for p in plan.passes) else ()),
            *class_notes(schemes, seen.largest),
            *expert_notes(seen.largest),
            *allowed_notes(checkpoints_of(plan.subjects)),
            *(f"the {plugin.kind} `{plugin.name}` is of {plugin}" for plugin in plugins),
            *plan.notes,
            *([f"`--keep` writes up to {size(kept_nbytes)} of {beside}"] if kept else []),
            *proposed_soups(recipe, resolved.checkpoints),
        ),
        plugins=plugins,
        nbytes_disk=plan.nbytes_disk + kept_nbytes,
    )


def _planned(
    resolved: Resolved,
    schemes: Sequence[Scheme],
    seen: Survey,
    traffic: Traffic | None,
    options: RunOptions,
) -> tuple[Plan, Footprint]:
    """Return the passes with what they take of this machine, and the footprint of the audit's."""
    recipe, subjects, largest = resolved.recipe, resolved.subjects, seen.largest
    context = recipe.context or min(LONGEST_CONTEXT, seen.longest_context)
    item_context = (recipe.context or seen.longest_context) if recipe.tasks else None
    protocol = make_protocol(recipe, context, item_context)
    trees, most = seen.reads_trees, seen.longest_context
    drawn = with_draws(recipe, schemes)
    read = checkpoints_of(subjects)
    text = text_size(drawn, protocol, read, resolved.texts, trees=trees, longest=most)
    device, dtype = machine = choose_audited(recipe.device, recipe.dtype)
    column_loop, column_note = choose_column_loop(device, schemes, largest)
    diagnoses = diagnoses_of(recipe, schemes, largest.blocks, text, protocol)
    limit = options.stream_memory if options.stream_memory is not None else default_stream_limit()
    load = Load.of(schemes, text, 2 if recipe.reference else 1)
    footprint = Footprint(largest, load, ITEMSIZE[dtype], limit, device, text.most_items)
    available = available_nbytes()
    footprint.refuse_short_memory(available, protocol.calibration_documents)
    beside = [replace(footprint, load=load) for load in diagnoses.values() if load.schemes]
    price = sum((price_of(*diagnosis, largest) for diagnosis in diagnoses.items()), Price())
    pricing = Pricing(largest, text, price)
    reference = reference_in(subjects, recipe.reference)
    passes = passes_of(subjects, schemes, recipe.repeats, pricing, reference)
    otherwise = None
    if recipe.arithmetic:
        otherwise = price_otherwise(subjects, schemes, pricing, passes, machine)
    longest = max(seconds_range(step.price.flops, *machine)[1] for step in passes)
    is_long = longest > KEPT_SECONDS
    whole_notes = begins_again_notes(footprint.rounds, diagnoses)
    # Of a pass that is kept at a block, and of the one that replaces it.
    nbytes_kept = 2 * footprint.streams_nbytes if is_long and not whole_notes else 0
    idle = recipe.repeats > 1 and not calibrated(schemes)
    passes = tuple(reading_shipped(step, resolved.shipped, pricing) for step in passes)
    price = sum((step.price for step in passes), Price())
    low, high = seconds_range(price.flops, *machine)
    plan = Plan(
        recipe=recipe,
        subjects=subjects,
        specs=tuple(scheme.spec for scheme in schemes),
        device=device,
        dtype=dtype,
        column_loop=column_loop,
        context=protocol.context,
        item_context=protocol.item_context,
        parameters=largest.parameters,
        blocks=largest.blocks,
        nbytes_read=price.nbytes_read,
        nbytes_memory=max(each.memory_nbytes for each in (footprint, *beside)),
        nbytes_memory_fixed=replace(footprint, limit_nbytes=0).memory_nbytes,
        nbytes_memory_available=available,
        nbytes_disk=footprint.disk_nbytes + nbytes_kept,
        streams=price.streams,
        seconds_low=low + START_SECONDS[0],
        seconds_high=high + START_SECONDS[1],
        texts=resolved.texts,
        shipped=resolved.shipped,
        traffic=traffic,
        findings=resolved.findings,
        passes=passes,
        otherwise=otherwise,
        diagnoses=tuple(work.text for work in diagnoses),
        notes=(
            *text.notes,
            *device_notes(recipe.device),
            *([column_note] if column_note else ()),
            *footprint.notes,
            *(["no scheme here calibrates: there is nothing to draw again"] if idle else ()),
            *(whole_notes if is_long else ()),
        ),
    )
    return plan, footprint


def _fetched(
    resolved: Resolved, hub: Hub | None, budget_nbytes: int | None, record: Path | None
) -> Traffic | None:
    """Return what comes from the Hub."""
    if hub is None:
        return None
    reference = reference_in(resolved.subjects, resolved.recipe.reference)
    beside = [*resolved.shipped, *(c for c, _ in (reference.members if reference else ()))]
    subjects = [with_shipped(subject, beside) for subject in resolved.subjects]
    free = free_disk_nbytes(hub_cache())
    return price_traffic(hub, subjects, resolved.texts, budget_nbytes, free, record)


SELECTIONS = ("checkpoints", "last")
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
    numbered = (out.with_name(f"{out.name}-{number}") for number in count(2))
    free = next(path for path in numbered if not path.exists())
    adding = "" if both is None else f"; or add to it: `{command(both)} --out {folder}`"
    raise UsageError(
        f"`{out}` has an audit, which this scan would replace by one without "
        f"{', '.join(lost[:3])}{more}",
        hint=f"name another folder, as `--out {shlex.quote(str(free))}`{adding}",
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
    selected = [{name: getattr(each, name) for name in SELECTIONS} for each in (before, recipe)]
    if selected[0] != selected[1]:
        if all(any(keys.values()) for keys in selected):
            return None
        further |= next(keys for keys in selected if not any(keys.values()))
    for name in LISTS:
        further[name] = tuple(dict.fromkeys((*getattr(before, name), *getattr(recipe, name))))
    documents = max(before.evaluation_documents, recipe.evaluation_documents)
    bits = (*before.bits, *recipe.bits) if before.bits and recipe.bits else ()
    return replace(
        recipe, **further, bits=tuple(dict.fromkeys(bits)), evaluation_documents=documents
    )
