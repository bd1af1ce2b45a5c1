"""Sections of the page: findings of rules, what is noise, and accuracy on tasks.

Of findings, what a policy objects to, what is ignored, and everything else. Of tasks, a table for
what ships of each bit class, and one row for everything else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from qaudit.report import document as doc
from qaudit.report.format import NOT_MEASURED, listing, or_dash, percent, plural, points
from qaudit.report.series import picture
from qaudit.report.views import ABOUT_A_POLICY, View, is_ignored
from qaudit.types import CODES, FULL_PRECISION, ClassVerdict, Finding, Interval, Noise, TaskRow

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
    return (doc.fold("What the codes mean", doc.bullets(*items)),) if items else ()


def _list(items: Sequence[doc.Inline]) -> tuple[doc.Block, ...]:
    return (doc.List(tuple(items)),) if items else ()


def _worst(findings: list[Finding]) -> list[doc.Inline]:
    return _items(
        sorted(findings, key=lambda f: -abs(f.interval.estimate) if f.interval else 0.0), SHOWN
    )


def _items(findings: Sequence[Finding], most: int) -> list[doc.Inline]:
    items = [_item(finding) for finding in findings[:most]]
    more = len(findings) - most
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


COLUMNS = doc.columns(
    "subject", "scheme", "draws", "added loss, %", "documents", "one draw", "arithmetic"
)


def noise_section(view: View) -> tuple[doc.Block, ...]:
    if not view.audit.measurements:
        return ()
    rows = [row for row in view.audit.diagnostics.noise if row.subject in _shown(view)]
    blocks: list[doc.Block] = [doc.bullets(*_sources(view))]
    quantized = [row for row in rows if row.scheme != FULL_PRECISION]
    if quantized:
        blocks.append(doc.paragraph(_budget(view)))
        blocks.append(doc.TableBlock(COLUMNS, tuple(map(_noise_row, quantized))))
    return tuple(blocks)


def _shown(view: View) -> set[str]:
    """Return the last checkpoint and what decides."""
    classes = view.audit.verdict.classes if view.audit.verdict else ()
    labels = {
        label for decision in classes for label in (decision.subject, decision.runner_up) if label
    }
    return labels | ({view.last.label} if view.last else set())


def _noise_row(noise: Noise) -> doc.TableRow:
    cells = [
        doc.name_cell(noise.subject),
        *map(
            doc.cell,
            (
                noise.scheme,
                str(noise.draws),
                or_dash(noise.interval, percent),
                or_dash(noise.documents, points),
                or_dash(noise.draw, points),
                or_dash(noise.numerical, points),
            ),
        ),
    ]
    return doc.TableRow(tuple(cells))


def _sources(view: View) -> list[str]:
    level = f"{100 * view.audit.plan.recipe.confidence:g} %"
    return [
        f"Documents: intervals are at {level}, paired on the same "
        f"{plural(view.documents, view.unit)}.",
        *_power(view),
        *_another_calibration(view),
        *_arithmetic(view),
    ]


def _power(view: View) -> Iterator[str]:
    for decision in view.verdict.classes if view.verdict else ():
        yield from _documents_needed(view, decision)
    smallest = view.audit.plan.detectable_relative_error
    if smallest is not None:
        yield (
            f"In four of five cases these documents detect an added loss of "
            f"{100 * smallest:.2g} %; half of it needs about four times as many documents."
        )


def _documents_needed(view: View, decision: ClassVerdict) -> Iterator[str]:
    """Yield how many documents make the intervals of what ships narrow, of each measure."""
    score = (
        view.score(decision.subject, decision.scheme)
        if decision.subject and decision.scheme
        else None
    )
    if score is None:
        return
    needed = {"added loss": score.documents_for_loss, "KL divergence": score.documents_for_kl}
    parts = [f"{count:,} for its {name}" for name, count in needed.items() if count is not None]
    if parts:
        yield (
            f"Documents that narrow the interval of `{decision.subject}` at {decision.scheme} to "
            f"10 % either way: {listing(parts)}; {score.documents:,} were measured."
        )


def _another_calibration(view: View) -> Iterator[str]:
    yield "Calibration: in no interval. Another calibration would write another file."
    classes = view.verdict.classes if view.verdict else ()
    cells = dict.fromkeys((decision.subject, decision.scheme) for decision in classes)
    rows = {(row.subject, row.scheme): row for row in view.audit.diagnostics.noise}
    for row in (rows[cell] for cell in cells if cell in rows):
        if row.draw is not None:
            yield (
                f"It would move the added loss of `{row.subject}` at {row.scheme} by "
                f"{points(row.draw)} points (the standard deviation of {row.draws} draws)."
            )


def _arithmetic(view: View) -> Iterator[str]:
    """Yield how far arithmetic alone moves losses, which no interval covers."""
    moved = list(_moved(view, "numerical"))
    if not moved:
        yield f"Arithmetic: `{NOT_MEASURED}`, not measured and in no interval."
        return
    yield (
        "Arithmetic: in no interval. What enters each block moved as far as rounding in one block "
        "moves it, and other batches, changed the added loss, in percentage points (the most, "
        f"and the root mean square): {listing(moved)}."
    )


def _moved(view: View, name: str) -> Iterator[str]:
    for scheme, parts in _by_scheme(view, name).items():
        called = "full precision" if scheme == FULL_PRECISION else scheme
        yield (
            f"{called} {points(max(parts))} and {points(_root_mean_square(parts))} "
            f"({plural(len(parts), 'subject')})"
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


def _root_mean_square(parts: Sequence[float]) -> float:
    return math.hypot(*parts) / math.sqrt(len(parts))


def _budget(view: View) -> str:
    return (
        "What makes added losses uncertain, in percentage points: the standard error over "
        f"{view.unit}s, the standard deviation over calibration draws, and the change by "
        "arithmetic alone."
    )


MEAN = "mean"
_SHIPS_COLUMNS = doc.columns(
    "task", "full precision, %", "quantized, %", "drop, points", "drop / (1 - accuracy), %",
    "flips, %", "right to wrong", "wrong to right", "p", "margins, times", "items",
)  # fmt: skip
_SCORE_COLUMNS = doc.columns(
    "subject", "scheme", "task", "accuracy, %", "drop / (1 - accuracy), %", "items"
)
_ACCURACY_COLUMNS = doc.columns(
    "subject", "scheme", "task", "full precision, %", "quantized, %", "drop, points", "items"
)
_MOST_CELLS = 6
_IMPORTED = "imported"
_ABOUT = (
    "Drops are paired: the same items under both. A flip is an answer that went from right to "
    "wrong or back; p is McNemar's test. Margins are the median factor by which the lead of full "
    "precision's answer changes: 1 is no change, below 0 another answer."
)


def tasks_section(view: View) -> tuple[doc.Block, ...]:
    rows = view.audit.tasks
    if not rows:
        return ()
    by_cell: dict[tuple[str, str], list[TaskRow]] = {}
    for row in rows:
        by_cell.setdefault((row.subject, row.scheme), []).append(row)
    tables = [
        block
        for subject, scheme in _shipping(view, by_cell)
        if (
            block := _task_table(
                by_cell[subject, scheme], by_cell.get((subject, FULL_PRECISION), [])
            )
        )
    ]
    whole = [some[-1] for some in by_cell.values()]  # the mean, or the only task
    every = doc.TableBlock(_SCORE_COLUMNS, tuple(map(_whole_row, whole)))
    about = (doc.paragraph(_ABOUT),) if tables else ()
    return (
        *tables,
        *about,
        *_imported(rows),
        *picture(view, "accuracy"),
        doc.fold(f"{plural(len(whole), 'score')}, of every subject", every),
    )


def _imported(rows: Sequence[TaskRow]) -> tuple[doc.Block, ...]:
    sources = dict.fromkeys((row.task, row.imported) for row in rows if row.imported)
    if not sources:
        return ()
    names = ", ".join(f"`{task}` ({source})" for task, source in sources)
    return (
        doc.paragraph(
            f"Imported: {names}. Another tool generated and marked these answers, by weights that "
            "qaudit did not see; items are paired by a hash of each item and its prompt."
        ),
    )


def _task_name(row: TaskRow) -> str:
    return f"{row.task}, {_IMPORTED}" if row.imported else row.task


def accuracies_section(view: View) -> tuple[doc.Block, ...]:
    by_cell: dict[tuple[str, str], list[TaskRow]] = {}
    for row in view.audit.tasks:
        by_cell.setdefault((row.subject, row.scheme), []).append(row)
    cells = _shipping(view, by_cell) or list(by_cell)
    rows = []
    for subject, scheme in cells[:_MOST_CELLS]:
        full = {row.task: row.accuracy for row in by_cell.get((subject, FULL_PRECISION), [])}
        for row in by_cell[subject, scheme]:
            percents = (_percent(part) for part in (full.get(row.task), row.accuracy, row.drop))
            texts = (row.scheme, _task_name(row))
            rows.append(doc.row(doc.name_cell(subject), *texts, *percents, str(row.items)))
    return (doc.TableBlock(_ACCURACY_COLUMNS, tuple(rows)),) if rows else ()


def _shipping(view: View, known: dict[tuple[str, str], list[TaskRow]]) -> list[tuple[str, str]]:
    """Return the cells that ship, or the pick, if tasks were scored."""
    cells = [
        (decision.subject, decision.scheme)
        for decision in (view.verdict.classes if view.verdict else ())
    ]
    if not cells and view.audit.pick is not None:
        cells = [(view.audit.pick.subject, view.audit.pick.scheme)]
    return [
        (str(subject), str(scheme))
        for subject, scheme in dict.fromkeys(cells)
        if (subject, scheme) in known and scheme != FULL_PRECISION
    ]


def _task_table(rows: Sequence[TaskRow], full: Sequence[TaskRow]) -> doc.Block | None:
    before = {row.task: row.accuracy for row in full}
    compared = [row for row in rows if row.drop is not None]
    if not compared:
        return None
    last = compared[-1]
    drop = "" if last.drop is None else f", {percent(last.drop)} points lost"
    what = f"{last.subject} at {last.scheme}{drop}"
    return doc.fold(
        what,
        doc.TableBlock(
            _SHIPS_COLUMNS, tuple(_task_row(row, before.get(row.task)) for row in compared)
        ),
    )


def _task_row(row: TaskRow, before: Interval | None) -> doc.TableRow:
    return doc.row(
        doc.name_cell(_task_name(row)),
        *(_percent(part) for part in (before, row.accuracy, row.drop, row.accuracy_drop)),
        or_dash(row.flips, lambda part: f"{100 * part:.1f}"),
        or_dash(row.right_to_wrong, str),
        or_dash(row.wrong_to_right, str),
        or_dash(row.p_value, "{:.2g}".format),
        doc.interval_cell(or_dash(row.margin_factor, _factor)),
        str(row.items),
    )


def _whole_row(row: TaskRow) -> doc.TableRow:
    texts = (
        row.scheme,
        _task_name(row),
        percent(row.accuracy),
        or_dash(row.accuracy_drop, percent),
    )
    return doc.TableRow(
        (doc.name_cell(row.subject), *map(doc.cell, texts), doc.cell(str(row.items)))
    )


def _percent(interval: Interval | None) -> doc.Cell:
    value = interval.estimate if interval else None
    return doc.interval_cell(or_dash(interval, percent), value=value)


def _factor(interval: Interval) -> str:
    return f"{interval.estimate:.2f} [{interval.low:.2f}, {interval.high:.2f}]"
