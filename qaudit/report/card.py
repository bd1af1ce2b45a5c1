"""`card.md`: an audit for a busy reader, a pure function of the audit.

The verdict comes first, one table, then what it rests on; the long tables are folded. The card
stands between two markers, so that a later card can take its place inside a README. Whole
sections are left out, the longest and least needed first, where the card would not fit into a
pull request comment, and the card says which.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

from tabulate import tabulate

from qaudit.report import sentences
from qaudit.report.format import NOT_MEASURED, count, loss, percent, plural, printable, size, spread
from qaudit.report.markdown import cell, code, folded, plain, prose
from qaudit.report.noise import noise_section
from qaudit.report.series import pictures
from qaudit.report.soups import soup_section
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, Audit, Finding, Recipe, Score

BEGIN, END = "<!-- qaudit:begin -->", "<!-- qaudit:end -->"
LIMIT_NBYTES = 60_000
PERMISSIONS = {"pickle": "--allow-pickle", "remote_code": "--trust-remote-code"}


@dataclass(frozen=True)
class Section:
    """A part of the card; the one with the highest number goes first when room is short."""

    title: str
    body: str
    expendable: int = 0


def render(audit: Audit) -> str:
    """Render the card."""
    view = View(audit)
    sections = [section for section in _sections(view) if section.body]
    left_out: list[str] = []
    while len(text := _join(view, sections, left_out).encode()) > LIMIT_NBYTES:
        victim = max(sections, key=lambda s: (s.expendable, len(s.body)))
        if victim.expendable == 0:
            break
        sections.remove(victim)
        left_out.append(victim.title)
    return text.decode()


def _sections(view: View) -> list[Section]:
    return [
        Section("Ship", " ".join(map(prose, sentences.pick_reasons(view)))),
        Section("Relative error", _table(view)),
        Section("Along the series", _pictures(view), 1),
        Section("Soup against ingredients", soup_section(view), 2),
        Section("Multiple choice", _tasks(view), 3),
        Section("Noise", noise_section(view), 2),
        Section("Findings", _findings(view), 1),
        Section("Every measurement", _measurements(view), 9),
        Section("Notes", _notes(view), 4),
        Section("Not measured", _skipped(view), 3),
        Section("Protocol and environment", _protocol(view), 1),
        Section("Reproduce", _reproduce(view)),
    ]


def _join(view: View, sections: list[Section], left_out: list[str]) -> str:
    targets = ", ".join(view.audit.plan.recipe.targets)
    head = [BEGIN, f"## Quantization audit of {plain(targets)}"]
    head.append(f"**{prose(sentences.verdict(view))}**")
    body = [f"### {section.title}\n\n{section.body}" for section in sections]
    if left_out:
        body.append(f"Left out for length, see `audit.json`: {', '.join(left_out)}.")
    return "\n\n".join([*head, *body, END]) + "\n"


# --------------------------------------------------------------------- the table


def _table(view: View) -> str:
    if not view.subjects:
        return ""
    best = {s: view.best(s, tuple(x.label for x in view.subjects)) for s in _columns(view)}
    rows = [
        [cell(subject.label), *(_cell(view, subject.label, s, best[s]) for s in _columns(view))]
        for subject in view.subjects
    ]
    header = ["", "loss, full precision", *(plain(s) for s in view.schemes)]
    table = tabulate(rows, header, tablefmt="pipe", disable_numparse=True, stralign="left")
    legend = (
        f"What quantization adds to the loss, in % of it, with its interval; "
        f"`{NOT_MEASURED}` not measured, `0` no change at all. "
        "**Bold**: the lowest loss of its column, by estimate: the best one under that scheme."
        f"{_all_at_once(view)}"
    )
    return f"{legend}\n\n{table}"


def _all_at_once(view: View) -> str:
    """Say how wide the intervals would be if all of them had to hold together."""
    from qaudit.core.statistics import MINIMUM_DOCUMENTS, widening  # loads scipy

    cells = sum(
        score is not None and score.relative_error is not None
        for subject in view.subjects
        for score in (view.score(subject.label, scheme) for scheme in view.schemes)
    )
    if cells < 2 or view.documents < MINIMUM_DOCUMENTS:
        return ""
    factor = widening(view.audit.plan.recipe.confidence, cells, view.documents)
    return (
        f" Each interval holds by itself; for all {cells} to hold at once, read them "
        f"{factor:.1f} times as wide."
    )


def _columns(view: View) -> tuple[str, ...]:
    return (FULL_PRECISION, *view.schemes)


def _cell(view: View, subject: str, scheme: str, best: str | None) -> str:
    score = view.score(subject, scheme)
    if score is None:
        return NOT_MEASURED
    if scheme == FULL_PRECISION or score.relative_error is None:
        text = loss(score.ce) if scheme == FULL_PRECISION else f"loss {loss(score.ce)}"
    else:
        text = percent(score.relative_error).replace(" [", "<br>[")
    head, _, bounds = text.partition("<br>")
    return (f"**{head}**" if subject == best else head) + (f"<br>{bounds}" if bounds else "")


def _pictures(view: View) -> str:
    shown = [f"![{alt}](plots/{name}.svg)" for name, alt in pictures(view)]
    return "\n\n".join(filter(None, [prose(sentences.trajectory(view)), *shown]))


def _tasks(view: View) -> str:
    """Show accuracy on choices, and the drop as a share of what was left to get wrong."""
    rows = [
        [
            code(task.subject),
            plain(task.scheme),
            percent(task.accuracy),
            NOT_MEASURED if task.accuracy_drop is None else percent(task.accuracy_drop),
            str(task.items),
        ]
        for task in view.audit.tasks
    ]
    if not rows:
        return ""
    head = ["subject", "scheme", "accuracy, %", "drop / (1 - accuracy), %", "items"]
    table = tabulate(rows, head, tablefmt="pipe", disable_numparse=True)
    return folded(plural(len(rows), "score"), table)


# --------------------------------------------------------------------- the small print


def _findings(view: View) -> str:
    by_rule: dict[str, list[Finding]] = {}
    for finding in view.audit.findings:
        if finding.rule != "QA003" and not (finding.outcome == "pass" and finding.margin):
            by_rule.setdefault(finding.rule, []).append(finding)
    return "\n".join(line for found in by_rule.values() for line in _lines(found))


def _lines(found: list[Finding], shown: int = 3) -> list[str]:
    """List the worst findings of a rule, and count the others."""
    worst = sorted(found, key=lambda f: -abs(f.interval.estimate) if f.interval else 0.0)
    lines = [
        f"- **{f.rule}** {prose(f.message)}." + (f" *{prose(f.hint)}.*" if f.hint else "")
        for f in worst[:shown]
    ]
    more = len(found) - shown
    return lines + ([f"- **{found[0].rule}** and {more} more in `audit.json`."] if more > 0 else [])


def _measurements(view: View) -> str:
    if not view.audit.scores:
        return ""
    header = ["subject", "scheme", "loss", "relative error, %", "perplexity", "bits per byte"]
    header += ["bits per weight", "seed"][: 1 + (view.draws > 1)]
    rows = [_measurement(score)[: len(header)] for score in view.audit.scores]
    table = tabulate(rows, header, tablefmt="pipe", disable_numparse=True, stralign="left")
    specs = {s.scheme: s.spec for s in view.audit.scores if s.scheme != FULL_PRECISION}
    forms = "\n".join(f"- {code(spec)}" for spec in specs.values())
    return folded(f"{len(rows)} measurements", f"{table}\n\nIn full:\n\n{forms}")


def _measurement(score: Score) -> list[str]:
    error = NOT_MEASURED if score.relative_error is None else percent(score.relative_error)
    bits = NOT_MEASURED if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}"
    return [
        cell(score.subject),
        plain(score.scheme),
        spread(score.ce),
        error,
        f"{score.perplexity:.4g}",
        bits,
        f"{score.bits_per_weight:.2f}",
        str(score.calibration_seed),
    ]


def _notes(view: View) -> str:
    said = [f.message for f in view.audit.findings if f.rule == "QA003"]
    lines = [f"- {prose(text)}" for text in (*said, *view.audit.plan.notes)]
    return folded(plural(len(lines), "note"), "\n".join(lines)) if lines else ""


def _skipped(view: View) -> str:
    return "\n".join(
        f"- {code(s.subject)}" + (f" under {plain(s.scheme)}" if s.scheme else "")
        + f": {prose(s.reason)}"
        for s in view.audit.skipped
    )  # fmt: skip


def _protocol(view: View) -> str:
    audit, plan = view.audit, view.audit.plan
    tokens = max((score.tokens for score in audit.scores), default=0)
    rows = [
        ("evaluated on", f"{plural(view.documents, view.unit)}, {tokens:,} tokens"),
        *((key.replace("_", " "), value) for key, value in audit.protocol.items()),
        ("model", f"{count(plan.parameters)} parameters, {plan.blocks} blocks"),
        ("computed in", f"{plan.dtype} on {plan.device}"),
        ("memory", sentences.memory(view)),
        ("time", sentences.seconds(view)),
        ("qaudit", audit.qaudit),
        *_flat(audit.environment),
    ]
    shown = [(plain(key), plain(_text(value))) for key, value in rows if value is not None]
    table = tabulate(shown, ["", ""], tablefmt="pipe", disable_numparse=True, stralign="left")
    return f"{prose(sentences.noise(view))}\n\n{folded('Protocol and environment', table)}"


def _flat(environment: dict[str, Any]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in environment.items():
        if isinstance(value, dict):
            rows += [(str(name), inner) for name, inner in value.items()]
        elif key.endswith("_nbytes") and isinstance(value, int):
            rows.append((key.removesuffix("_nbytes").replace("_", " "), size(value)))
        elif key != "qaudit":
            rows.append((key.replace("_", " "), value))
    return rows


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_text(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(_text(inner) for inner in value)
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


# --------------------------------------------------------------------- once more


def _reproduce(view: View) -> str:
    version = f"pip install qaudit=={view.audit.qaudit}\n" if view.audit.qaudit else ""
    return f"```sh\n{version}{_command(view)}\n```"


def _command(view: View) -> str:
    """Return the command line of an audit, with the permissions that its checkpoints needed."""
    plan = view.audit.plan
    needs = {need for subject in plan.subjects for c, _ in subject.members for need in c.requires}
    return command(plan.recipe, needs)


def command(recipe: Recipe, needs: Collection[str] = ()) -> str:
    """Return the command line that asks for a recipe; `needs` are what it has to permit."""
    parts = ["qaudit", "scan", *recipe.targets, "--schemes", ",".join(recipe.schemes)]
    parts += [part for soup in recipe.soups for part in ("--soup", soup)]
    parts += [part for name in recipe.checkpoints for part in ("--checkpoints", name)]
    parts += [part for name in recipe.stages for part in ("--stage", name)]
    parts += ["--diagnose", ",".join(recipe.diagnostics)] if recipe.diagnostics else []
    asked = {"targets", "schemes", "soups", "checkpoints", "stages", "confidence", "schedule"}
    asked |= {"diagnostics"}
    for field in fields(recipe):
        value = getattr(recipe, field.name)
        if field.name in asked or value == field.default:
            continue
        option = f"--{field.name.replace('_', '-')}"
        parts += [option] if value is True else [option, str(value)]
    parts += [flag for need, flag in PERMISSIONS.items() if need in needs]
    return " ".join(shlex.quote(printable(part)) for part in parts)
