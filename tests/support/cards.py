"""Parts of a rendered card, and audits with checks of a policy."""

import re
from dataclasses import replace

from qaudit.report import markdown
from qaudit.report.folder import document
from qaudit.report.views import View
from qaudit.saved.audits import read_audit
from qaudit.types import (
    ChangeRow,
    Course,
    Finding,
    Interval,
    NotDiagnosed,
    PositionRow,
    RoleRow,
    RoutingRow,
    Span,
    StratumRow,
)
from qaudit.types.conclusions import TaskRow
from tests.support import diagnosed, sample, verdicts

SOUP, LAST, STAGE_END = "soup", "stage2-ingredient3-step1000", "stage1-step5000"


WHY = "Evidence for the verdict"


def whole(audit):
    """Return everything that the page has, as Markdown."""
    return markdown.render(document(View(audit)), pictures_at="plots", has_dark=True)


def whole_at(folder):
    """Return everything that the page of a saved audit has, as Markdown."""
    return whole(read_audit(folder))


def section(text, title):
    """Return what is folded under a title."""
    _, _, rest = text.partition(f"<details><summary>{title}</summary>\n\n")
    depth = 1
    for tag in re.finditer("</?details>", rest):
        depth += 1 if tag[0] == "<details>" else -1
        if depth == 0:
            return rest[: tag.start()].rstrip()
    return rest


def titles(text):
    """Return the titles of a card's sections, in order."""
    depth, found = 0, []
    for tag in re.finditer("<details><summary>(.*?)</summary>|</details>", text):
        found += [tag[1]] if tag[1] and depth == 0 else []
        depth += 1 if tag[1] else -1
    return found


def screen(text):
    """Return what is before the first fold."""
    return text.partition("<details>")[0]


def table(text):
    """Return the cells of the first Markdown table in a text, without its rule."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
    return [row for row in cells if not set("".join(row)) <= set(":-")]


def check(outcome, subject=SOUP, scheme="gptq-4bit", **more):
    level = "info" if outcome == "pass" else "error"
    said = f"{scheme} raises the loss of `{subject}` by 2.1 %, the margin is 2 %"
    settings = {"rule": "QA001", "level": level, "message": said, "hint": "", **more}
    interval = Interval(0.021, 0.018, 0.024)
    settings |= {"interval": interval, "margin": 0.02, "outcome": outcome}
    return Finding(subject=subject, scheme=scheme, **settings)


def held(*checks):
    audit = sample.audit()
    return replace(audit, findings=(*audit.findings, *checks))


def everything():
    """Return an audit with a verdict, draws, tasks and the tables of diagnostics."""
    half, subject = Interval(0.5, 0.4, 0.6), diagnosed.LAST
    task = TaskRow(
        subject, "gptq-4bit", "x", "arc", half, half, 100, half, 0.1, 3, 2, 4, 0.04, half,
        evidence="evidence/t.npz", evidence_sha256="ab",
    )  # fmt: skip
    around = diagnosed.audit_with(
        [*diagnosed.SERIES, diagnosed.role(subject, "down", 5.0)],
        [*diagnosed.slice_of(subject), *diagnosed.grid_of(diagnosed.HELD)],
    ).diagnostics
    labels = tuple(one.label for one in sample.series()[:3])
    changed = ChangeRow("gptq-3bit", "change", at=Interval(30e6, 28e6, 34e6))
    course = Course(  # with a change point under one scheme and none under another
        run="demo",
        unit="tokens",
        checkpoints=labels,
        positions=(10e6, 20e6, 40e6),
        confidence=0.95,
        changes=(changed, ChangeRow("rtn-3bit", "none")),
        loss_end=Span(39e6, 41e6, labels[1], labels[2]),
    )
    where = {
        "subject": subject, "scheme": "gptq-4bit", "spec": "gptq:bits=4", "documents": 40,
        "tokens": 4000, "ce": half, "relative_error": half, "absolute_change": half, "kl": half,
    }  # fmt: skip
    routing = RoutingRow(subject, "gptq-4bit", "gptq:bits=4", 0, 16, 4000, half, half)
    return replace(
        sample.repeated(),
        verdict=verdicts.three(),
        tasks=(task, replace(task, scheme="fp"), replace(task, task="mean")),
        diagnostics=replace(
            sample.repeated().diagnostics,
            phases=(course,),
            weights=(diagnosed.WEIGHT,),
            sensitivity=diagnosed.parts_of(subject),
            curvature=around.curvature,
            plane=around.plane,
            strata=(StratumRow(stratum="web", **where),),
            positions=(PositionRow(first=0, last=255, **where),),
            roles=(RoleRow(role="user", **where),),
            routing=(routing, replace(routing, block=1)),
            skipped=(NotDiagnosed(subject, "curvature", "out of memory"),),
        ),
    )
