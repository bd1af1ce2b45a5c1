"""The checks of a policy among the findings of an audit, and the marks they leave in tables.

A breach that is ignored, with a reason, keeps its mark: ignoring it changes the outcome of the
gate and not the number.
"""

from __future__ import annotations

from qaudit.report.views import View
from qaudit.types import CODE_OF, Finding

BREACH, UNCLEAR = "!", "?"

MARGINS = frozenset(CODE_OF.values())
"""Rules that compare a number of one subject and scheme with a margin."""

ABOUT_A_POLICY = MARGINS | {"QA025", "QA026", "QA027"}
"""These, and what is wrong with how much was measured, or with the policy itself."""


def policy_findings(view: View) -> tuple[Finding, ...]:
    """Return the checks of numbers against margins, in the order of the policy."""
    return tuple(f for f in view.audit.findings if f.rule in MARGINS)


def is_ignored(finding: Finding) -> bool:
    """Return whether a check did not pass and is ignored, with a reason."""
    bad = finding.rule in ABOUT_A_POLICY and finding.outcome != "pass"
    return bad and finding.level == "info"


def judged(view: View, subject: str, scheme: str) -> tuple[Finding, ...]:
    """Return the checks of one subject under one scheme."""
    return tuple(f for f in policy_findings(view) if (f.subject, f.scheme) == (subject, scheme))


def marks(view: View) -> dict[tuple[str, str], str]:
    """Return the mark of every cell that breaches a margin, or may; a breach outweighs a doubt."""
    found: dict[tuple[str, str], str] = {}
    for finding in policy_findings(view):
        if finding.scheme is None or finding.outcome == "pass":
            continue
        cell = finding.subject, finding.scheme
        mark = BREACH if finding.outcome == "fail" else UNCLEAR
        if found.get(cell) != BREACH:
            found[cell] = mark
    return found
