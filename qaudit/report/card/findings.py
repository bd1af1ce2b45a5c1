"""What rules found: what a policy objects to, what is ignored, and everything else."""

from __future__ import annotations

from collections.abc import Sequence

from qaudit.report import document as doc
from qaudit.report.views import ABOUT_A_POLICY, View, is_ignored
from qaudit.types import CODES, Finding

SHOWN = 3  # of one rule, before they are counted
SHOWN_OF_POLICY = 12


def policy_section(view: View) -> tuple[doc.Block, ...]:
    """List what a policy objects to, breaches first; checks that pass are only counted."""
    objections = [f for f in view.audit.findings if f.rule in ABOUT_A_POLICY]
    objections = [f for f in objections if f.outcome != "pass" and not is_ignored(f)]
    levels = ("error", "warn", "info")
    objections.sort(key=lambda f: (f.outcome != "fail", levels.index(f.level)))
    return _list(_items(objections, SHOWN_OF_POLICY))


def ignores_section(view: View) -> tuple[doc.Block, ...]:
    """List the breaches that are ignored, with a reason."""
    return _list([_item(f) for f in view.audit.findings if is_ignored(f)])


def findings_section(view: View) -> tuple[doc.Block, ...]:
    """List the findings that are no check of a policy and no note, the worst of each rule."""
    by_rule: dict[str, list[Finding]] = {}
    for finding in view.audit.findings:
        settled = finding.outcome == "pass" and finding.margin
        if finding.rule not in {"QA003", *ABOUT_A_POLICY} and not settled:
            by_rule.setdefault(finding.rule, []).append(finding)
    return _list([item for findings in by_rule.values() for item in _worst(findings)])


def codes(view: View) -> tuple[doc.Block, ...]:
    rules = sorted({f.rule for f in view.audit.findings if f.rule in CODES})
    items = [
        (*doc.code(rule), *doc.words(f" {CODES[rule].title}. {CODES[rule].help}")) for rule in rules
    ]
    return (
        (doc.FoldBlock("What the codes mean", (doc.bullets(*items),), only=("html",)),)
        if items
        else ()
    )


def _list(items: Sequence[doc.Inline]) -> tuple[doc.Block, ...]:
    return (doc.List(tuple(items)),) if items else ()


def _worst(findings: list[Finding]) -> list[doc.Inline]:
    return _items(
        sorted(findings, key=lambda f: -abs(f.interval.estimate) if f.interval else 0.0), SHOWN
    )


def _items(findings: Sequence[Finding], shown: int) -> list[doc.Inline]:
    items = [_item(finding) for finding in findings[:shown]]
    more = len(findings) - shown
    if more > 0:
        items.append(
            (*doc.strong(findings[0].rule), *doc.prose(f" and {more} more in `audit.json`."))
        )
    return items


def _item(finding: Finding) -> doc.Inline:
    hint = (*doc.words(" "), *doc.emphasis(f"{finding.hint}.")) if finding.hint else ()
    return (
        *doc.strong(doc.words(finding.rule)),
        *doc.words(" "),
        *doc.prose(f"{finding.message}."),
        *hint,
    )
