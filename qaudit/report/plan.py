"""A plan as text: what will be measured, and what it will cost.

Each line is a word and its text, in 80 columns. Downloads are given in bytes, and in time only at a
named rate, since the speed of the Hub is unknown.

What is worth measuring next is a table of predictions, and JSON.
"""

from __future__ import annotations

from collections.abc import Iterator

from qaudit.core.registry import parse_scheme
from qaudit.report import document as doc
from qaudit.report import terminal
from qaudit.report.format import count, duration, listing, percent, plural, size, spread
from qaudit.report.terminal import filled
from qaudit.saved.codec import encode, text_of
from qaudit.types import Plan, Prospect, Subject, Suggestion, Traffic, Worth, reference_in

WIDTH, WORD = 80, 9
NAMED_RATE, BITS_PER_SECOND = "1 Gbit/s", 1e9
WIDTH_OF_TABLES = 120
SHOWN = 12  # checkpoints before the list is folded


def render_plan(plan: Plan) -> str:
    """Render a plan as plain text of 80 columns."""
    indent = " " * WORD
    return "\n".join(f"{word:<{WORD}}{filled(text, WIDTH, indent)}" for word, text in _lines(plan))


def _lines(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "plan", _what(plan)
    yield "measure", _subjects(plan)
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
    yield "time", _time(plan)
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
    for diagnostic in plan.diagnoses:
        yield "diagnose", diagnostic
    for finding in plan.findings:
        hint = f" ({finding.hint})" if finding.hint else ""
        yield "finding", f"{finding.rule} {finding.message}{hint}"
    for note in plan.notes:
        yield "note", note


def _room(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield what is fetched and read, and what is taken of the disk and of memory."""
    if plan.traffic is not None:
        yield "fetch", _fetch(plan.traffic)
        text = f"at most {size(plan.traffic.nbytes_disk_peak)} at a time"
        if plan.traffic.nbytes_disk_budget is not None:
            text += f", {size(plan.traffic.nbytes_disk_budget)} allowed"
        yield "disk", f"{text}, {size(plan.traffic.nbytes_disk_free)} free"
    if plan.nbytes_disk:
        yield "disk", f"up to {size(plan.nbytes_disk)} in addition to downloads, while it runs"
    yield "read", f"{size(plan.nbytes_read)} of weights"
    yield (
        "memory",
        f"about {size(plan.nbytes_memory)} plus the libraries, "
        f"{size(plan.nbytes_memory_available)} free",
    )


def _what(plan: Plan) -> str:
    soups = sum(subject.kind == "soup" for subject in plan.subjects)
    parts = [plural(len(plan.subjects) - soups, "checkpoint")] * (soups < len(plan.subjects))
    parts += [plural(soups, "soup")] * (soups > 0)
    repeats = plan.recipe.repeats
    draws = f", {repeats} calibration draws" * (repeats > 1)
    return (
        f"{listing(parts)}, {plural(len(plan.specs), 'scheme')} and full precision{draws}: "
        f"{plan.streams} streams"
    )


def _subjects(plan: Plan) -> str:
    names = [subject.label for subject in plan.subjects]
    if len(names) > SHOWN:
        half = SHOWN // 2
        names = [*names[:half], f"{len(names) - 2 * half} more", *names[-half:]]
    return ", ".join(names)


def _search(search: Subject) -> str:
    _, _, scheme = (search.merge or "").partition("scheme=")
    names = [f"`{checkpoint.label}`" for checkpoint, _ in search.members]
    if len(names) > SHOWN:
        names = [*names[: SHOWN - 1], f"{len(names) - SHOWN + 1} more"]
    means = plural(len(search.members) - 1, "mean")
    return (
        f"`{search.label}` among {listing(names)}: up to {means} of them, and each by itself, "
        f"measured under {parse_scheme(scheme).short} alone, on further documents where the text "
        "has them"
    )


def _fetch(traffic: Traffic) -> str:
    here = f"{size(traffic.nbytes_cached)} more are in the cache"
    if not traffic.nbytes_to_fetch:
        return f"nothing: {size(traffic.nbytes_cached)} are in the cache"
    seconds = 8 * traffic.nbytes_to_fetch / BITS_PER_SECOND
    text = f"{size(traffic.nbytes_to_fetch)}: {_seconds(seconds)} at {NAMED_RATE}"
    return f"{text}; {here}" if traffic.nbytes_cached else text


def _time(plan: Plan) -> str:
    text = f"{_seconds(plan.seconds_low)} to {_seconds(plan.seconds_high)}"
    if plan.device.startswith("cuda"):
        low, high = plan.seconds_low / 3600, plan.seconds_high / 3600
        text += f", {low:.2g} to {high:.2g} GPU hours"
    fetching = plan.traffic is not None and plan.traffic.nbytes_to_fetch > 0
    return f"{text} to compute; downloads run at the same time" if fetching else text


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
    blocks: list[doc.Block] = [doc.table_of(shown, COLUMNS)]
    blocks += [doc.paragraph(f"{more} more promise less.")] if more > 0 else []
    if any(each.beyond for each in shown):
        blocks += [doc.paragraph("* beyond what is measured: further off than its interval.")]
    blocks += [
        doc.paragraph(_worth("added loss", suggestion.error, 100, "points", suggestion)),
        doc.paragraph(_worth("quantized loss", suggestion.loss, 1, "nats", suggestion)),
        doc.paragraph("Predictions choose what to measure; they are in no audit."),
    ]
    return terminal.render(doc.Page("", doc.prose(headline), tuple(blocks)), WIDTH_OF_TABLES)


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
