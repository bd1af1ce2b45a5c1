"""Sections of the page: findings, what is noise, accuracy on tasks, how it was measured.

Of findings, what a policy objects to, what is ignored, and everything else. Of tasks, a table for
what ships of each bit class, and one row for everything else. Of the protocol, the command that
measures an audit again; notes; what was not measured.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from qaudit.report import document as doc
from qaudit.report.format import (
    NOT_MEASURED,
    count,
    duration,
    listing,
    or_dash,
    percent,
    plural,
    points,
    printable,
    size,
)
from qaudit.report.series import picture
from qaudit.report.views import ABOUT_A_POLICY, View
from qaudit.settings import settings_of, words_of
from qaudit.types import (
    CODES,
    FULL_PRECISION,
    AuditRecord,
    Finding,
    Interval,
    Noise,
    Recipe,
    TaskRow,
)

SHOWN = 3  # of one rule, before they are counted
SHOWN_OF_POLICY = 12


def policy_section(view: View) -> tuple[doc.Block, ...]:
    """List what a policy objects to, breaches first; checks that pass are only counted."""
    objections = [f for f in _objections(view) if f.level != "info"]
    objections.sort(key=lambda f: (f.outcome != "fail", f.level != "error"))
    return doc.bullets_of(_items(objections, SHOWN_OF_POLICY))


def ignores_section(view: View) -> tuple[doc.Block, ...]:
    """List the breaches that are ignored, with a reason."""
    return doc.bullets_of([_item(f) for f in _objections(view) if f.level == "info"])


def _objections(view: View) -> list[Finding]:
    return [f for f in view.audit.findings if f.rule in ABOUT_A_POLICY and f.outcome != "pass"]


def findings_section(view: View) -> tuple[doc.Block, ...]:
    """List the findings that are no check of a policy and no note, the worst of each rule."""
    by_rule: dict[str, list[Finding]] = {}
    for finding in view.audit.findings:
        settled = finding.outcome == "pass" and finding.margin
        if finding.rule not in {"QA003", *ABOUT_A_POLICY} and not settled:
            by_rule.setdefault(finding.rule, []).append(finding)
    items: list[doc.Inline] = []
    for findings in by_rule.values():
        findings.sort(key=lambda f: -abs(f.interval.estimate) if f.interval else 0.0)
        items += _items(findings, SHOWN)
    return doc.bullets_of(items)


def codes(view: View) -> tuple[doc.Block, ...]:
    rules = sorted({f.rule for f in view.audit.findings if f.rule in CODES})
    items = [f"`{rule}` {CODES[rule].title}. {CODES[rule].help}" for rule in rules]
    return (doc.fold("What the codes mean", doc.bullets(*items)),) if items else ()


def _items(findings: Sequence[Finding], most: int) -> list[doc.Inline]:
    items = [_item(finding) for finding in findings[:most]]
    if (more := len(findings) - most) > 0:
        rule = doc.strong(findings[0].rule)
        items.append((*rule, *doc.prose(f" and {more} more in `audit.json`.")))
    return items


def _item(finding: Finding) -> doc.Inline:
    hint = doc.emphasis(f"{finding.hint}.") if finding.hint else ()
    rule = doc.strong(doc.words(finding.rule))
    return doc.paragraph(rule, f"{finding.message}.", hint).runs


COLUMNS: doc.Columns[Noise] = {
    "subject": lambda noise: doc.name_cell(noise.subject),
    "scheme": lambda noise: noise.scheme,
    "draws": lambda noise: str(noise.draws),
    "added loss, %": lambda noise: or_dash(noise.interval, percent),
    "documents": lambda noise: or_dash(noise.documents, points),
    "one draw": lambda noise: or_dash(noise.draw, points),
    "arithmetic": lambda noise: or_dash(noise.numerical, points),
}


def noise_section(view: View) -> tuple[doc.Block, ...]:
    if not view.audit.measurements:
        return ()
    labels = {one.runner_up for one in view.classes} | set(view.of_interest)
    rows = [
        noise
        for noise in view.audit.diagnostics.noise
        if noise.subject in labels and noise.scheme != FULL_PRECISION
    ]
    blocks: list[doc.Block] = [doc.bullets(*_sources(view))]
    if rows:
        budget = (
            "What makes added losses uncertain, in percentage points: the standard error over "
            f"{view.unit}s, the standard deviation over calibration draws, and the change by "
            "arithmetic alone."
        )
        blocks += [doc.paragraph(budget), doc.table_of(rows, COLUMNS)]
    return tuple(blocks)


def _sources(view: View) -> Iterator[str]:
    yield (
        f"Documents: intervals are at {100 * view.audit.plan.recipe.confidence:g} %, paired on the "
        f"same {plural(view.documents, view.unit)}."
    )
    for score in filter(None, (view.score(*cell) for cell in view.ships)):
        needed = {"added loss": score.documents_for_loss, "KL divergence": score.documents_for_kl}
        counts = [f"{n:,} for its {name}" for name, n in needed.items() if n is not None]
        if counts:
            yield (
                f"Documents that narrow the interval of `{score.subject}` at {score.scheme} to "
                f"10 % either way: {listing(counts)}; {score.documents:,} were measured."
            )
    if (smallest := view.audit.plan.detectable_relative_error) is not None:
        yield (
            f"In four of five cases these documents detect an added loss of "
            f"{100 * smallest:.2g} %; half of it needs about four times as many documents."
        )
    yield "Calibration: in no interval. Another calibration would write another file."
    for row in view.audit.diagnostics.noise:
        if row.draw is not None and (row.subject, row.scheme) in view.ships:
            yield (
                f"It would move the added loss of `{row.subject}` at {row.scheme} by "
                f"{points(row.draw)} points (the standard deviation of {row.draws} draws)."
            )
    moved = []
    for scheme, parts in _by_scheme(view, "numerical").items():
        name = "full precision" if scheme == FULL_PRECISION else scheme
        mean, subjects = math.hypot(*parts) / math.sqrt(len(parts)), plural(len(parts), "subject")
        moved.append(f"{name} {points(max(parts))} and {points(mean)} ({subjects})")
    if not moved:
        yield f"Arithmetic: `{NOT_MEASURED}`, not measured and in no interval."
        return
    yield (
        "Arithmetic: in no interval. What enters each block moved as far as rounding in one block "
        "moves it, and other batches, changed the added loss, in percentage points (the most, "
        f"and the root mean square): {listing(moved)}."
    )


def divergence_floor(view: View) -> str:
    """Return by how much arithmetic alone moves KL divergence; nothing if it was not measured."""
    floors, agreement = _by_scheme(view, "kl_floor"), _by_scheme(view, "top1_floor")
    if FULL_PRECISION not in floors or FULL_PRECISION not in agreement:
        return ""
    own, lost = max(floors.pop(FULL_PRECISION)), max(agreement[FULL_PRECISION])
    text = (
        "Arithmetic alone, measured as the noise section describes: full precision diverges from "
        f"itself by at most {own:.1e} nats per token, and {points(lost)} % of its likeliest "
        "tokens change."
    )
    shifts = [f"{scheme} by {max(parts):.1e}" for scheme, parts in floors.items()]
    if shifts:
        text += f" KL divergence of schemes changed by at most: {listing(shifts)}."
    return text


def _by_scheme(view: View, name: str) -> dict[str, list[float]]:
    parts: dict[str, list[float]] = {}
    for row in view.audit.diagnostics.noise:
        value = getattr(row, name)
        if value is not None:
            parts.setdefault(row.scheme, []).append(float(value))
    return parts


_SHIPS_COLUMNS = (
    "task", "full precision, %", "quantized, %", "drop, points", "drop / (1 - accuracy), %",
    "flips, %", "right to wrong", "wrong to right", "p", "margins, times", "items",
)  # fmt: skip
_SCORE_COLUMNS: doc.Columns[TaskRow] = {
    "subject": lambda row: doc.name_cell(row.subject),
    "scheme": lambda row: row.scheme,
    "task": lambda row: _task_name(row),
    "accuracy, %": lambda row: percent(row.accuracy),
    "drop / (1 - accuracy), %": lambda row: or_dash(row.accuracy_drop, percent),
    "items": lambda row: str(row.items),
}
_ACCURACY_COLUMNS = (
    "subject", "scheme", "task", "full precision, %", "quantized, %", "drop, points", "items",
)  # fmt: skip
_MOST_CELLS = 6
_ABOUT = (
    "Drops are paired: the same items under both. A flip is an answer that went from right to "
    "wrong or back; p is McNemar's test. Margins are the median factor by which the lead of full "
    "precision's answer changes: 1 is no change, below 0 another answer."
)


def tasks_section(view: View) -> tuple[doc.Block, ...]:
    """Return a table for what ships of each class, and one row for everything else."""
    by_cell = _by_cell(view)
    if not by_cell:
        return ()
    tables = [
        doc.fold(
            f"{subject} at {scheme}, {or_dash(compared[-1].drop, percent)} points lost",
            doc.table(_SHIPS_COLUMNS, (_task_row(row, full) for row in compared)),
        )
        for subject, scheme, full in _shipping(view, by_cell)
        if (compared := [row for row in by_cell[subject, scheme] if row.drop is not None])
    ]
    sources = dict.fromkeys((row.task, row.imported) for row in view.audit.tasks if row.imported)
    names = ", ".join(f"`{task}` ({source})" for task, source in sources)
    text = (
        f"Imported: {names}. Another tool generated and marked these answers, by weights that "
        "qaudit did not see; items are paired by a hash of each item and its prompt."
    )
    whole = [rows[-1] for rows in by_cell.values()]  # the mean, or the only task
    scores = doc.table_of(whole, _SCORE_COLUMNS)
    return (
        *tables,
        *([doc.paragraph(_ABOUT)] if tables else []),
        *([doc.paragraph(text)] if sources else []),
        *picture(view, "accuracy"),
        doc.fold(f"{plural(len(whole), 'score')}, of every subject", scores),
    )


def accuracies_section(view: View) -> tuple[doc.Block, ...]:
    """Return the accuracies of what ships, for a terminal."""
    by_cell = _by_cell(view)
    cells = _shipping(view, by_cell) or [(*cell, {}) for cell in by_cell]
    rows = [
        (doc.name_cell(subject), scheme, *_task_row(row, full)[:4], str(row.items))
        for subject, scheme, full in cells[:_MOST_CELLS]
        for row in by_cell[subject, scheme]
    ]
    return (doc.table(_ACCURACY_COLUMNS, rows),) if rows else ()


def _by_cell(view: View) -> dict[tuple[str, str], list[TaskRow]]:
    by_cell: dict[tuple[str, str], list[TaskRow]] = {}
    for row in view.audit.tasks:
        by_cell.setdefault(row.cell, []).append(row)
    return by_cell


def _shipping(
    view: View, by_cell: dict[tuple[str, str], list[TaskRow]]
) -> list[tuple[str, str, dict[str, Interval]]]:
    """Return the cells that ship, if tasks were scored, and each task in full precision."""
    return [
        (subject, scheme, {r.task: r.accuracy for r in by_cell.get((subject, FULL_PRECISION), [])})
        for subject, scheme in view.ships
        if (subject, scheme) in by_cell and scheme != FULL_PRECISION
    ]


def _task_row(row: TaskRow, full: dict[str, Interval]) -> tuple[str | doc.Cell, ...]:
    intervals = (full.get(row.task), row.accuracy, row.drop, row.accuracy_drop)
    return (
        doc.name_cell(_task_name(row)),
        *(doc.interval_cell(interval, percent) for interval in intervals),
        or_dash(row.flips, lambda part: f"{100 * part:.1f}"),
        or_dash(row.right_to_wrong, str),
        or_dash(row.wrong_to_right, str),
        or_dash(row.p_value, "{:.2g}".format),
        doc.interval_cell(
            row.margin_factor, lambda i: f"{i.estimate:.2f} [{i.low:.2f}, {i.high:.2f}]"
        ),
        str(row.items),
    )


def _task_name(row: TaskRow) -> str:
    return f"{row.task}, imported" if row.imported else row.task


# ------------------------------------------------------------------ how it was measured

PLAN = "plan.json"  # beside the audit: saved/parts.py
PERMISSIONS = {"pickle": "--allow-pickle", "remote_code": "--trust-remote-code"}
_FIRST = ("schemes", "soups", "checkpoints", "diagnostics")
_JOINED = ("schemes", "bits", "tasks", "diagnostics")


def notes_section(view: View) -> tuple[doc.Block, ...]:
    notes = [f.message for f in view.audit.findings if f.rule == "QA003"]
    return doc.bullets_of([*notes, *view.audit.plan.notes])


def skipped_section(view: View) -> tuple[doc.Block, ...]:
    skipped = view.audit.skipped
    return doc.bullets_of(
        [f"`{s.subject}`{(s.scheme and f' under {s.scheme}') or ''}: {s.reason}" for s in skipped]
    )


def protocol_section(view: View) -> tuple[doc.Block, ...]:
    audit, plan = view.audit, view.audit.plan
    tokens = max((row.tokens for row in audit.measurements), default=0)
    peak, before = (audit.environment.get(f"memory_{k}_nbytes") for k in ("peak", "baseline"))
    used = "peak not measured"
    if isinstance(peak, int) and isinstance(before, int):
        used = f"{size(max(0, peak - before))} measured"
    spent = duration(sum(score.seconds for score in audit.measurements))
    planned = f"{duration(plan.seconds_low)} to {duration(plan.seconds_high)}"
    rows: list[tuple[str, Any]] = [
        ("evaluated on", f"{plural(view.documents, view.unit)}, {tokens:,} tokens"),
        *((key.replace("_", " "), value) for key, value in audit.protocol.items()),
        ("model", f"{count(plan.parameters)} parameters, {plan.blocks} blocks"),
        ("computed in", f"{plan.dtype} on {plan.device}"),
        ("memory", f"{size(plan.nbytes_memory)} planned above the libraries, {used}"),
        ("time", f"{spent} ({planned} planned)"),
        ("qaudit", audit.qaudit),
    ]
    for key, value in audit.environment.items():
        if isinstance(value, dict):
            rows += [(str(name), inner) for name, inner in value.items()]
        elif key.endswith("_nbytes") and isinstance(value, int):
            rows.append((key.removesuffix("_nbytes").replace("_", " "), size(value)))
        elif key != "qaudit":
            rows.append((key.replace("_", " "), value))
    cells = ((key, _text(value)) for key, value in rows if value is not None)
    return (doc.table(("", ""), cells),)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_text(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(_text(inner) for inner in value)
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def reproduce_section(view: View) -> tuple[doc.Block, ...]:
    audit, plan = view.audit, view.audit.plan
    again, lines = rescan(audit), []
    if "dev" in audit.qaudit:  # a version between releases is on no index
        lines = [f"# measured with qaudit {printable(audit.qaudit)}, which is no release"]
    elif audit.qaudit:
        lines = [f"pip install {shlex.quote(printable(f'qaudit-llm=={audit.qaudit}'))}"]
    if plan.traffic is None:
        return (doc.CodeBlock("\n".join([*lines, again]), "sh"),)
    pinned = " ".join(["qaudit", "scan", PLAN, *_permitted(_needs(audit))])
    return (
        doc.CodeBlock("\n".join([*lines, pinned]), "sh"),
        doc.paragraph(
            "The plan beside the audit pins every checkpoint and text to the commit that was "
            "measured. Without it:"
        ),
        doc.CodeBlock(again, "sh"),
    )


def rescan(audit: AuditRecord, **changed: Any) -> str:
    """Return the command line that measures an audit again, with some settings changed."""
    used = {"device": audit.plan.device, "dtype": audit.plan.dtype}
    return command(audit.plan.recipe, _needs(audit), **{**used, **changed})


def _needs(audit: AuditRecord) -> set[str]:
    members = [c for subject in audit.plan.subjects for c, _ in subject.members]
    return {need for checkpoint in members for need in checkpoint.requires}


def command(recipe: Recipe, needs: Collection[str] = (), **used: Any) -> str:
    """Return the command line of a recipe.

    `needs` are what it has to permit, `used` settings that the plan has decided.
    """
    settings = settings_of(Recipe)
    parts = ["qaudit", "scan", *recipe.targets]
    for name in dict.fromkeys((*_FIRST, *settings)):
        entry, value = settings[name], used.get(name, getattr(recipe, name))
        if value != entry.default or name == "schemes":
            value = json.dumps(value) if isinstance(value, dict) else value
            value = ",".join(value) if entry.name in _JOINED else value
            values = value if isinstance(value, tuple) else (value,)
            parts += (word for each in values for word in words_of(entry, each))
    return " ".join(shlex.quote(printable(part)) for part in [*parts, *_permitted(needs)])


def _permitted(needs: Collection[str]) -> list[str]:
    return [flag for need, flag in PERMISSIONS.items() if need in needs]
