"""Parts of a rendered card, and audits with checks of a policy."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from qaudit.report import markdown
from qaudit.report.folder import document
from qaudit.report.views import View
from qaudit.saved.audits import read_audit
from qaudit.types import AuditRecord, Finding, Interval
from tests.support import sample

SOUP, LAST, STAGE_END = "soup", "stage2-ingredient3-step1000", "stage1-step5000"


WHY = "Evidence for the verdict"


def whole(audit: AuditRecord) -> str:
    """Return everything that the page has, as Markdown."""
    return markdown.render(document(View(audit)), pictures_at="plots", has_dark=True)


def whole_at(folder: Path) -> str:
    """Return everything that the page of a saved audit has, as Markdown."""
    return whole(read_audit(folder))


def section(text: str, title: str) -> str:
    """Return what is folded under a title."""
    _, _, rest = text.partition(f"<details><summary>{title}</summary>\n\n")
    depth = 1
    for tag in re.finditer("</?details>", rest):
        depth += 1 if tag[0] == "<details>" else -1
        if depth == 0:
            return rest[: tag.start()].rstrip()
    return rest


def titles(text: str) -> list[str]:
    """Return the titles of a card's sections, in order."""
    depth, found = 0, []
    for tag in re.finditer("<details><summary>(.*?)</summary>|</details>", text):
        found += [tag[1]] if tag[1] and depth == 0 else []
        depth += 1 if tag[1] else -1
    return found


def screen(text: str) -> str:
    """Return what is before the first fold."""
    return text.partition("<details>")[0]


def table(text: str) -> list[list[str]]:
    """Return the cells of the first Markdown table in a text, without its rule."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
    return [row for row in cells if not set("".join(row)) <= set(":-")]


def check(outcome: Any, subject: str = SOUP, scheme: str = "gptq-4bit", **more: Any) -> Finding:
    level = "info" if outcome == "pass" else "error"
    said = f"{scheme} raises the loss of `{subject}` by 2.1 %, the margin is 2 %"
    settings = {"rule": "QA001", "level": level, "message": said, "hint": "", **more}
    interval = Interval(0.021, 0.018, 0.024)
    return Finding(
        subject=subject, scheme=scheme, interval=interval, margin=0.02, outcome=outcome, **settings
    )


def held(*checks: Finding) -> AuditRecord:
    audit = sample.audit()
    return replace(audit, findings=(*audit.findings, *checks))
