"""Recipe -> Plan: the request, resolved, cut into passes and priced. No weight is read.

What needs a permission is refused before anything is downloaded, what cannot fit in memory or
on the disk before the first byte of weights, with what would fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from qaudit.core.registry import origins
from qaudit.diagnostics.registry import origins_of
from qaudit.errors import UsageError
from qaudit.host import available_nbytes, default_stream_limit
from qaudit.hub import Hub
from qaudit.planning.chosen import Chosen, choose
from qaudit.planning.cost import ITEMSIZE, Load, seconds_range
from qaudit.planning.devices import choose_audited, choose_column_loop, device_notes
from qaudit.planning.diagnoses import diagnoses_of, price_of
from qaudit.planning.footprint import Footprint
from qaudit.planning.further import fits_rounding, price_further, price_otherwise
from qaudit.planning.keeping import begins_again_notes, keeping_notes, kept_specs, nbytes_to_keep
from qaudit.planning.passes import (
    Pricing,
    calibrated,
    class_notes,
    passes_of,
    with_draws,
    with_reference,
)
from qaudit.planning.permissions import allowed_notes
from qaudit.planning.presets import preset_times
from qaudit.planning.releases import Releases, find_releases
from qaudit.planning.resolve import Resolved
from qaudit.planning.shipped import reading_shipped, with_shipped
from qaudit.planning.sizes import text_size
from qaudit.planning.survey import LONGEST_CONTEXT, expert_notes
from qaudit.planning.traffic import (
    PlannedDownloads,
    free_disk_nbytes,
    missing_budget,
    price_traffic,
)
from qaudit.policy import claim_of
from qaudit.settings import RunOptions
from qaudit.text.corpus import make_protocol
from qaudit.types import (
    ClaimKind,
    Further,
    Pass,
    Perturbation,
    Plan,
    PresetTime,
    Price,
    Protocol,
    Recipe,
    Traffic,
    reference_in,
)

KEPT_SECONDS = 300.0  # of a pass, after which the engine keeps it at a block


def _perturbations(recipe: Recipe, dtype: str) -> tuple[Perturbation, ...]:
    if recipe.compare_dtype == dtype:
        choices = [f"`{other}`" for other in ITEMSIZE if other != dtype]
        raise UsageError(
            f"`--compare-dtype {dtype}` is the dtype that everything is measured in",
            hint=f"use {' or '.join(choices)}",
        )
    return (recipe.compare_dtype,) if recipe.compare_dtype else ()


@dataclass(frozen=True, eq=False)
class PlannedWork:
    """The passes of a plan, and what they take of this machine."""

    protocol: Protocol
    device: str
    dtype: str
    column_loop: str
    footprint: Footprint  # of the audit's own passes
    nbytes_memory: int  # diagnostics included
    nbytes_memory_available: int
    nbytes_kept: int  # of a pass that is kept at a block, and of the one that replaces it
    items: tuple[tuple[str, int], ...]  # of each task
    passes: tuple[Pass, ...]
    further: Further | None
    claim: ClaimKind
    perturbations: tuple[Perturbation, ...]
    otherwise: Further | None
    diagnoses: tuple[str, ...]
    notes: tuple[str, ...]
    presets: tuple[PresetTime, ...]


def work_of(
    chosen: Chosen, releases: Releases, traffic: Traffic | None, options: RunOptions
) -> PlannedWork:
    resolved, schemes, seen = chosen.resolved, chosen.schemes, chosen.seen
    recipe = resolved.recipe
    context = recipe.context or min(LONGEST_CONTEXT, seen.longest_context)
    item_context = (recipe.context or seen.longest_context) if recipe.tasks else None
    protocol = make_protocol(recipe, context, item_context)
    claim = claim_of(recipe)
    drawn = with_draws(recipe, schemes, claim)
    trees, most = seen.reads_trees, seen.longest_context
    text = text_size(drawn, protocol, chosen.members, resolved.texts, trees=trees, longest=most)
    device, dtype = choose_audited(recipe.device, recipe.dtype)
    column_loop, column_note = choose_column_loop(device, schemes, seen.largest)
    diagnoses = diagnoses_of(recipe, schemes, seen.largest.blocks, text, protocol)
    widest = max(dtype, recipe.compare_dtype or dtype, key=ITEMSIZE.__getitem__)
    limit = options.stream_memory if options.stream_memory is not None else default_stream_limit()
    streams = 2 if recipe.reference else 1
    footprint = Footprint(
        seen.largest,
        Load.of(schemes, text, streams),
        ITEMSIZE[widest],
        limit,
        device,
        text.most_items,
    )
    available = available_nbytes()
    footprint.refuse_short_memory(available, protocol.calibration_documents)
    beside = [replace(footprint, load=load) for load in diagnoses.values() if load.schemes]
    price = sum((price_of(*diagnosis, seen.largest) for diagnosis in diagnoses.items()), Price())
    pricing = Pricing(seen.largest, text, price)
    perturbations = _perturbations(recipe, dtype)
    passes = passes_of(chosen.subjects, schemes, recipe.repeats or 1, pricing, releases.subjects)
    reference = reference_in(chosen.subjects, recipe.reference)
    passes = tuple(with_reference(step, reference, pricing) for step in passes)
    if recipe.arithmetic and fits_rounding(chosen.subjects, schemes, pricing, passes):
        perturbations = ("rounding", *perturbations)
    longest = max(seconds_range(step.price.flops, device, dtype)[1] for step in passes)
    is_long = longest > KEPT_SECONDS and not options.no_checkpoints
    whole_notes = begins_again_notes(footprint.rounds, diagnoses, options.cross_check)
    more = drawn.repeats is None and text.draws != 1
    idle = recipe.repeats not in (None, 1) and not calibrated(schemes)
    repeats_note = ("no scheme here calibrates: there is nothing to draw again",) if idle else ()
    return PlannedWork(
        protocol=protocol,
        device=device,
        dtype=dtype,
        column_loop=column_loop,
        footprint=footprint,
        nbytes_memory=max(footprint_of.memory_nbytes for footprint_of in (footprint, *beside)),
        nbytes_memory_available=available,
        nbytes_kept=2 * footprint.streams_nbytes if is_long and not whole_notes else 0,
        items=text.items,
        passes=tuple(reading_shipped(step, resolved.shipped, pricing) for step in passes),
        further=price_further(chosen.subjects, schemes, pricing, traffic, (device, dtype))
        if more
        else None,
        claim=claim,
        perturbations=perturbations,
        otherwise=price_otherwise(
            chosen.subjects, schemes, pricing, perturbations, (device, dtype)
        ),
        diagnoses=tuple(work.text for work in diagnoses),
        notes=(
            *text.notes,
            *device_notes(recipe.device),
            *([column_note] if column_note else ()),
            *footprint.notes,
            *repeats_note,
            *(whole_notes if is_long else ()),
        ),
        presets=tuple(preset_times(recipe, chosen.subjects, schemes, pricing, (device, dtype))),
    )


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
    resolved = chosen.resolved
    releases, traffic = _fetched(chosen, options.disk_budget, record)
    work = work_of(chosen, releases, traffic, options)
    downloads = traffic.nbytes_disk_peak if traffic else 0
    kept = kept_specs(options.keep, chosen.schemes)
    kept_nbytes = nbytes_to_keep(kept, chosen.subjects, chosen.seen.largest)
    work.footprint.refuse_short_disk(record.parent if record else Path(), downloads, kept_nbytes)
    price = sum((step.price for step in work.passes), Price())
    merges = [subject.merge for subject in (*chosen.subjects, *releases.subjects)]
    plugins = (*origins(chosen.schemes, merges), *origins_of(recipe.diagnostics))
    low, high = seconds_range(price.flops, work.device, work.dtype)
    return Plan(
        recipe=resolved.recipe,
        subjects=chosen.subjects,
        specs=tuple(scheme.spec for scheme in chosen.schemes),
        device=work.device,
        dtype=work.dtype,
        column_loop=work.column_loop,
        context=work.protocol.context,
        item_context=work.protocol.item_context,
        parameters=chosen.seen.largest.parameters,
        blocks=chosen.seen.largest.blocks,
        nbytes_read=price.nbytes_read,
        nbytes_memory=work.nbytes_memory,
        nbytes_memory_fixed=replace(work.footprint, limit_nbytes=0).memory_nbytes,
        nbytes_memory_available=work.nbytes_memory_available,
        streams=price.streams,
        seconds_low=low,
        seconds_high=high,
        notes=(
            *resolved.notes,
            *chosen.seen.notes,
            *(chosen.seen.references if not any(p.is_quantized for p in work.passes) else ()),
            *class_notes(chosen.schemes, chosen.seen.largest),
            *expert_notes(chosen.seen.largest, resolved.recipe),
            *allowed_notes(chosen.members),
            *(f"the {plugin.kind} `{plugin.name}` is of {plugin}" for plugin in plugins),
            *(f"Python code of tasks is run on this machine: {file}" for file in chosen.task_code),
            *work.notes,
            *keeping_notes(kept, kept_nbytes),
            *releases.notes,
        ),
        texts=resolved.texts,
        shipped=resolved.shipped,
        traffic=traffic,
        findings=resolved.findings,
        releases=releases.subjects,
        diagnoses=work.diagnoses,
        passes=work.passes,
        further=work.further,
        claim=work.claim,
        perturbations=work.perturbations,
        otherwise=work.otherwise,
        plugins=plugins,
        nbytes_disk=work.footprint.disk_nbytes + work.nbytes_kept + kept_nbytes,
        items=work.items,
        presets=work.presets,
    )


def _fetched(
    chosen: Chosen, budget_nbytes: int | None, record: Path | None
) -> tuple[Releases, Traffic | None]:
    """Return the releases that the disk has room to compare, and what comes from the Hub."""
    resolved, hub = chosen.resolved, chosen.hub
    releases = find_releases(resolved.recipe, resolved.checkpoints)
    if hub is None:
        return releases, None
    reference = reference_in(chosen.subjects, resolved.recipe.reference)
    beside = [*resolved.shipped, *(c for c, _ in (reference.members if reference else ()))]
    subjects = [with_shipped(subject, beside) for subject in chosen.subjects]
    downloads = PlannedDownloads.of((*subjects, *releases.subjects), resolved.texts, hub, record)
    free = free_disk_nbytes()
    wanted = {r: missing_budget(downloads, r, budget_nbytes, free) for r in releases.subjects}
    if any(wanted.values()):
        releases = releases.without({r: needed for r, needed in wanted.items() if needed})
        every = (*subjects, *releases.subjects)
        downloads = PlannedDownloads.of(every, resolved.texts, hub, record)
    return releases, price_traffic(downloads, budget_nbytes, free_disk_nbytes())
