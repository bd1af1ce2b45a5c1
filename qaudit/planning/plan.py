"""Recipe -> Plan: the request, resolved and priced. No torch, no weight is read.

What needs a permission is refused before anything is downloaded, what cannot fit in memory or
on the disk before the first byte of weights, with what would fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qaudit.core.keys import nearest
from qaudit.core.registry import origins, parse_schemes
from qaudit.core.scheme import Calibration, Scheme
from qaudit.diagnostics.registry import origins_of
from qaudit.errors import UsageError
from qaudit.host import available_nbytes, default_stream_limit
from qaudit.hub import Hub, open_hub
from qaudit.items.prepare import code_of
from qaudit.planning.classes import class_notes, refuse_classes
from qaudit.planning.cost import ITEMSIZE, Load, seconds_range
from qaudit.planning.devices import choose_audited, choose_column_loop, device_notes
from qaudit.planning.diagnoses import diagnoses_of, price_of
from qaudit.planning.experts import expert_notes
from qaudit.planning.footprint import Footprint
from qaudit.planning.further import fits_rounding, price_further, price_otherwise
from qaudit.planning.keeping import (
    begins_again_notes,
    keeping_notes,
    kept_specs,
    nbytes_to_keep,
)
from qaudit.planning.passes import (
    Pricing,
    calibrated,
    passes_of,
    with_draws,
    with_reference,
    with_scheme,
)
from qaudit.planning.permissions import allowed_notes, refuse
from qaudit.planning.presets import preset_times
from qaudit.planning.releases import Releases, find_releases
from qaudit.planning.resolve import Resolved, resolve
from qaudit.planning.shipped import all_shipped, reading_shipped, with_shipped
from qaudit.planning.sizes import text_size
from qaudit.planning.survey import LONGEST_CONTEXT, Survey, survey
from qaudit.planning.traffic import (
    PlannedDownloads,
    free_disk_nbytes,
    missing_budget,
    price_traffic,
)
from qaudit.planning.unread import without_unread
from qaudit.policy import claim_of
from qaudit.settings import RunOptions
from qaudit.text.corpus import make_protocol
from qaudit.types import (
    Checkpoint,
    ClaimKind,
    Further,
    Pass,
    Perturbation,
    Plan,
    PresetTime,
    Price,
    Protocol,
    Recipe,
    Subject,
    Traffic,
    reference_in,
)

DEFAULTS = RunOptions()
KEPT_SECONDS = 300.0  # of a pass, after which the engine keeps it at a block


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
    chosen = _chosen(recipe, options, hub, resolved)
    resolved = chosen.resolved
    releases, traffic = _fetched(chosen, options.disk_budget, record)
    work = _work(chosen, releases, traffic, options)
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


# ------------------------------------------------------------------------------- choosing


@dataclass(frozen=True, eq=False)
class _Chosen:
    """What a recipe chooses, all of it permitted, and how large its models are."""

    resolved: Resolved
    schemes: tuple[Scheme, ...]
    subjects: tuple[Subject, ...]
    members: list[Checkpoint]
    hub: Hub | None
    seen: Survey
    task_code: tuple[str, ...]


def _chosen(
    recipe: Recipe, options: RunOptions, hub: Hub | None, resolved: Resolved | None
) -> _Chosen:
    schemes = parse_schemes(recipe.schemes)
    refuse_classes(recipe, schemes, None)
    _refuse_replays(recipe, schemes)
    for scheme in schemes:
        scheme.must_be_installed()
    claim_of(recipe)  # a wrong policy is refused before anything is fetched
    resolved = resolved or resolve(recipe, hub)
    members = list(dict.fromkeys(c for s in resolved.subjects for c, _ in s.members))
    if hub is None and (resolved.texts or any(c.commit for c in (*members, *resolved.shipped))):
        hub = open_hub()
    allow_pickle, trust_remote_code = options.allow_pickle, options.trust_remote_code
    refuse(members, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    code = code_of(resolved.recipe, trusted=options.trust_task_code)
    must_name_reference(recipe, resolved.subjects)
    resolved, unread_notes = without_unread(resolved, hub)
    members = list(dict.fromkeys(c for s in resolved.subjects for c, _ in s.members))
    files, shipped = all_shipped(resolved.subjects, resolved.shipped, hub, schemes)
    schemes, resolved = (*schemes, *shipped), replace(resolved, shipped=files)
    subjects = tuple(with_scheme(s, schemes) if s.is_search else s for s in resolved.subjects)
    seen = survey(subjects, hub, allow_pickle=allow_pickle, code=trust_remote_code)
    refuse_classes(recipe, schemes, seen.largest)
    seen = replace(seen, notes=(*unread_notes, *seen.notes))
    return _Chosen(resolved, schemes, subjects, members, hub, seen, code)


def _refuse_replays(recipe: Recipe, schemes: Sequence[Scheme]) -> None:
    """Refuse to replay a choice of experts in mini-batches that are cut anew."""
    learned = [s.short for s in schemes if s.calibration is Calibration.WHOLE_BLOCK]
    if recipe.routing == "reference" and learned:
        raise UsageError(
            f"`--routing reference` replays the choice of experts in whole batches, and "
            f"`{learned[0]}` learns on other ones",
            hint=f"leave `{learned[0]}` out, or `--routing reference`",
        )


def _perturbations(recipe: Recipe, dtype: str) -> tuple[Perturbation, ...]:
    if recipe.compare_dtype == dtype:
        choices = [f"`{other}`" for other in ITEMSIZE if other != dtype]
        raise UsageError(
            f"`--compare-dtype {dtype}` is the dtype that everything is measured in",
            hint=f"use {' or '.join(choices)}",
        )
    return (recipe.compare_dtype,) if recipe.compare_dtype else ()


def must_name_reference(recipe: Recipe, subjects: Sequence[Subject]) -> None:
    """Refuse a reference that is not one of what is measured, or is searched."""
    if recipe.reference is None:
        return
    reference = reference_in(subjects, recipe.reference)
    if reference is None or reference.is_search:
        labels = [subject.label for subject in subjects]
        raise UsageError(
            f"the reference `{recipe.reference}` is not one of the {len(subjects)} subjects that "
            "are measured",
            hint=f"name it as a target, too; {nearest(recipe.reference, labels)}",
        )


# ------------------------------------------------------------------------------- fetching


def _fetched(
    chosen: _Chosen, budget_nbytes: int | None, record: Path | None
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


# ------------------------------------------------------------------------------- computing


@dataclass(frozen=True, eq=False)
class _PlannedWork:
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


def _work(
    chosen: _Chosen, releases: Releases, traffic: Traffic | None, options: RunOptions
) -> _PlannedWork:
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
    return _PlannedWork(
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
