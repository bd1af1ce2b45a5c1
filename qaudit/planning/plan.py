"""Recipe -> Plan: the request, resolved, cut into passes and priced. No weight is read.

What needs a permission is refused before anything is downloaded, what cannot fit in memory or
on the disk before the first byte of weights, with what would fit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qaudit.core.registry import origins
from qaudit.diagnostics.registry import origins_of
from qaudit.host import available_nbytes, default_stream_limit
from qaudit.hub import Hub
from qaudit.planning.chosen import Chosen, choose
from qaudit.planning.devices import choose_audited, choose_column_loop, device_notes
from qaudit.planning.footprint import (
    Footprint,
    PlannedDownloads,
    free_disk_nbytes,
    price_traffic,
)
from qaudit.planning.further import price_otherwise
from qaudit.planning.passes import (
    Pricing,
    calibrated,
    class_notes,
    passes_of,
    with_draws,
    with_reference,
)
from qaudit.planning.permissions import allowed_notes
from qaudit.planning.price import (
    ITEMSIZE,
    Load,
    begins_again_notes,
    diagnoses_of,
    keeping_notes,
    kept_specs,
    nbytes_to_keep,
    price_of,
    seconds_range,
)
from qaudit.planning.proposals import proposed_soups
from qaudit.planning.shipped import reading_shipped, with_shipped
from qaudit.planning.sizes import TextSize, text_size
from qaudit.planning.survey import LONGEST_CONTEXT, expert_notes
from qaudit.settings import RunOptions
from qaudit.text.corpus import make_protocol
from qaudit.types import Pass, Plan, Price, Recipe, Resolved, Traffic, reference_in

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
    chosen = choose(recipe, options, hub, resolved)
    largest = chosen.seen.largest
    traffic = _fetched(chosen, options.disk_budget, record)
    plan, footprint = _planned(chosen, traffic, options)
    downloads = traffic.nbytes_disk_peak if traffic else 0
    kept = kept_specs(options.keep, chosen.schemes)
    kept_nbytes = nbytes_to_keep(kept, chosen.subjects, largest)
    footprint.refuse_short_disk(record.parent if record else Path(), downloads, kept_nbytes)
    merges = [subject.merge for subject in chosen.subjects]
    plugins = (*origins(chosen.schemes, merges), *origins_of(recipe.diagnostics))
    return replace(
        plan,
        notes=(
            *chosen.resolved.notes,
            *chosen.seen.notes,
            *(chosen.seen.references if not any(p.is_quantized for p in plan.passes) else ()),
            *class_notes(chosen.schemes, largest),
            *expert_notes(largest, plan.recipe),
            *allowed_notes(chosen.members),
            *(f"the {plugin.kind} `{plugin.name}` is of {plugin}" for plugin in plugins),
            *plan.notes,
            *keeping_notes(kept, kept_nbytes),
            *proposed_soups(recipe, chosen.resolved.checkpoints),
        ),
        plugins=plugins,
        nbytes_disk=plan.nbytes_disk + kept_nbytes,
    )


def _planned(
    chosen: Chosen, traffic: Traffic | None, options: RunOptions
) -> tuple[Plan, Footprint]:
    """Return the passes with what they take of this machine, and the footprint of the audit's."""
    resolved, schemes, seen = chosen.resolved, chosen.schemes, chosen.seen
    recipe, largest = resolved.recipe, seen.largest
    context = recipe.context or min(LONGEST_CONTEXT, seen.longest_context)
    item_context = (recipe.context or seen.longest_context) if recipe.tasks else None
    protocol = make_protocol(recipe, context, item_context)
    drawn = with_draws(recipe, schemes)
    trees, most = seen.reads_trees, seen.longest_context
    text = text_size(drawn, protocol, chosen.members, resolved.texts, trees=trees, longest=most)
    device, dtype = machine = choose_audited(recipe.device, recipe.dtype)
    column_loop, column_note = choose_column_loop(device, schemes, largest)
    diagnoses = diagnoses_of(recipe, schemes, largest.blocks, text, protocol)
    footprint = _footprint(chosen, text, machine, options)
    available = available_nbytes()
    footprint.refuse_short_memory(available, protocol.calibration_documents)
    beside = [replace(footprint, load=load) for load in diagnoses.values() if load.schemes]
    price = sum((price_of(*diagnosis, largest) for diagnosis in diagnoses.items()), Price())
    pricing = Pricing(largest, text, price)
    passes, otherwise = _passes(chosen, pricing), None
    if recipe.arithmetic:
        otherwise = price_otherwise(chosen.subjects, schemes, pricing, passes, machine)
    longest = max(seconds_range(step.price.flops, *machine)[1] for step in passes)
    is_long = longest > KEPT_SECONDS and not options.no_checkpoints
    whole_notes = begins_again_notes(footprint.rounds, diagnoses)
    # Of a pass that is kept at a block, and of the one that replaces it.
    nbytes_kept = 2 * footprint.streams_nbytes if is_long and not whole_notes else 0
    idle = recipe.repeats > 1 and not calibrated(schemes)
    passes = tuple(reading_shipped(step, resolved.shipped, pricing) for step in passes)
    price = sum((step.price for step in passes), Price())
    low, high = seconds_range(price.flops, *machine)
    plan = Plan(
        recipe=recipe,
        subjects=chosen.subjects,
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
        seconds_low=low,
        seconds_high=high,
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


def _passes(chosen: Chosen, pricing: Pricing) -> tuple[Pass, ...]:
    recipe, subjects, schemes = chosen.resolved.recipe, chosen.subjects, chosen.schemes
    reference = reference_in(subjects, recipe.reference)
    steps = passes_of(subjects, schemes, recipe.repeats, pricing)
    return tuple(with_reference(step, reference, pricing) for step in steps)


def _footprint(
    chosen: Chosen, text: TextSize, machine: tuple[str, str], options: RunOptions
) -> Footprint:
    recipe, (device, dtype) = chosen.resolved.recipe, machine
    limit = options.stream_memory if options.stream_memory is not None else default_stream_limit()
    load = Load.of(chosen.schemes, text, 2 if recipe.reference else 1)
    itemsize = ITEMSIZE[dtype]
    return Footprint(chosen.seen.largest, load, itemsize, limit, device, text.most_items)


def _fetched(chosen: Chosen, budget_nbytes: int | None, record: Path | None) -> Traffic | None:
    """Return what comes from the Hub."""
    resolved, hub = chosen.resolved, chosen.hub
    if hub is None:
        return None
    reference = reference_in(chosen.subjects, resolved.recipe.reference)
    beside = [*resolved.shipped, *(c for c, _ in (reference.members if reference else ()))]
    subjects = [with_shipped(subject, beside) for subject in chosen.subjects]
    downloads = PlannedDownloads.of(subjects, resolved.texts, hub, record)
    return price_traffic(downloads, budget_nbytes, free_disk_nbytes())
