"""Parameters of `sensitivity`, and the scheme that they choose.

Which part of a model a scheme's error comes from, and which bits each part is worth.

One part is quantized at a time and all else left as it is; what that adds to the loss is the
part's contribution. Contributions add up to what everything quantized together adds only as far
as the parts do not act on each other, which is unknown beforehand: so a mixture of bits is
chosen by summed contributions, exactly, and then measured.

The choice is a knapsack with one option per part. Its exact solution is built part by part from
the options that nothing cheaper beats (Nemhauser and Ullmann 1969): a handful of roles leaves a
handful of those.

Findings of `sensitivity`: roles that add most of the error, mixtures unlike their sum.

What each role adds to the loss, in the section `Why`: for the pick and the last checkpoint.

Other subjects and groups of layers are in `audit.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import Scheme
from qaudit.diagnostics.diagnostic import Diagnostic, DiagnosticWork
from qaudit.diagnostics.roles import role_of
from qaudit.errors import UsageError
from qaudit.judge.table import Measurements
from qaudit.report import document as doc
from qaudit.report.format import listing, or_dash, percent, plural, spread
from qaudit.report.views import View
from qaudit.settings import EXAMPLE_SCHEME
from qaudit.types import Diagnostics, Finding, SensitivityRow

MOST_BITS = 8
ROLES = 7  # in a block, as far as a plan knows


@dataclass(frozen=True, kw_only=True)
class Sensitivity(Diagnostic):
    """The error of each role and group of layers alone, and a mixture of bits from it."""

    name: ClassVar[str] = "sensitivity"

    scheme: str = "auto"  # the first of the recipe with 3 bits, or else with any
    budget: float = 0.0  # bits per weight; 0: halfway between all low and all high
    layers: int = 4  # groups of blocks

    def schemes(self, schemes: Sequence[Scheme]) -> Sequence[Scheme]:
        return [self.scheme_among(schemes)]

    def work(self, schemes: Sequence[Scheme], blocks: int) -> DiagnosticWork:
        scheme = self.scheme_among(schemes)
        # About each role twice, the groups, all of it twice, and a mixture.
        count = 2 * ROLES + min(self.layers, blocks) + 2 + 1
        return DiagnosticWork(
            f"sensitivity at {scheme.short}: about {count} streams more for each subject, "
            "and two more quantizations of each block",
            streams=count,
            passes=1,
            schemes=(scheme, scheme),
        )

    def scheme_among(self, schemes: Sequence[Scheme]) -> Scheme:
        """Return the scheme that parts are quantized with: one with a choice of bits."""
        if self.scheme != "auto":
            named = parse_scheme(self.scheme)
            if named.mixes_bits or not hasattr(named, "bits"):
                raise UsageError(
                    f"`{named.short}` has no bits to choose, and sensitivity chooses bits",
                    hint="name another, as "
                    f"`--set diagnostics=sensitivity:scheme={EXAMPLE_SCHEME}`",
                )
            return named
        some = [s for s in schemes if hasattr(s, "bits") and not s.mixes_bits]
        if not some:
            raise UsageError(
                "no scheme of this audit has bits to choose, and sensitivity chooses bits",
                hint=f"name one, as `--set diagnostics=sensitivity:scheme={EXAMPLE_SCHEME}`",
            )
        return next((scheme for scheme in some if bits_of(scheme) == 3), some[0])


def bits_of(scheme: Scheme) -> int:
    return int(scheme.bits)  # type: ignore[attr-defined]


def low_and_high(scheme: Scheme) -> tuple[int, int]:
    """Return the two numbers of bits that a mixture is made of."""
    low = min(bits_of(scheme), MOST_BITS - 1)
    return low, low + 1


Part = Literal["role", "layers", "all", "mixture"]


@dataclass(frozen=True)
class Variant:
    """A model of which some parts are quantized, each with so many bits."""

    part: Part
    name: str
    bits: tuple[tuple[str, int], ...]  # (role, bits); a role that is not named stays as it is
    blocks: tuple[int, int] | None = None  # from, up to but not with; None: all of them

    def bits_of(self, block: int, linear: str) -> int | None:
        """Return how many bits a linear gets; None: it stays as it is."""
        if self.blocks is not None and not self.blocks[0] <= block < self.blocks[1]:
            return None
        return dict(self.bits).get(role_of(linear))

    @property
    def spec(self) -> str:
        where = "" if self.blocks is None else f"@{self.blocks[0]}..{self.blocks[1]}"
        return ",".join(f"{role}={bits}" for role, bits in sorted(self.bits)) + where


def variants_of(
    roles: Sequence[str], blocks: int, low: int, high: int, layers: int
) -> list[Variant]:
    """Return the variants to measure before a mixture is chosen."""
    alone = [Variant("role", role, ((role, bits),)) for bits in (low, high) for role in roles]
    count = min(layers, blocks)
    edges = [round(k * blocks / count) for k in range(count + 1)] if count > 0 else []
    groups = [
        Variant("layers", f"{a}..{b - 1}", everything(roles, low), (a, b))
        for a, b in pairwise(edges)
    ]
    whole = [Variant("all", f"{bits} bits", everything(roles, bits)) for bits in (low, high)]
    return [*alone, *groups, *whole]


def everything(roles: Sequence[str], bits: int) -> tuple[tuple[str, int], ...]:
    """Return every role with the same bits."""
    return tuple((role, bits) for role in roles)


@dataclass(frozen=True)
class Option:
    """What a part costs with so many bits, and what it then adds to the loss."""

    bits: int
    storage: float  # bits
    loss: float


def cheapest_loss(options: Mapping[str, Sequence[Option]], budget: float) -> dict[str, int] | None:
    """Return for each part its bits, so that the summed loss is least within a budget of storage.

    None: not even the smallest options fit. Of equal losses the one that stores less is taken.
    """
    frontier: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    for several in options.values():
        entries = [
            (storage + variant.storage, loss + variant.loss, (*chosen, variant.bits))
            for storage, loss, chosen in frontier
            for variant in several
        ]
        frontier = _unbeaten([entry for entry in entries if entry[0] <= budget])
    if not frontier:
        return None
    best = min(frontier, key=lambda entry: (entry[1], entry[0]))
    return dict(zip(options, best[2], strict=True))


def _unbeaten(
    entries: Sequence[tuple[float, float, tuple[int, ...]]],
) -> list[tuple[float, float, tuple[int, ...]]]:
    """Return the entries that none with as little storage has less loss than."""
    best: list[tuple[float, float, tuple[int, ...]]] = []
    for entry in sorted(entries):
        if not best or entry[1] < best[-1][1]:
            best.append(entry)
    return best


MOST = 0.5
"""A role adds most of the error if all of the interval of its share is above this."""


def judge(table: Measurements, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
    """Return the diagnostics as they are, and the findings QA035 and QA036."""
    return diagnostics, tuple(diagnosed_findings(diagnostics.sensitivity))


def diagnosed_findings(rows: Sequence[SensitivityRow]) -> Iterator[Finding]:
    low = {row.bits for row in rows if row.part == "all"}
    for row in rows:
        if row.part == "role" and row.bits == min(filter(None, low), default=row.bits):
            yield from _most(row)
        elif row.part == "mixture":
            yield from _off(row)


def _most(row: SensitivityRow) -> Iterator[Finding]:
    share = row.share
    if share is None or share.low <= MOST:
        return
    message = (
        f"of what the roles of `{row.subject}` add to the loss at {row.scheme}, each quantized "
        f"alone, `{row.name}` adds {100 * share.estimate:.0f} % "
        f"[{100 * share.low:.0f}, {100 * share.high:.0f}]"
    )
    hint = f"more bits for `{row.name}` alone may pay most; measure such a mixture"
    yield Finding("QA035", "info", row.subject, row.scheme, message, hint, share, outcome="pass")


def _off(row: SensitivityRow) -> Iterator[Finding]:
    change = row.absolute_change
    if change is None or row.predicted is None or change.low <= row.predicted <= change.high:
        return
    message = (
        f"the suggested mixture of bits for `{row.subject}` adds {change.estimate:.4f} "
        f"[{change.low:.4f}, {change.high:.4f}] nats per token, where its parts add up to "
        f"{row.predicted:.4f}: they act on each other"
    )
    hint = "use the measured loss, not the sum of the parts"
    yield Finding("QA036", "info", row.subject, row.scheme, message, hint, change, outcome="pass")


COLUMNS = doc.columns("role", "adds, nats per token", "share, %")


def section(view: View) -> doc.Section:
    rows = view.audit.diagnostics.sensitivity
    blocks = [block for label in view.of_interest for block in _subject(label, rows)]
    return doc.Section("Why", tuple(blocks), 4)


def _subject(label: str, rows: tuple[SensitivityRow, ...]) -> list[doc.Block]:
    rows_of_subject = [row for row in rows if row.subject == label]
    lowest = min((row.bits for row in rows_of_subject if row.bits is not None), default=None)
    alone = [row for row in rows_of_subject if row.part == "role" and row.bits == lowest]
    if not alone:
        return []
    legend = (
        f"What each role of `{label}` adds to the loss when it alone is quantized at "
        f"{alone[0].scheme}, and its share of the sum over all roles."
    )
    cells = tuple(
        doc.row(
            doc.name_cell(row.name),
            or_dash(row.absolute_change, spread),
            or_dash(row.share, percent),
        )
        for row in alone
    )
    return [
        doc.paragraph(legend),
        doc.TableBlock(COLUMNS, cells),
        *map(doc.paragraph, _mixture(rows_of_subject)),
    ]


def _mixture(added: list[SensitivityRow]) -> list[str]:
    whole = {row.bits: row for row in added if row.part == "all"}
    mixed = next((row for row in added if row.part == "mixture"), None)
    if mixed is None or mixed.absolute_change is None or mixed.predicted is None:
        return []
    by_bits: dict[int, list[str]] = {}
    for role, bits in mixed.mixture.items():
        by_bits.setdefault(bits, []).append(f"`{role}`")
    mixture = listing([f"{bits} bits for {listing(by_bits[bits])}" for bits in sorted(by_bits)])
    rivals = [
        f"all at {bits} bits ({row.bits_per_weight:.2f}) {spread(row.absolute_change)}"
        for bits, row in sorted(whole.items(), key=lambda item: item[0] or 0)
        if row.absolute_change is not None
    ]
    beside = f"; {' and '.join(rivals)}" if rivals else ""
    return [
        f"Suggested within {mixed.budget or mixed.bits_per_weight:.2f} bits per weight: {mixture}. "
        f"Measured on {plural(mixed.documents, 'document')}, at {mixed.bits_per_weight:.2f} bits "
        f"per weight it adds {spread(mixed.absolute_change)} nats per token, where the sum of its "
        f"parts predicts {mixed.predicted:.3f}{beside}. All of these are calibrated on the "
        "full-precision model."
    ]
