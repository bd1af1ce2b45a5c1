"""What diagnostics ask of each subject, and what that costs: in words, FLOP, streams. No torch.

A diagnostic that nobody has a price for here is named without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path

from qaudit.core.diagnostics.curvature import Curvature
from qaudit.core.diagnostics.plane import Plane
from qaudit.core.diagnostics.sensitivity import Sensitivity
from qaudit.core.registry import parse_diagnostics, parse_scheme
from qaudit.core.scheme import Scheme
from qaudit.errors import UsageError
from qaudit.planning.curved import (
    curvature_flops,
    plane_load,
    plane_passes,
    plane_scheme,
    say_curvature,
    say_plane,
)
from qaudit.planning.price import Load, Sizes, flops
from qaudit.saved.results import slug_of
from qaudit.types import Plan, Protocol, Recipe, Subject

ROLES = 7
"""How many roles the linears of a block have, as far as a plan can tell."""

MOST_BITS = 8


@dataclass(frozen=True)
class Price:
    """The price of all diagnostics of one subject, and what each of them is in words."""

    said: tuple[str, ...] = ()
    flops: float = 0.0
    streams: int = 0
    loads: tuple[Load, ...] = ()  # of passes beside the audit's own


def price_diagnostics(
    recipe: Recipe, schemes: Sequence[Scheme], protocol: Protocol, sizes: Sizes
) -> Price:
    """Return what the diagnostics of a recipe take for each subject."""
    said, work, streams, loads = list[str](), 0.0, 0, list[Load]()
    for asked in parse_diagnostics(recipe.diagnostics):
        if isinstance(asked, Sensitivity):
            scheme = sensitive_scheme(asked, schemes)
            count, parts = streams_of(asked, sizes), _parts(asked, scheme, protocol, sizes)
            said.append(
                f"sensitivity at {scheme.short}: about {count} streams more for each subject, "
                "and two more quantizations of each block"
            )
            work += flops(sizes, parts) + flops(sizes, replace(parts, schemes=1))
            streams, loads = streams + count, [*loads, parts]
        elif isinstance(asked, Curvature):
            said.append(say_curvature(asked, protocol))
            work += curvature_flops(asked, protocol, sizes)
        elif isinstance(asked, Plane):
            scheme = plane_scheme(asked, schemes)
            load, passes = plane_load(asked, scheme, protocol), plane_passes(asked)
            said.append(say_plane(asked, scheme))
            work += passes * flops(sizes, load)
            streams, loads = streams + passes * load.schemes, [*loads, load]
        else:
            said.append(_WORDS.get(asked.name, asked.short))
    return Price(tuple(said), work, streams, tuple(loads))


_WORDS: Mapping[str, str] = {
    "weights": "weights: looked at while schemes quantize them; no stream of their own",
}


def sensitive_scheme(asked: Sensitivity, schemes: Sequence[Scheme]) -> Scheme:
    """Return the scheme that parts are quantized with: one with bits to choose."""
    if asked.scheme != "auto":
        found = parse_scheme(asked.scheme)
        if not hasattr(found, "bits"):
            raise UsageError(
                f"`{found.short}` has no bits to choose, and sensitivity chooses bits",
                hint="name another, as `--diagnose sensitivity:scheme=gptq-3bit`",
            )
        return found
    some = [scheme for scheme in schemes if hasattr(scheme, "bits")]
    if not some:
        raise UsageError(
            "no scheme of this audit has bits to choose, and sensitivity chooses bits",
            hint="name one, as `--diagnose sensitivity:scheme=gptq-3bit`",
        )
    return next((scheme for scheme in some if bits_of(scheme) == 3), some[0])


def bits_of(scheme: Scheme) -> int:
    """Return the bits of a scheme that has a choice of them."""
    return int(scheme.bits)  # type: ignore[attr-defined]


def low_and_high(scheme: Scheme) -> tuple[int, int]:
    """Return the two numbers of bits that a mixture is made of."""
    low = min(bits_of(scheme), MOST_BITS - 1)
    return low, low + 1


def streams_of(asked: Sensitivity, sizes: Sizes) -> int:
    """Return about how many models are evaluated: each role twice, groups, all twice, a mixture."""
    return 2 * ROLES + min(asked.layers, sizes.blocks) + 2 + 1


def _parts(asked: Sensitivity, scheme: Scheme, protocol: Protocol, sizes: Sizes) -> Load:
    """Return what goes through the model in the pass of the parts; the mixture's holds less."""
    load = Load.of(protocol, [scheme])
    return replace(
        load,
        own_streams=0,
        shared_calibration=True,
        schemes=streams_of(asked, sizes) - 1,
        full_precision=False,
    )


def with_needed_again(plan: Plan, evidence: Path) -> Plan:
    """Return the plan with a note where measured subjects have to be read again to be diagnosed.

    By the names of files alone: what was found for other weights under the same label counts.
    """
    names = [asked.name for asked in parse_diagnostics(plan.recipe.diagnostics)]
    if not names or not evidence.is_dir():
        return plan
    again = [s.label for s in plan.subjects if _needed_again(s, names, evidence)]
    if not again:
        return plan
    shown = ", ".join(f"`{label}`" for label in again[:3])
    more = f" and {len(again) - 3} more" if len(again) > 3 else ""
    note = f"{shown}{more}: measured already, and their weights are needed again to diagnose them"
    return replace(plan, notes=(*plan.notes, note))


def _needed_again(subject: Subject, names: Sequence[str], evidence: Path) -> bool:
    measured = any(evidence.glob(f"{_glob(subject.label)}--*.npz"))
    folder = evidence / "diagnostics"
    return measured and not all(
        any(folder.glob(f"{_glob(subject.label)}--{name}--*.json")) for name in names
    )


def _glob(label: str) -> str:
    return escape(slug_of(label))
