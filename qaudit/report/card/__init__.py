"""`card.md`: an audit for a busy reader, a pure function of the audit.

The verdict comes first, then what to ship and why, then one table; what that rests on follows,
and the long tables are folded. The card stands between two markers, so that a later card can
take its place inside a README (`report/block.py`). It keeps within what a comment on a pull
request may hold: whole sections are left out, the longest and least needed first, and named.

One file draws one section. Pictures are linked by a path relative to the card; where there is no
place for pictures, lines of text stand for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from qaudit.report.block import BEGIN, END
from qaudit.report.card.curvature import curvature_section
from qaudit.report.card.diagnosed import diagnosed_section
from qaudit.report.card.errors import errors_section, every_subject_section
from qaudit.report.card.findings import findings_section, ignores_section, policy_section
from qaudit.report.card.noise import noise_section
from qaudit.report.card.pareto import pareto_section
from qaudit.report.card.phases import phases_section
from qaudit.report.card.protocol import notes_section, protocol_section, skipped_section
from qaudit.report.card.reproduce import reproduce_section
from qaudit.report.card.schemes import schemes_section
from qaudit.report.card.section import Section, fitted
from qaudit.report.card.series import series_section
from qaudit.report.card.soups import soup_section
from qaudit.report.card.tasks import tasks_section
from qaudit.report.format import listing
from qaudit.report.markdown import plain, prose
from qaudit.report.verdict import pick_reasons, standing, verdict
from qaudit.report.views import View
from qaudit.types import Audit

LIMIT_NBYTES = 60_000
PICTURES = "plots"
ERRORS, EVERY_SUBJECT, FINDINGS = "Relative error", "Every subject", "Findings"
"""Titles of the sections that the page has more of."""
LONGEST_TITLE = 200


def render(
    audit: Audit, *, pictures_at: str | None = PICTURES, limit_nbytes: int = LIMIT_NBYTES
) -> str:
    """Render the card; without a place for pictures, with lines of text in their stead."""
    view = View(audit)
    there = [section for section in sections(view, pictures_at) if section.body]
    head = _head(view)

    def join(kept: Sequence[Section], left_out: Sequence[str]) -> str:
        parts = [*head, *(section.text for section in kept)]
        if left_out:
            parts.append(f"Left out for length, see `audit.json`: {', '.join(left_out)}.")
        return "\n\n".join([BEGIN, *parts, END]) + "\n"

    return fitted(there, join, limit_nbytes)


def sections(view: View, pictures_at: str | None) -> list[Section]:
    """Return every section in the order of the card."""
    reasons = "\n".join(f"- {prose(reason)}" for reason in pick_reasons(view))
    return [
        Section("What to ship, and why", reasons, 0),
        Section(ERRORS, errors_section(view), 0),
        Section(EVERY_SUBJECT, every_subject_section(view), 8),
        Section("Held to the policy", policy_section(view), 1),
        Section("Along the series", series_section(view, pictures_at), 2),
        Section("Phases", phases_section(view), 5),
        Section("Soup against ingredients", soup_section(view, pictures_at), 4),
        Section("What fewer bits cost", pareto_section(view, pictures_at), 3),
        Section("Multiple choice", tasks_section(view), 5),
        Section("Why", diagnosed_section(view), 4),
        Section("How sharp the loss is", curvature_section(view, pictures_at), 5),
        Section("Noise", noise_section(view), 4),
        Section(FINDINGS, findings_section(view), 3),
        Section("Not measured", skipped_section(view), 5),
        Section("Scheme by scheme", schemes_section(view), 9),
        Section("Notes", notes_section(view), 7),
        Section("Protocol and environment", protocol_section(view), 2),
        Section("Ignores applied", ignores_section(view), 1),
        Section("Reproduce", reproduce_section(view), 0),
    ]


def title(view: View) -> str:
    """Return what the card is called; of targets without end, the first ones."""
    targets = listing(list(view.audit.plan.recipe.targets) or ["nothing"])
    if len(targets) > LONGEST_TITLE:
        targets = f"{targets[:LONGEST_TITLE]} ..."
    return f"Quantization audit of {targets}"


def _head(view: View) -> list[str]:
    """Return the title, the verdict, and what it stands on."""
    head = [f"## {plain(title(view))}", f"**{prose(verdict(view))}**"]
    stands = " ".join(prose(sentence) for sentence in standing(view))
    return [*head, stands] if stands else head
