"""Which part of a model a scheme's error comes from.

One part is quantized at a time and all else left as it is; what that adds to the loss is the
part's contribution. Contributions add up to what everything quantized together adds only as far
as the parts do not act on each other: `predicted` of everything is their sum, beside what was
measured. Bits by role follow from it, and gained nothing on a real model: schemes that end in
`-mix` choose them linear by linear.

Finding of `sensitivity`: roles that add most of the error. What each role adds to the loss is in
the section `Why`, for the pick and the last checkpoint; other subjects and groups of layers are in
`audit.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import Scheme
from qaudit.diagnostics.diagnostic import Diagnostic, DiagnosticWork, role_of, with_three_bits
from qaudit.errors import UsageError
from qaudit.judge.table import Measurements
from qaudit.report import document as doc
from qaudit.report.format import or_dash, percent, spread
from qaudit.report.views import View
from qaudit.settings import EXAMPLE_SCHEME
from qaudit.types import Diagnostics, Finding

ROLES = 7  # in a block, as far as a plan knows


@dataclass(frozen=True, kw_only=True)
class Sensitivity(Diagnostic):
    """The error of each role and group of layers alone."""

    name: ClassVar[str] = "sensitivity"

    scheme: str = "auto"  # the first of the recipe with 3 bits, or else with any
    layers: int = 4  # groups of blocks

    def schemes(self, schemes: Sequence[Scheme]) -> Sequence[Scheme]:
        return [self.scheme_among(schemes)]

    def work(self, schemes: Sequence[Scheme], blocks: int) -> DiagnosticWork:
        scheme = self.scheme_among(schemes)
        # About each role twice, the groups, and all of it twice.
        count = 2 * ROLES + min(self.layers, blocks) + 2
        return DiagnosticWork(
            f"sensitivity at {scheme.short}: about {count} streams more for each subject, "
            "and two more quantizations of each block",
            streams=count,
            passes=1,
            schemes=(scheme, scheme),
        )

    def scheme_among(self, schemes: Sequence[Scheme]) -> Scheme:
        """Return the scheme that parts are quantized with: one with a choice of bits."""
        named = [] if self.scheme == "auto" else [parse_scheme(self.scheme)]
        some = [s for s in named or schemes if hasattr(s, "bits") and not s.mixes_bits]
        if not some:
            which = f"`{named[0].short}` has no" if named else "no scheme of this audit has"
            raise UsageError(
                f"{which} bits to choose, and sensitivity chooses bits",
                hint=f"name {'another' if named else 'one'}, as "
                f"`--set diagnostics=sensitivity:scheme={EXAMPLE_SCHEME}`",
            )
        return with_three_bits(some) or some[0]


Part = Literal["role", "layers", "all"]


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
    every = {bits: tuple((role, bits) for role in roles) for bits in (low, high)}
    alone = [Variant("role", role, ((role, bits),)) for bits in every for role in roles]
    count = min(layers, blocks)
    edges = [round(k * blocks / count) for k in range(count + 1)] if count > 0 else []
    groups = [Variant("layers", f"{a}..{b - 1}", every[low], (a, b)) for a, b in pairwise(edges)]
    return [*alone, *groups, *(Variant("all", f"{n} bits", every[n]) for n in every)]


MOST = 0.5
"""A role adds most of the error if all of the interval of its share is above this."""


def judge(table: Measurements, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
    rows, findings = diagnostics.sensitivity, []
    low = min((row.bits for row in rows if row.part == "all"), default=None)
    for row in rows:
        share = row.share
        if row.part != "role" or low not in (None, row.bits) or not share or share.low <= MOST:
            continue
        message = (
            f"of what the roles of `{row.subject}` add to the loss at {row.scheme}, each quantized "
            f"alone, `{row.name}` adds {100 * share.estimate:.0f} % "
            f"[{100 * share.low:.0f}, {100 * share.high:.0f}]"
        )
        hint = f"more bits for `{row.name}` may pay most: measure a mixture within a budget of bits"
        cell = row.subject, row.scheme
        findings.append(Finding("QA035", "info", *cell, message, hint, share, outcome="pass"))
    return diagnostics, tuple(findings)


COLUMNS = ("role", "adds, nats per token", "share, %")


def section(view: View) -> doc.Section:
    blocks: list[doc.Block] = []
    for label in view.of_interest:
        rows = [row for row in view.audit.diagnostics.sensitivity if row.subject == label]
        lowest = min((row.bits for row in rows), default=None)
        alone = [row for row in rows if row.part == "role" and row.bits == lowest]
        if not alone:
            continue
        legend = (
            f"What each role of `{label}` adds to the loss when it alone is quantized at "
            f"{alone[0].scheme}, and its share of the sum over all roles."
        )
        cells = (
            (doc.name_cell(r.name), or_dash(r.absolute_change, spread), or_dash(r.share, percent))
            for r in alone
        )
        blocks += [doc.paragraph(legend), doc.table(COLUMNS, cells)]
    return doc.Section("Why", tuple(blocks), 4)
