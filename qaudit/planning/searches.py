"""What greedy soups cost to search for, and at which scheme they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import Scheme
from qaudit.errors import UsageError
from qaudit.judge.objective import PREFERRED
from qaudit.planning.price import Load, Sizes, flops
from qaudit.planning.repeats import Again
from qaudit.types import GREEDY, Protocol, Subject


def price_searches(
    subjects: Sequence[Subject],
    schemes: Sequence[Scheme],
    protocol: Protocol,
    sizes: Sizes,
    *,
    returning: bool,
) -> Again:
    """Return the price of what searches measure at most, beside what they end with.

    That is each mean of two candidates and more, and each candidate that is no subject by itself,
    under one scheme.
    """
    alone = {s.content for s in subjects if s.merge is None}
    work, weights = 0.0, list[int]()
    for search in (s for s in subjects if s.is_search):
        members = [checkpoint for checkpoint, _ in search.members]
        largest = sorted((c.nbytes for c in members), reverse=True)
        read = [c.nbytes for c in members if c.content not in alone]
        read += [sum(largest[:count]) for count in range(2, len(members) + 1)]
        load = replace(Load.of(protocol, [scheme_of(search, schemes)]), full_precision=False)
        work += len(read) * flops(sizes, load, returning=returning)
        weights += read
    return Again(flops=work, nbytes_read=sum(weights), streams=len(weights))


def scheme_of(search: Subject, schemes: Sequence[Scheme]) -> Scheme:
    """Return the scheme that a search looks at, which has to be one of those measured."""
    _, _, asked = (search.merge or "").partition("scheme=")
    wanted = parse_scheme(asked or PREFERRED)
    found = next((scheme for scheme in schemes if scheme.spec == wanted.spec), None)
    if found is not None:
        return found
    if asked:
        raise UsageError(
            f"soup `{search.label}` is searched for at `{wanted.short}`, which is not measured",
            hint=f"add it: `--schemes {','.join(s.short for s in (*schemes, wanted))}`",
        )
    return schemes[0]


def with_scheme(search: Subject, schemes: Sequence[Scheme]) -> Subject:
    """Return a search that says at which scheme."""
    merge = f"{GREEDY}:scheme={scheme_of(search, schemes).spec}"
    return Subject(search.label, search.members, merge)
