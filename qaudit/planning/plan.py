"""Recipe -> Plan: the request, resolved and priced. No torch, no weight is read.

What needs a permission is refused before anything is downloaded, what cannot fit in memory or
on the disk before the first byte of weights, with what would fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qaudit.core.registry import parse_schemes
from qaudit.core.scheme import Scheme
from qaudit.core.sizes import size, typed_size
from qaudit.errors import MachineError, UsageError
from qaudit.host import available_nbytes
from qaudit.hub import Hub, open_hub
from qaudit.planning.device import choose_device
from qaudit.planning.diagnoses import price_diagnostics
from qaudit.planning.further import price_further
from qaudit.planning.passes import Pricing, calibrated, passes_of, with_draws, with_scheme
from qaudit.planning.permissions import allowed_notes, refuse
from qaudit.planning.price import (
    ITEMSIZE,
    Load,
    Sizes,
    memory_nbytes,
    returns,
    round_notes,
    seconds_range,
    what_would_fit,
)
from qaudit.planning.releases import Releases, find_releases
from qaudit.planning.resolve import Resolved, resolve
from qaudit.planning.shipped import reading_shipped, shipped_schemes, with_shipped
from qaudit.planning.survey import LONGEST_CONTEXT, survey
from qaudit.planning.text_size import text_size
from qaudit.planning.traffic import (
    PlannedDownloads,
    free_disk_nbytes,
    missing_budget,
    price_traffic,
    summed_notes,
)
from qaudit.policy import policy_named
from qaudit.settings import RunOptions
from qaudit.text.corpus import make_protocol
from qaudit.types import Perturbation, Plan, Price, Recipe, Traffic

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
    allow_pickle, trust_remote_code = options.allow_pickle, options.trust_remote_code
    disk_budget_nbytes, stream_limit_nbytes = options.disk_budget, options.stream_memory
    schemes = parse_schemes(recipe.schemes)
    _refuse_classes(recipe, schemes)
    policy_named(recipe.policy)  # a wrong one is refused before anything is fetched
    resolved = resolved or resolve(recipe, hub)
    recipe = resolved.recipe
    shipped = shipped_schemes(resolved.subjects, resolved.shipped, hub, schemes)
    schemes = (*schemes, *shipped)
    subjects = tuple(with_scheme(s, schemes) if s.is_search else s for s in resolved.subjects)
    releases = find_releases(recipe, resolved.checkpoints)
    members = list(dict.fromkeys(c for s in subjects for c, _ in s.members))
    refuse(members, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    if hub is None and (resolved.texts or any(c.commit for c in (*members, *resolved.shipped))):
        hub = open_hub()
    seen = survey(subjects, hub, allow_pickle=allow_pickle, code=trust_remote_code)
    at_once = tuple(with_shipped(one, resolved.shipped) for one in subjects)
    fetched = replace(resolved, subjects=at_once)
    downloads, releases = _downloads(fetched, releases, hub, disk_budget_nbytes, record)
    traffic = _traffic(downloads, disk_budget_nbytes)
    limit = stream_limit_nbytes if stream_limit_nbytes is not None else default_stream_limit()
    context = recipe.context or min(LONGEST_CONTEXT, seen.longest_context)
    item_context = (recipe.context or seen.longest_context) if recipe.tasks else None
    protocol = make_protocol(recipe, context, item_context)
    drawn = with_draws(recipe, schemes)
    text = text_size(drawn, protocol, members, resolved.texts)
    device, dtype = choose_device(recipe.device, recipe.dtype)
    beside = price_diagnostics(recipe, schemes, protocol, seen.largest)
    loads = [Load.of(protocol, schemes, text), *beside.loads]
    documents = protocol.calibration_documents
    widest = max(dtype, recipe.compare_dtype or dtype, key=ITEMSIZE.__getitem__)
    memory = _memory(seen.largest, loads, documents, (device, widest), limit)
    pricing = Pricing(seen.largest, protocol, text, memory.returning, beside.price)
    passes = passes_of(
        subjects,
        schemes,
        recipe.repeats or 1,
        pricing,
        releases.subjects,
        _perturbations(recipe, dtype),
    )
    passes = tuple(reading_shipped(one, resolved.shipped) for one in passes)
    price = sum((one.price for one in passes), Price())
    low, high = seconds_range(price.flops)
    return Plan(
        recipe=recipe,
        subjects=subjects,
        specs=tuple(scheme.spec for scheme in schemes),
        device=device,
        dtype=dtype,
        context=protocol.context,
        item_context=protocol.item_context,
        parameters=seen.largest.parameters,
        blocks=seen.largest.blocks,
        nbytes_read=price.nbytes_read,
        nbytes_memory=memory.nbytes,
        nbytes_memory_fixed=memory.nbytes_fixed,
        nbytes_memory_available=memory.nbytes_available,
        streams=price.streams,
        seconds_low=low,
        seconds_high=high,
        notes=(
            *resolved.notes,
            *seen.notes,
            *allowed_notes(members),
            *text.notes,
            *memory.notes,
            *_repeats_notes(recipe, schemes),
            *round_notes(seen.largest, loads[0], schemes, ITEMSIZE[widest], limit),
            *releases.notes,
            *_summed(downloads, traffic),
        ),
        texts=resolved.texts,
        shipped=resolved.shipped,
        traffic=traffic,
        findings=resolved.findings,
        releases=releases.subjects,
        diagnoses=beside.said,
        passes=passes,
        further=price_further(subjects, schemes, pricing, traffic)
        if drawn.repeats is None and text.draws != 1
        else None,
    )


def _refuse_classes(recipe: Recipe, schemes: Sequence[Scheme]) -> None:
    """Refuse a class of bits that no scheme has."""
    known = {scheme.bit_class for scheme in schemes}
    absent = [name for name in recipe.bits if name not in known]
    if absent:
        raise UsageError(
            f"`--bits` asks for {absent[0]} bits, and no scheme has as many",
            hint=f"add one, for example `--schemes rtn-{absent[0]}bit`; "
            f"{', '.join(s.short for s in schemes)} are measured",
        )


def _perturbations(recipe: Recipe, dtype: str) -> tuple[Perturbation, ...]:
    if recipe.compare_dtype == dtype:
        others = [f"`{one}`" for one in ITEMSIZE if one != dtype]
        raise UsageError(
            f"`--compare-dtype {dtype}` is the dtype that everything is measured in",
            hint=f"use {' or '.join(others)}",
        )
    return ("rounding", *([recipe.compare_dtype] if recipe.compare_dtype else ()))


def _repeats_notes(recipe: Recipe, schemes: Sequence[Scheme]) -> tuple[str, ...]:
    if recipe.repeats in (None, 1) or calibrated(schemes):
        return ()
    return ("no scheme here calibrates: there is nothing to draw again",)


# ------------------------------------------------------------------------------- computing


@dataclass(frozen=True)
class _Memory:
    """What this machine must hold, and how calibration passes through a block for it."""

    nbytes: int
    nbytes_fixed: int  # without hidden states
    nbytes_available: int
    returning: bool

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.returning:
            return ()
        return (
            "calibration is too long to wait inside a block, and goes through each block once for "
            "every group of linears: the same numbers, slower; a higher `--stream-memory` avoids "
            "it",
        )


def _memory(
    sizes: Sizes, loads: Sequence[Load], documents: int, machine: tuple[str, str], limit: int
) -> _Memory:
    """Estimate the memory of the first load, the audit's; refuse what this machine lacks."""
    device, dtype = machine
    load, itemsize = loads[0], ITEMSIZE[dtype]
    available = available_nbytes()
    if device == "cpu" and memory_nbytes(sizes, load, itemsize, limit) > available:
        raise _too_large(sizes, load, documents, itemsize, limit, available)
    return _Memory(
        nbytes=max(memory_nbytes(sizes, one, itemsize, limit) for one in loads),
        nbytes_fixed=memory_nbytes(sizes, load, itemsize, 0),
        nbytes_available=available,
        returning=device == "cpu" and returns(sizes, load, itemsize, limit),
    )


def _downloads(
    resolved: Resolved,
    releases: Releases,
    hub: Hub | None,
    budget_nbytes: int | None,
    record: Path | None,
) -> tuple[PlannedDownloads | None, Releases]:
    """Return what the Hub is needed for, and those releases that the disk has room to compare."""
    if hub is None:
        return None, releases
    subjects = resolved.subjects
    downloads = PlannedDownloads.of((*subjects, *releases.subjects), resolved.texts, hub, record)
    free = free_disk_nbytes()
    wanted = {r: missing_budget(downloads, r, budget_nbytes, free) for r in releases.subjects}
    if not any(wanted.values()):
        return downloads, releases
    kept = releases.without({r: needed for r, needed in wanted.items() if needed})
    return PlannedDownloads.of((*subjects, *kept.subjects), resolved.texts, hub, record), kept


def _traffic(downloads: PlannedDownloads | None, budget_nbytes: int | None) -> Traffic | None:
    return price_traffic(downloads, budget_nbytes, free_disk_nbytes()) if downloads else None


def _summed(downloads: PlannedDownloads | None, traffic: Traffic | None) -> tuple[str, ...]:
    if downloads is None or traffic is None:
        return ()
    return summed_notes(downloads, traffic.nbytes_disk_budget)


def default_stream_limit() -> int:
    """Return the memory hidden states may take before they are spilled: a quarter of the free."""
    return available_nbytes() // 4


def _too_large(
    sizes: Sizes, load: Load, documents: int, itemsize: int, limit_nbytes: int, available: int
) -> MachineError:
    """Refuse what memory does not hold, with the numbers that would make it fit."""
    needed = memory_nbytes(sizes, load, itemsize, limit_nbytes)
    lower, fewer = what_would_fit(sizes, load, documents, itemsize, limit_nbytes, available)
    proposals = []
    if lower is not None:
        proposals.append(f"`--stream-memory {typed_size(lower, up=False)}`")
    if fewer is not None:
        proposals.append(f"`--calibration-documents {fewer}`")
    return MachineError(
        f"this audit needs about {size(needed)} of memory and {size(available)} are free",
        hint=f"it would fit with {' or with '.join(proposals)}"
        if proposals
        else "no `--stream-memory` and no `--calibration-documents` would make it fit: "
        "use a machine with more memory, or a lower `--context`",
    )


def schemes_of(plan: Plan) -> tuple[Scheme, ...]:
    """Return the schemes of a plan."""
    return parse_schemes(plan.specs)
