"""Refuse to compare audits that claim different things, with the command that rescans one.

The claim of a file holds for the weights of one calibration, as they are written; that of a method
for what any calibration would give, so that its intervals are wider.
"""

from __future__ import annotations

from qaudit.errors import UsageError
from qaudit.report.card.protocol import rescan
from qaudit.types import AuditRecord, ClaimKind, Policy


def must_claim_alike(*audits: tuple[str, AuditRecord]) -> None:
    """Raise UsageError where audits, each with its name, are about different things."""
    by_claim: dict[ClaimKind, tuple[str, AuditRecord]] = {
        audit.plan.claim: (name, audit) for name, audit in audits
    }
    if len(by_claim) > 1:
        file, (method, audit) = by_claim["file"][0], by_claim["method"]
        raise UsageError(
            f"`{file}` is about a file and `{method}` about a method, which do not compare",
            hint=f"scan `{method}` again: `{rescan(audit, claim='file')}`",
        )


def must_claim_as(policy: Policy, name: str, audit: AuditRecord) -> None:
    if policy.claim is not None and policy.claim != audit.plan.claim:
        raise UsageError(
            f"`{name}` is about a {audit.plan.claim}, and the policy `{policy.name}` about a "
            f"{policy.claim}",
            hint=f"scan it again: `{rescan(audit, claim=policy.claim)}`",
        )
