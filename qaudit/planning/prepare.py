"""Targets and settings -> a plan that can run: resolved, pinned and priced. No weight is read.

A lock given as a target is used as it is; otherwise the plan in the output folder is kept to,
so that the same command measures the same commits again. What needs a permission is refused before
anything is downloaded, what cannot fit in memory or on the disk before the first byte of weights,
with what would fit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qaudit.checkpoints.stamps import hub_cache
from qaudit.core.registry import origins, parse_schemes
from qaudit.core.scheme import Calibration, Scheme
from qaudit.diagnostics.diagnostic import origins_of
from qaudit.downloads.downloads import RECORD_FILE, price_traffic
from qaudit.errors import UsageError
from qaudit.host import available_nbytes, default_stream_limit, free_disk_nbytes
from qaudit.hub import Hub, open_hub
from qaudit.hub.series import is_hub
from qaudit.planning import pin
from qaudit.planning.machine import Footprint, choose_audited, choose_column_loop, device_notes
from qaudit.planning.price import (
    ITEMSIZE,
    START_SECONDS,
    Pricing,
    begins_again_notes,
    calibrated,
    class_notes,
    diagnoses_of,
    flops,
    kept_specs,
    nbytes_to_keep,
    passes_of,
    price_otherwise,
    reading_shipped,
    refuse_classes,
    seconds_range,
    with_draws,
    with_scheme,
    with_shipped,
)
from qaudit.planning.resolve import (
    all_shipped,
    needs_hub,
    reads_hub,
    resolve,
    without_unread,
)
from qaudit.planning.sizes import Load, text_size
from qaudit.planning.survey import LONGEST_CONTEXT, Survey, allowed_notes, expert_notes, refuse
from qaudit.policy import policy_named
from qaudit.recipe.table import is_recipe, recipe_from, recipe_of, split_settings
from qaudit.saved.audits import checkpoints_of
from qaudit.saved.evidence import signing_key
from qaudit.saved.exports import pinned_tables
from qaudit.saved.parts import PLAN, write_plan
from qaudit.settings import RunOptions
from qaudit.support.keys import nearest
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
        pin.must_extend(self.plan, self.out)
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
        recipe, resolved = pin.from_lock(lock, targets, keys)
    else:
        recipe = recipe_of(targets=[*targets], **keys)
    on_hub = needs_hub(recipe) or (resolved is not None and reads_hub(resolved))
    hub = open_hub(watch=watch) if on_hub else None
    if resolved is not None and hub is not None:
        pin.check_pins(resolved, hub)
    if resolved is None or options.update:
        path = Path(lock or out / PLAN)
        resolved = pin.pinned_or_resolved(recipe, path, hub, update=options.update)
    plan = make_plan(recipe, options=options, hub=hub, resolved=resolved, record=out / RECORD_FILE)
    return Prepared(plan, replace(options, out=out), out, hub, recipe, resolved)


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


def choose(
    recipe: Recipe, options: RunOptions, hub: Hub | None, resolved: Resolved | None
) -> tuple[Resolved, tuple[Scheme, ...], Survey, Hub | None]:
    """Return what a recipe chooses, all of it permitted, and how large its models are."""
    schemes = pinned_tables(parse_schemes(recipe.schemes), (options.out or Path()) / "evidence")
    refuse_classes(recipe, schemes, None)
    learned = [s.short for s in schemes if s.calibration is Calibration.WHOLE_BLOCK]
    if recipe.routing == "reference" and learned:  # mini-batches are cut anew
        raise UsageError(
            f"`--set routing=reference` replays the choice of experts in whole batches, and "
            f"`{learned[0]}` learns on other ones",
            hint=f"leave `{learned[0]}` out, or `--set routing=reference`",
        )
    for scheme in schemes:
        scheme.must_be_installed()
    policy_named(recipe.policy)  # a wrong policy is refused before anything is fetched
    resolved = resolved or resolve(recipe, hub)
    read = checkpoints_of(resolved.subjects)
    if hub is None and reads_hub(resolved):
        hub = open_hub()
    allow_pickle, trust_remote_code = options.allow_pickle, options.trust_remote_code
    refuse(read, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    if recipe.reference is not None:
        reference = reference_in(resolved.subjects, recipe.reference)
        if reference is None or reference.is_search:
            labels = [subject.label for subject in resolved.subjects]
            raise UsageError(
                f"the reference `{recipe.reference}` is not one of the {len(labels)} subjects "
                "that are measured",
                hint=f"name it as a target, too; {nearest(recipe.reference, labels)}",
            )
    resolved, unread_notes = without_unread(resolved, hub)
    files, shipped = all_shipped(resolved.subjects, resolved.shipped, hub, schemes)
    schemes = (*schemes, *shipped)
    subjects = tuple(with_scheme(s, schemes) if s.is_search else s for s in resolved.subjects)
    resolved = replace(resolved, subjects=subjects, shipped=files)
    seen = Survey(hub, allow_pickle=allow_pickle, code=trust_remote_code)
    seen.notes += unread_notes
    seen.look_at_all(subjects)
    refuse_classes(recipe, schemes, seen.largest)
    return resolved, schemes, seen, hub


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
    recipe, subjects, largest = resolved.recipe, resolved.subjects, seen.largest
    reference = reference_in(subjects, recipe.reference)
    traffic = None  # nothing comes from the Hub
    if hub is not None:
        beside = (*resolved.shipped, *(c for c, _ in (reference.members if reference else ())))
        read = [with_shipped(subject, beside) for subject in subjects]
        free = free_disk_nbytes(hub_cache())
        traffic = price_traffic(hub, read, resolved.texts, options.disk_budget, free, record)

    context = recipe.context or min(LONGEST_CONTEXT, seen.longest_context)
    item_context = (recipe.context or seen.longest_context) if recipe.tasks else None
    protocol = make_protocol(recipe, context, item_context)
    trees, most = seen.reads_trees, seen.longest_context
    drawn, checkpoints = with_draws(recipe, schemes), checkpoints_of(subjects)
    text = text_size(drawn, protocol, checkpoints, resolved.texts, trees=trees, longest=most)
    device, dtype = machine = choose_audited(recipe.device, recipe.dtype)
    column_loop, column_note = choose_column_loop(device, schemes, largest)

    diagnoses = diagnoses_of(recipe, schemes, largest.blocks, text, protocol)
    limit = options.stream_memory if options.stream_memory is not None else default_stream_limit()
    load = Load.of(schemes, text, 2 if recipe.reference else 1)
    footprint = Footprint(largest, load, ITEMSIZE[dtype], limit, device)
    available = available_nbytes()
    footprint.refuse_short_memory(available, protocol.calibration_documents)
    footprints = [footprint]
    footprints += [replace(footprint, load=load) for load in diagnoses.values() if load.schemes]
    kept = kept_specs(options.keep, schemes)
    kept_nbytes = nbytes_to_keep(kept, subjects, largest)
    downloads = traffic.nbytes_disk_peak if traffic else 0
    place = record.parent if record else Path()
    footprint.refuse_short_disk(place, downloads, kept_nbytes)

    price = Price()
    for work, load in diagnoses.items():
        price += Price(work.passes * flops(largest, load), streams=work.passes * work.streams)
    pricing = Pricing(largest, text, price)
    passes = passes_of(subjects, schemes, recipe.repeats, pricing, reference)
    otherwise = None
    if recipe.arithmetic:
        otherwise = price_otherwise(subjects, schemes, pricing, passes, machine)
    longest = max(seconds_range(step.price.flops, *machine)[1] for step in passes)
    is_long = longest > KEPT_SECONDS
    whole_notes = begins_again_notes(footprint.rounds, diagnoses)
    # Of a pass that is kept at a block, and of the one that replaces it.
    nbytes_kept = 2 * footprint.streams_nbytes if is_long and not whole_notes else 0
    passes = tuple(reading_shipped(step, resolved.shipped, pricing) for step in passes)
    price = sum((step.price for step in passes), Price())
    low, high = seconds_range(price.flops, *machine)

    idle = recipe.repeats > 1 and not calibrated(schemes)
    quantized = any(step.is_quantized for step in passes)
    beside_downloads = "of quantized weights beside downloads"
    plugins = (*origins(schemes, [s.merge for s in subjects]), *origins_of(recipe.diagnostics))
    notes = (
        *resolved.notes,
        *seen.notes,
        *(() if quantized else seen.references),
        *class_notes(schemes, largest),
        *expert_notes(largest),
        *allowed_notes(checkpoints),
        *(f"the {plugin.kind} `{plugin.name}` is of {plugin}" for plugin in plugins),
        *text.notes,
        *device_notes(recipe.device),
        *([column_note] if column_note else ()),
        *footprint.notes,
        *(["no scheme here calibrates: there is nothing to draw again"] if idle else ()),
        *(whole_notes if is_long else ()),
        *([f"`--keep` writes up to {size(kept_nbytes)} {beside_downloads}"] if kept else ()),
    )
    return Plan(
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
        nbytes_memory=max(each.memory_nbytes for each in footprints),
        nbytes_memory_fixed=replace(footprint, limit_nbytes=0).memory_nbytes,
        nbytes_memory_available=available,
        nbytes_disk=footprint.disk_nbytes + nbytes_kept + kept_nbytes,
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
        notes=notes,
        plugins=plugins,
    )
