"""Recipe -> Plan: the request, resolved and priced. No torch, no weight is read.

What needs a permission is refused before anything is downloaded, what cannot fit in memory or
on the disk before the first byte of weights, with what would fit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qaudit.core.registry import origins
from qaudit.diagnostics.registry import origins_of
from qaudit.hub import Hub
from qaudit.planning.chosen import Chosen, choose
from qaudit.planning.classes import class_notes
from qaudit.planning.cost import seconds_range
from qaudit.planning.experts import expert_notes
from qaudit.planning.keeping import keeping_notes, kept_specs, nbytes_to_keep
from qaudit.planning.permissions import allowed_notes
from qaudit.planning.releases import Releases, find_releases
from qaudit.planning.resolve import Resolved
from qaudit.planning.shipped import with_shipped
from qaudit.planning.traffic import (
    PlannedDownloads,
    free_disk_nbytes,
    missing_budget,
    price_traffic,
)
from qaudit.planning.work import work_of
from qaudit.settings import RunOptions
from qaudit.types import Plan, Price, Recipe, Traffic, reference_in

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
