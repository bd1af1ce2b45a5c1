"""What a policy says of an audit: the findings that hold it to margins, and the marks they leave.

The checks of a policy stand among the findings of an audit under codes of their own. A breach
that somebody answers for keeps its mark: ignoring it changes what follows, not what is.
"""

from __future__ import annotations

from qaudit.report.views import View
from qaudit.types import Finding
from qaudit.types.gated import CODE_OF

BREACH, UNCLEAR = "!", "?"

MARGINS = frozenset(CODE_OF.values())
"""Rules that hold a number of one subject and scheme to a margin."""

ABOUT_A_POLICY = MARGINS | {"QA025", "QA026", "QA027"}
"""These, and what is wrong with how much was measured, or with the policy itself."""


def policy_findings(view: View) -> tuple[Finding, ...]:
    """Return what numbers were held to margins, in the order of the policy."""
    return tuple(f for f in view.audit.findings if f.rule in MARGINS)


def is_ignored(finding: Finding) -> bool:
    """Say whether a check of a policy came out badly, and somebody answers for it."""
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
