"""What rules found: what a policy objects to, what is ignored, and everything else."""

from __future__ import annotations

from collections.abc import Sequence

from qaudit.report.markdown import prose
from qaudit.report.marks import ABOUT_A_POLICY, is_ignored
from qaudit.report.views import View
from qaudit.types import Finding

SHOWN = 3  # of one rule, before they are counted
SHOWN_OF_POLICY = 12


def policy_section(view: View) -> str:
    """List what a policy objects to, breaches first; what it finds well is only counted."""
    found = [f for f in view.audit.findings if f.rule in ABOUT_A_POLICY and f.outcome != "pass"]
    found = [f for f in found if not is_ignored(f)]
    levels = ("error", "warn", "info")
    found.sort(key=lambda f: (f.outcome != "fail", levels.index(f.level)))
    return "\n".join(_lines(found, SHOWN_OF_POLICY))


def ignores_section(view: View) -> str:
    """List the breaches that somebody answers for."""
    return "\n".join(_line(f) for f in view.audit.findings if is_ignored(f))


def findings_section(view: View) -> str:
    """List the findings that are no check of a policy and no note, the worst of each rule."""
    by_rule: dict[str, list[Finding]] = {}
    for finding in view.audit.findings:
        settled = finding.outcome == "pass" and finding.margin
        if finding.rule not in {"QA003", *ABOUT_A_POLICY} and not settled:
            by_rule.setdefault(finding.rule, []).append(finding)
    return "\n".join(line for found in by_rule.values() for line in _worst(found))


def _worst(found: list[Finding]) -> list[str]:
    """List the worst findings of a rule, and count the others."""
    return _lines(
        sorted(found, key=lambda f: -abs(f.interval.estimate) if f.interval else 0.0), SHOWN
    )


def _lines(found: Sequence[Finding], shown: int) -> list[str]:
    lines = [_line(finding) for finding in found[:shown]]
    more = len(found) - shown
    return lines + ([f"- **{found[0].rule}** and {more} more in `audit.json`."] if more > 0 else [])


def _line(finding: Finding) -> str:
    hint = f" *{prose(finding.hint)}.*" if finding.hint else ""
    return f"- **{finding.rule}** {prose(finding.message)}.{hint}"
