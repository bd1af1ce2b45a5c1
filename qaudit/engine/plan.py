"""Recipe -> Plan: what was asked for, resolved and priced. No torch, no weight is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from qaudit.core.registry import parse_schemes
from qaudit.core.scheme import Scheme
from qaudit.engine.machine import foresee
from qaudit.engine.price import ITEMSIZE, Load, Sizes, flops, memory_nbytes, seconds_range
from qaudit.errors import MachineError, SourceError
from qaudit.recipe import needed, resolve_soups, select
from qaudit.sources.folder import find_all, with_hashes
from qaudit.sources.places import folder_of
from qaudit.types import Plan, Protocol, Recipe, Subject

LONGEST_CONTEXT = 2048  # the default context is the smaller of this and the model's maximum
_DAMAGED = "download it again; it is damaged or was cut short"


def make_plan(
    recipe: Recipe, *, stream_limit_nbytes: int | None = None, allow_pickle: bool = False
) -> Plan:
    """Resolve and price a recipe; refuse what cannot fit."""
    schemes = parse_schemes(recipe.schemes)
    subjects = find_subjects(recipe)
    sizes, longest = _look_at(subjects, allow_pickle)
    protocol = make_protocol(recipe, recipe.context or min(LONGEST_CONTEXT, longest))
    device, dtype = foresee(recipe.device, recipe.dtype)
    limit = stream_limit_nbytes if stream_limit_nbytes is not None else default_stream_limit()
    load = Load.of(protocol, schemes)
    needed = memory_nbytes(sizes, load, ITEMSIZE[dtype], limit)
    available = psutil.virtual_memory().available
    _refuse_what_cannot_fit(needed, available, device)
    low, high = seconds_range(flops(sizes, load) * len(subjects))
    return Plan(
        recipe=recipe,
        subjects=subjects,
        specs=tuple(scheme.spec for scheme in schemes),
        device=device,
        dtype=dtype,
        context=protocol.context,
        parameters=sizes.parameters,
        blocks=sizes.blocks,
        nbytes_read=sum(c.nbytes for subject in subjects for c, _ in subject.members),
        nbytes_memory=needed,
        nbytes_memory_fixed=memory_nbytes(sizes, load, ITEMSIZE[dtype], 0),
        nbytes_memory_available=available,
        passes=len(subjects) * (1 + len(schemes)),
        seconds_low=low,
        seconds_high=high,
    )


def find_subjects(recipe: Recipe) -> tuple[Subject, ...]:
    """Return what is measured: the selected checkpoints in order, then the soups."""
    found = find_all(recipe.targets, recipe, hashed=False)
    read = with_hashes(needed(recipe, found))  # no other weight file has to be read
    alone = tuple(Subject(c.label, ((c, 1.0),)) for c in select(recipe, read))
    return (*alone, *resolve_soups(recipe, read))


def make_protocol(recipe: Recipe, context: int) -> Protocol:
    """Return how text becomes windows of at most `context` tokens."""
    return Protocol(
        context=context,
        stride=recipe.stride or context,
        bos=recipe.bos,
        packed=recipe.packed,
        evaluation_documents=recipe.evaluation_documents,
        calibration_documents=recipe.calibration_documents,
        document_tokens=recipe.document_tokens,
        calibration_seed=recipe.calibration_seed,
    )


def default_stream_limit() -> int:
    """Return the memory hidden states may take before they are spilled: a quarter of the free."""
    return int(psutil.virtual_memory().available) // 4


def _look_at(subjects: Sequence[Subject], allow_pickle: bool) -> tuple[Sizes, int]:
    """Return the sizes of the largest model, and the longest context that all can read.

    A model that cannot be read is skipped with its reason when its turn comes; if none can be
    read, there is nothing to plan.
    """
    found, failures = [], []
    for folder in dict.fromkeys(folder_of(c) for s in subjects for c, _ in s.members):
        try:
            sizes = Sizes.read(folder, allow_pickle=allow_pickle)
            found.append((sizes, _longest_context(folder)))
        except SourceError as error:
            failures.append(error)
    if not found:
        raise failures[0]
    largest = max((sizes for sizes, _ in found), key=lambda sizes: sizes.parameters)
    return largest, min(context for _, context in found)


def _longest_context(folder: Path) -> int:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"`{path}` cannot be read: {error}", hint=_DAMAGED) from error
    if not isinstance(config, dict):
        raise SourceError(f"`{path}` is not a table of keys", hint=_DAMAGED)
    for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
        if isinstance(config.get(key), int):
            return int(config[key])
    return LONGEST_CONTEXT


def _refuse_what_cannot_fit(needed: int, available: int, device: str) -> None:
    if device == "cpu" and needed > available:
        raise MachineError(
            f"this audit needs about {needed / 2**30:.1f} GiB of memory "
            f"and {available / 2**30:.1f} GiB are free",
            hint="lower `--stream-memory`, `--calibration-documents` or `--context`",
        )


def with_machine(plan: Plan, device: str, dtype: str) -> Plan:
    """Return the plan with the device and dtype that are really used."""
    return replace(plan, device=device, dtype=dtype)


def schemes_of(plan: Plan) -> tuple[Scheme, ...]:
    """Return the schemes of a plan."""
    return parse_schemes(plan.specs)
