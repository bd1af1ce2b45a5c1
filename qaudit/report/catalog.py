"""A whole series as a table: what each name means, the size of its files, what is selected.

A series can have a thousand rows of which a dozen matter: runs of similar rows that are not
selected are folded into one line with their steps, unless `everything` is set. Doubts about a row
are numbers that refer to sentences below the table. `-` is not known, or not checked; it is never
zero. A name that does not fit is cut in its middle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from qaudit.core.doubts import doubts_of_files
from qaudit.report.format import (
    NOT_MEASURED,
    count,
    inert,
    or_dash,
    padded,
    plural,
    printable,
    shortened,
    size,
    width_of,
    wrapped,
)
from qaudit.saved.codec import encode, text_of
from qaudit.types import Checkpoint, Finding

LEAST_FOLDED, LEAST_NAMES_FOLDED = 4, 12
SHORTEST_NAME = 12
SAME_WEIGHTS = "the same weights"
MOST_NAMES = 4
MOSTLY = 0.8  # of the steps of a fold
_IN_THE_TABLE = ("QA009", "QA011", "QA012", "QA013", "QA016")
_HEADINGS = (" ", "checkpoint", "stage", "step", "tokens", "lr", "size", "see")
_ALIGNED = "<<<>>>><"


@dataclass(frozen=True)
class Catalog:
    """A series, the labels selected of it, and findings.

    `nbytes` holds sizes of checkpoints whose files have no hashes yet.
    """

    targets: tuple[str, ...]
    checkpoints: tuple[Checkpoint, ...]
    selected: frozenset[str]
    by_default: bool = False
    nbytes: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    remarks: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()  # why checkpoints cannot be audited

    def size_of(self, checkpoint: Checkpoint) -> int | None:
        """Return the bytes of a checkpoint's weights; zero only where there are none."""
        if checkpoint.files or doubts_of_files(checkpoint.suspect):
            return checkpoint.nbytes
        return self.nbytes.get(checkpoint.label)


def render_catalog(catalog: Catalog, *, width: int | None = None, everything: bool = False) -> str:
    """Render a series as plain text; without a width no name is cut."""
    numbers: dict[str, int] = {}  # of each doubt, in the order of the rows
    same = _same(catalog.checkpoints)
    rows = [_row(catalog, c, same, numbers) for c in catalog.checkpoints]
    table = _table(rows, _folds(rows, everything=everything), width)
    also = [f"{f.rule} {f.message}" for f in catalog.findings if f.rule not in _IN_THE_TABLE]
    numbered = [f"{number} {text}" for text, number in numbers.items()]
    remarks = ["From its family's file:", *catalog.remarks] if catalog.remarks else []
    chosen = (c for c in catalog.checkpoints if c.label in catalog.selected)
    inferred = list(dict.fromkeys(note for c in chosen for note in c.notes))
    below = (catalog.refusals, [*numbered, *also], inferred, remarks)
    every = all(catalog.size_of(checkpoint) is not None for checkpoint in catalog.checkpoints)
    legend = "* selected   - not known"
    legend += "" if every else ", or not checked (`--check` reads every tree)"
    parts = [_filled(_head(catalog), width), "\n".join(table)]
    parts += ["\n".join(_filled(line, width) for line in lines) for lines in below if lines]
    return inert("\n\n".join([*parts, legend]) + "\n")


def _head(catalog: Catalog) -> str:
    with_size = sum(catalog.size_of(c) is not None for c in catalog.checkpoints)
    how = " by default" if catalog.by_default else ""
    return (
        f"{', '.join(catalog.targets)}: {plural(len(catalog.checkpoints), 'checkpoint')}, "
        f"{len(catalog.selected):,} selected{how}, {with_size:,} checked"
    )


def _filled(line: str, width: int | None) -> str:
    safe = printable(line)
    return safe if width is None else wrapped(safe, width - 2).replace("\n", "\n  ")


def _same(checkpoints: Iterable[Checkpoint]) -> dict[str, tuple[str, list[str]]]:
    """Return, by label, the labels with the same weights, or at the same commit."""
    groups: dict[tuple[str, object], list[str]] = {}
    for c in checkpoints:
        if c.files:
            groups.setdefault((SAME_WEIGHTS, c.content), []).append(c.label)
        elif c.commit:
            where = (c.ref.location, c.commit, c.ref.subfolder)
            groups.setdefault(("one commit", where), []).append(c.label)
    shared = [(what, labels) for (what, _), labels in groups.items() if len(labels) > 1]
    return {label: (what, labels) for what, labels in shared for label in labels}


def _row(
    catalog: Catalog,
    c: Checkpoint,
    same: Mapping[str, tuple[str, list[str]]],
    numbers: dict[str, int],
) -> list[str]:
    doubts = list(c.suspect)
    if c.label in same:
        what, labels = same[c.label]
        more = len(labels) - MOST_NAMES
        names = ", ".join(labels[:MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")
        doubts.insert(0, f"{what}: {names}")
    stage = c.stage or ("" if c.ingredient is None else "-")
    ingredient = "" if c.ingredient is None else f" i{c.ingredient}"
    nbytes = catalog.size_of(c)
    return [
        "*" if c.label in catalog.selected else "",
        printable(c.label),
        printable(f"{stage}{ingredient}") or NOT_MEASURED,
        or_dash(c.step, "{:,}".format),
        or_dash(c.tokens, count),
        or_dash(c.learning_rate, "{:.3g}".format),
        or_dash(nbytes, lambda nbytes: size(nbytes) if nbytes else "none"),
        ",".join(str(numbers.setdefault(text, len(numbers) + 1)) for text in doubts),
    ]


def _folds(rows: Sequence[Sequence[str]], *, everything: bool) -> dict[int, list[int]]:
    """Return the runs of rows that are alike and unselected, by their first."""
    runs: dict[int, list[int]] = {}
    if everything:
        return runs
    previous: object = None
    first = 0
    for k, row in enumerate(rows):
        kind = (row[2], row[3] == NOT_MEASURED, row[-2] == NOT_MEASURED, row[-1])
        if row[0]:
            previous = None
        elif kind == previous:
            runs[first].append(k)
        else:
            first, previous = k, kind
            runs[first] = [k]
    least = {k: LEAST_FOLDED if rows[k][3] != NOT_MEASURED else LEAST_NAMES_FOLDED for k in runs}
    return {first: run for first, run in runs.items() if len(run) >= least[first]}


def _table(
    rows: Sequence[Sequence[str]], folds: Mapping[int, list[int]], width: int | None
) -> list[str]:
    inside = {k for run in folds.values() for k in run}
    shown = [row for k, row in enumerate(rows) if k not in inside]
    widths = [max(map(width_of, column)) for column in zip(_HEADINGS, *shown, strict=True)]
    if width is not None:
        rest = sum(widths) - widths[1] + len(widths) - 1
        widths[1] = min(widths[1], max(SHORTEST_NAME, width - rest))
    lines = [_line(_HEADINGS, widths)]
    for k, row in enumerate(rows):
        if k in folds:
            lines.append(_folded([rows[n] for n in folds[k]], widths))
        elif k not in inside:
            lines.append(_line(row, widths))
    return lines


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [row[0], shortened(row[1], widths[1]), *row[2:]]
    aligned = zip(cells, widths, _ALIGNED, strict=True)
    return " ".join(padded(*each) for each in aligned).rstrip()


def _folded(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> str:
    stage = "" if rows[0][2] == NOT_MEASURED else f" of {rows[0][2]}"
    text = f"{'':{widths[0]}} ... {len(rows):,} more{stage}"
    steps = [int(row[3].replace(",", "")) for row in rows if row[3] != NOT_MEASURED]
    if len(steps) == len(rows):
        text += f", steps {steps[0]:,} to {steps[-1]:,}"
        ((apart, times),) = Counter(b - a for a, b in pairwise(steps)).most_common(1)
        if times >= MOSTLY * (len(steps) - 1):
            text += f", {'' if times == len(steps) - 1 else 'mostly '}every {apart:,}"
    see = rows[0][-1]
    return f"{padded(text, sum(widths[:-1]) + len(widths) - 2)} {see}" if see else text


def catalog_to_json(catalog: Catalog) -> str:
    same = {
        label: labels
        for label, (what, labels) in _same(catalog.checkpoints).items()
        if what == SAME_WEIGHTS
    }
    rows = [
        encode(c)
        | {
            "ref": str(c.ref),
            "revision": c.ref.revision,
            "nbytes": catalog.size_of(c),
            "checked": catalog.size_of(c) is not None,
            "selected": c.label in catalog.selected,
            "same_as": [other for other in same.get(c.label, []) if other != c.label],
        }
        for c in catalog.checkpoints
    ]
    document = {
        "targets": list(catalog.targets),
        "selected_by_default": catalog.by_default,
        "checkpoints": rows,
        "findings": [encode(finding) for finding in catalog.findings],
        "remarks": list(catalog.remarks),
        "refusals": list(catalog.refusals),
    }
    return text_of(document)
