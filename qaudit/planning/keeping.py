"""What a scan keeps while it measures: weights by `--keep`, and subjects within themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qaudit.core.registry import parse_schemes
from qaudit.core.scheme import Scheme
from qaudit.core.shipped import Shipped
from qaudit.core.sizes import size
from qaudit.diagnostics.diagnostic import DiagnosticWork
from qaudit.errors import UsageError
from qaudit.planning.sizes import Sizes
from qaudit.types import Subject

_PER_WEIGHT = 1.25  # a byte for a code; scales and zero points of groups of 16 take a quarter more
_LARGEST_ITEM = 4


def kept_specs(keep: Sequence[str], schemes: Sequence[Scheme]) -> tuple[str, ...]:
    measured = {s.spec: s.short for s in schemes if not isinstance(s, Shipped)}
    wanted = parse_schemes(keep) if keep else ()
    for scheme in wanted:
        if scheme.spec not in measured:
            raise UsageError(
                f"`--keep {scheme.short}` names a scheme that is not measured",
                hint=f"measured are {', '.join(measured.values())}",
            )
    return tuple(scheme.spec for scheme in wanted)


def nbytes_to_keep(specs: Sequence[str], subjects: Sequence[Subject], sizes: Sizes) -> int:
    """Return the most bytes on the disk before it is known what ships; searches keep nothing."""
    if not specs:
        return 0
    linears = int(_PER_WEIGHT * sizes.blocks * sizes.block_parameters)
    rest = _LARGEST_ITEM * sizes.rest_parameters
    contents = {subject.content for subject in subjects if not subject.is_search}
    return len(contents) * (len(specs) * linears + rest)


def keeping_notes(specs: Sequence[str], nbytes: int) -> tuple[str, ...]:
    if not specs:
        return ()
    return (
        f"`--keep` writes up to {size(nbytes)} of quantized weights beside downloads; those that "
        "ship stay, the others are removed with the verdict",
    )


def begins_again_notes(rounds: int, diagnoses: Iterable[DiagnosticWork]) -> tuple[str, ...]:
    """Note why a subject that is interrupted does not go on at a block."""
    reasons = [f"the items of tasks go through in about {rounds} rounds"] * (rounds > 1)
    reasons += ["`--diagnose weights` reads what is quantized"] * any(w.watches for w in diagnoses)
    if not reasons:
        return ()
    return (f"a subject that is interrupted begins again, because {' and '.join(reasons)}",)
