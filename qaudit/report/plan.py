"""A series, a plan, and what is worth measuring next, as text.

A series can have a thousand rows of which a dozen matter: runs of similar rows that are not
selected are folded into one line with their steps, unless `everything` is set. Doubts about a row
are numbers that refer to sentences below the table. `-` is not known, or not checked; it is never
zero. A name that does not fit is cut in its middle.

A plan says what will be measured, and what it will cost. Each line is a word and its text, in 80
columns. Downloads are given in bytes, and in time only at a named rate, since the speed of the Hub
is unknown. What is worth measuring next is a table of predictions, and JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from qaudit.core.course import doubts_of_files
from qaudit.core.registry import parse_scheme
from qaudit.report import document as doc
from qaudit.report import terminal
from qaudit.report.format import (
    NOT_MEASURED,
    count,
    duration,
    inert,
    listing,
    or_dash,
    padded,
    percent,
    plural,
    printable,
    shortened,
    size,
    spread,
    width_of,
    wrapped,
)
from qaudit.report.terminal import filled
from qaudit.saved.codec import encode, text_of
from qaudit.types import (
    Checkpoint,
    Finding,
    Plan,
    Prospect,
    Subject,
    Suggestion,
    Worth,
    reference_in,
)

LEAST_FOLDED, LEAST_NAMES_FOLDED = 4, 12
SHORTEST_NAME = 12
SAME_WEIGHTS = "the same weights"
MOST_NAMES = 4
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
    table = _table(rows, width, everything=everything)
    also = [f"{f.rule} {f.message}" for f in catalog.findings if f.rule not in _IN_THE_TABLE]
    numbered = [f"{number} {text}" for text, number in numbers.items()]
    remarks = ["From its family's file:", *catalog.remarks] if catalog.remarks else []
    chosen = (c for c in catalog.checkpoints if c.label in catalog.selected)
    inferred = list(dict.fromkeys(note for c in chosen for note in c.notes))
    below = (catalog.refusals, [*numbered, *also], inferred, remarks)
    checked = sum(catalog.size_of(c) is not None for c in catalog.checkpoints)
    legend = "* selected   - not known"
    if checked < len(catalog.checkpoints):
        legend += ", or not checked (`--check` reads every tree)"
    head = (
        f"{', '.join(catalog.targets)}: {plural(len(catalog.checkpoints), 'checkpoint')}, "
        f"{len(catalog.selected):,} selected{' by default' * catalog.by_default}, "
        f"{checked:,} checked"
    )

    def in_width(line: str) -> str:
        safe = printable(line)
        return safe if width is None else wrapped(safe, width - 2).replace("\n", "\n  ")

    parts = [in_width(head), "\n".join(table)]
    parts += ["\n".join(map(in_width, lines)) for lines in below if lines]
    return inert("\n\n".join([*parts, legend]) + "\n")


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


def _table(rows: Sequence[Sequence[str]], width: int | None, *, everything: bool) -> list[str]:
    """Return the lines of a table; of a run of rows that are alike and unselected, one line."""
    runs: list[list[Sequence[str]]] = []
    previous: object = None
    for row in rows:
        alike = (row[2], row[3] == NOT_MEASURED, row[-2] == NOT_MEASURED, row[-1])
        kind = None if row[0] or everything else alike
        if kind is not None and kind == previous:
            runs[-1].append(row)
        else:
            runs.append([row])
        previous = kind
    least = {True: LEAST_NAMES_FOLDED, False: LEAST_FOLDED}
    folds = [len(run) >= least[run[0][3] == NOT_MEASURED] for run in runs]
    shown = [row for run, is_fold in zip(runs, folds, strict=True) if not is_fold for row in run]
    widths = [max(map(width_of, column)) for column in zip(_HEADINGS, *shown, strict=True)]
    if width is not None:
        rest = sum(widths) - widths[1] + len(widths) - 1
        widths[1] = min(widths[1], max(SHORTEST_NAME, width - rest))
    lines = [_line(_HEADINGS, widths)]
    for run, is_fold in zip(runs, folds, strict=True):
        lines += [_folded(run, widths)] if is_fold else [_line(row, widths) for row in run]
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
        if len(apart := {b - a for a, b in pairwise(steps)}) == 1:
            text += f", every {apart.pop():,}"
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


# ------------------------------------------------------------------ a plan

WIDTH, WORD = 80, 9
NAMED_RATE, BITS_PER_SECOND = "1 Gbit/s", 1e9
WIDTH_OF_TABLES = 120
SHOWN = 12  # checkpoints before the list is folded


def render_plan(plan: Plan) -> str:
    """Render a plan as plain text of 80 columns."""
    indent = " " * WORD
    return "\n".join(f"{word:<{WORD}}{filled(text, WIDTH, indent)}" for word, text in _lines(plan))


def _lines(plan: Plan) -> Iterator[tuple[str, str]]:
    soups = sum(subject.kind == "soup" for subject in plan.subjects)
    parts = [plural(len(plan.subjects) - soups, "checkpoint")] * (soups < len(plan.subjects))
    parts += [plural(soups, "soup")] * (soups > 0)
    repeats = plan.recipe.repeats
    draws = f", {repeats} calibration draws" * (repeats > 1)
    yield (
        "plan",
        f"{listing(parts)}, {plural(len(plan.specs), 'scheme')} and full precision{draws}: "
        f"{plan.streams} streams",
    )
    names = [subject.label for subject in plan.subjects]
    if len(names) > SHOWN:
        half = SHOWN // 2
        names = [*names[:half], f"{len(names) - 2 * half} more", *names[-half:]]
    yield "measure", ", ".join(names)
    if reference := reference_in(plan.subjects, plan.recipe.reference):
        yield "against", f"each its full precision, and all of them {reference.label}"
    for subject in plan.subjects:
        if subject.is_search:
            yield "search", _search(subject)
    yield (
        "model",
        f"{count(plan.parameters)} parameters, {plan.blocks} blocks, "
        f"{plan.dtype} on {plan.device}, context {plan.context}",
    )
    yield from _room(plan)
    text = f"{_seconds(plan.seconds_low)} to {_seconds(plan.seconds_high)}"
    if plan.device.startswith("cuda"):
        low, high = plan.seconds_low / 3600, plan.seconds_high / 3600
        text += f", {low:.2g} to {high:.2g} GPU hours"
    if plan.traffic is not None and plan.traffic.nbytes_to_fetch > 0:
        text += " to compute; downloads run at the same time"
    yield "time", text
    if price := plan.otherwise:
        yield (
            "then",
            f"what ships is computed rounded otherwise: at most {price.streams} streams, "
            f"{_seconds(price.seconds_low)} to {_seconds(price.seconds_high)}",
        )
    elif plan.recipe.arithmetic:
        yield "note", "arithmetic is not included: it would take more than a tenth of this scan"
    for role in ("calibration", "evaluation", "choices"):
        if source := getattr(plan.recipe, role):
            yield "text", f"{role}: {source}"
    yield from (("diagnose", diagnostic) for diagnostic in plan.diagnoses)
    for finding in plan.findings:
        hint = f" ({finding.hint})" if finding.hint else ""
        yield "finding", f"{finding.rule} {finding.message}{hint}"
    yield from (("note", note) for note in plan.notes)


def _room(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield what is fetched and read, and what is taken of the disk and of memory."""
    if (traffic := plan.traffic) is not None:
        cached = size(traffic.nbytes_cached)
        text = f"nothing: {cached} are in the cache"
        if traffic.nbytes_to_fetch:
            seconds = 8 * traffic.nbytes_to_fetch / BITS_PER_SECOND
            text = f"{size(traffic.nbytes_to_fetch)}: {_seconds(seconds)} at {NAMED_RATE}"
            text += f"; {cached} more are in the cache" if traffic.nbytes_cached else ""
        yield "fetch", text
        text = f"at most {size(traffic.nbytes_disk_peak)} at a time"
        if traffic.nbytes_disk_budget is not None:
            text += f", {size(traffic.nbytes_disk_budget)} allowed"
        yield "disk", f"{text}, {size(traffic.nbytes_disk_free)} free"
    if plan.nbytes_disk:
        yield "disk", f"up to {size(plan.nbytes_disk)} in addition to downloads, while it runs"
    yield "read", f"{size(plan.nbytes_read)} of weights"
    yield (
        "memory",
        f"about {size(plan.nbytes_memory)} plus the libraries, "
        f"{size(plan.nbytes_memory_available)} free",
    )


def _search(search: Subject) -> str:
    _, _, scheme = (search.merge or "").partition("scheme=")
    names = [f"`{checkpoint.label}`" for checkpoint, _ in search.members]
    members = listing(names, SHOWN if len(names) <= SHOWN else SHOWN - 1)
    means = plural(len(search.members) - 1, "mean")
    return (
        f"`{search.label}` among {members}: up to {means} of them, and each by itself, "
        f"measured under {parse_scheme(scheme).short} alone, on further documents where the text "
        "has them"
    )


def _seconds(seconds: float) -> str:
    return duration(max(1.0, seconds))


COLUMNS: doc.Columns[Prospect] = {
    "checkpoint": lambda each: doc.name_cell(each.label + " *" * each.beyond),
    "at": lambda each: count(round(each.position)),
    "added loss, %": lambda each: percent(each.error),
    "quantized loss, nats": lambda each: spread(each.loss),
    "better": lambda each: f"{100 * each.better:.0f} %",
    "gain, nats": lambda each: f"{each.gain:.4f}",
}


def suggestion_to_json(suggestion: Suggestion) -> str:
    return text_of(encode(suggestion))


def render_suggestion(suggestion: Suggestion) -> str:
    if suggestion.error is None or suggestion.loss is None or suggestion.best_loss is None:
        reason = (
            f"No suggestion of what to measure next at {suggestion.scheme}: {suggestion.reason}."
        )
        return terminal.render(doc.Page("", doc.prose(reason), ()))
    shown = suggestion.prospects[:SHOWN]
    headline = (
        f"Worth measuring next at {suggestion.scheme}, by {suggestion.measured} measured "
        f"checkpoints of which `{suggestion.best}` has the lowest quantized loss, "
        f"{suggestion.best_loss:.4f} nats:"
    )
    more = len(suggestion.prospects) - len(shown)
    sentences = [f"{more} more promise less."] if more > 0 else []
    if any(each.beyond for each in shown):
        sentences.append("* beyond what is measured: further off than its interval.")
    sentences += [
        _worth("added loss", suggestion.error, 100, "points", suggestion),
        _worth("quantized loss", suggestion.loss, 1, "nats", suggestion),
        "Predictions choose what to measure; they are in no audit.",
    ]
    blocks: tuple[doc.Block, ...] = (
        doc.table_of(shown, COLUMNS),
        *map(doc.paragraph, sentences),
    )
    return terminal.render(doc.Page("", doc.prose(headline), blocks), WIDTH_OF_TABLES)


def _worth(what: str, worth: Worth, scale: float, unit: str, suggestion: Suggestion) -> str:
    errors = (
        f"signals ({listing(list(suggestion.signals))}) {scale * worth.signals:.3g}, neighbours "
        f"{scale * worth.neighbours:.3g}, mean {scale * worth.mean:.3g} {unit}"
    )
    used = {
        "signals": "the signals are used",
        "neighbours": "the signals are no better, and neighbours are used",
        "mean": "the signals are no better, and the mean is used",
    }[worth.method]
    return f"Error at checkpoints left out, {what}: {errors}; {used}."
