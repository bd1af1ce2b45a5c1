"""The verdict in words: the same on card, page, terminal, pick, gate and badge.

Names are between backticks. Every number in a sentence is in `verdict` of audit.json too.

The first screen of an audit, on the terminal and at the top of card and page: what ships of each
class, by how much, and one next command. Beside it: the command that decides what is undecided,
the pick on its own, and what fewer bits cost, by the best subject of every scheme.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

from qaudit.core.registry import NO_SCHEME
from qaudit.report import document as doc
from qaudit.report import terminal
from qaudit.report.format import listing, loss, or_dash, percent, plural, shortened, size, spread
from qaudit.report.sections import rescan
from qaudit.report.series import picture
from qaudit.report.views import View
from qaudit.saved.codec import encode, text_of
from qaudit.types import (
    FULL_PRECISION,
    NEAR_BASELINE,
    AuditRecord,
    ClassVerdict,
    Interval,
    NextStep,
    Pick,
    Row,
    Status,
    Verdict,
)

STATUSES: tuple[Status, ...] = ("ship", "hold", "undecided", "incomplete")
"""Of the classes in the headline: those that the policy does not ask for are not in it."""

NOT_A_RANK = (
    f"Below {NEAR_BASELINE} nats KL divergence does not rank models: it says how much changes, and "
    "not whether for the worse."
)
SHOWN = 3  # of what may be as good, before it is counted


def headline(view: View) -> str:
    if not view.audit.measurements:
        return "Nothing was measured."
    verdict = view.audit.verdict
    return answer(verdict) if verdict else "No quantized loss was measured: no verdict."


def answer(verdict: Verdict) -> str:
    parts = []
    for status in STATUSES:
        classes = [decision for decision in verdict.classes if decision.status == status]
        if classes and status == "ship":
            parts.append(f"ship {listing(list(map(what, classes)))}")
        elif classes:
            bits = listing(list(map(label, classes)))
            parts.append(f"hold {bits}" if status == "hold" else f"{bits} {status}")
    details = f": {'; '.join(parts)}" if parts else ""
    levels = {decision.level for decision in verdict.classes} - {"off"}
    status_text = verdict.status.upper()
    if verdict.status == "ship" and levels == {"warn"}:  # SHIP, and everything beyond its margin
        status_text = "WARNINGS ONLY"
    return f"{status_text} by the policy `{verdict.policy}`{details}."


def label(one: ClassVerdict) -> str:
    """Return `4 bits`; of classes with activations their name; and the bits of a cache."""
    number, _, cache = one.bit_class.partition("kv")
    name = f"{number} bit{'s' * (number != '1')}" if number.isdecimal() else number
    return f"{name} (cache {cache})" if cache else name


def what(one: ClassVerdict) -> str:
    if one.subject is None or one.scheme is None:
        return "not measured"
    return f"`{one.subject}` at {one.scheme}"


def evidence(view: View) -> tuple[doc.Section, ...]:
    return tuple(
        doc.Section(label(decision), (doc.bullets(*_evidence(view, decision)),))
        for decision in view.classes
        if decision.subject
    )


def _evidence(view: View, one: ClassVerdict) -> Iterator[str]:
    loss = f"{spread(one.ce)} nats per token" if one.ce else "not measured"
    best = one.objective.removesuffix(f" at {one.scheme}")
    if one.lead is not None and one.reference is None and one.lead.estimate > 0:
        tie = "as others do, and has the fewest bits within the rules"
        yield f"{what(one)} may have the {best}, {tie}: {loss}."
    else:
        yield f"{what(one)} has the {best}, {loss}."
    if one.lead is not None and one.reference is not None:
        yield f"Its loss is {percent(one.lead, unit=' %')} above that of `{one.reference}`."
    elif one.lead is not None and one.runner_up is not None:
        measure = "KL divergence" if one.objective.startswith("lowest KL") else "loss"
        yield (
            f"Its {measure} minus that of the runner-up `{one.runner_up}` at "
            f"{one.runner_up_scheme} is {spread(one.lead)} nats per token."
        )
    if one.kl is not None:
        yield f"KL divergence to full precision: {spread(one.kl)} nats per token."
    if one.kl is not None and one.kl.estimate < NEAR_BASELINE:
        yield NOT_A_RANK
        answered = [row.cell for row in view.audit.tasks]
        answered += [row.cell for row in view.audit.diagnostics.rollouts]
        if (one.subject, one.scheme) not in answered:
            yield "Neither tasks nor rollouts were measured: add `--tasks NAMES`."
    if one.rule is not None and one.margin is not None:
        is_percent = one.unit == "fraction"
        margin = f"{100 * one.margin:g} %" if is_percent else f"{one.margin:g} {one.unit}"
        verb = "requires" if one.unit == "tokens" else "allows"
        yield f"The rule `{one.rule}` of the policy {verb} {margin}."
    rival = f"{one.runner_up} at {one.runner_up_scheme}"
    if rivals := [f"`{name}`" for name in one.contenders if name != rival]:
        yield f"With all compared at once, {listing(rivals, SHOWN)} may be as good."
    yield from (f"Warning: {warning}." for warning in one.warnings)
    if one.changes:
        yield f"What would change it: {'; '.join(one.changes)}."
    at = one.scheme or ""
    scores = {s.label: score for s in view.subjects if (score := view.score(s.label, at))}
    known = [
        (error.estimate, label, error)
        for label, score in scores.items()
        if (error := score.relative_error)
    ]
    if known and (own := scores.get(one.subject or "")):
        _, least, error = min(known)
        higher = scores[least].ce.estimate - own.ce.estimate
        if least != one.subject:
            yield (
                f"`{least}` loses least to {one.scheme} ({percent(error, unit=' %')}), but its "
                f"quantized loss is {higher:.4f} nats per token higher."
            )


AVAILABLE = "evaluation_documents_available"  # of the protocol


def next_step(
    audit: AuditRecord, classes: Sequence[ClassVerdict], policy: str | None = None
) -> NextStep | None:
    """Return the command that measures what is undecided, and nothing else, on more documents.

    It has the `policy` that judged. Where the text has fewer documents, another is to be named:
    `--evaluation FILE`. None where nothing is undecided, or more documents would not decide it.
    """
    undecided = {
        decision.bit_class: decision
        for decision in classes
        if decision.status == "undecided" and decision.needed_documents is not None
    }
    if not undecided:
        return None
    documents = max(decision.needed_documents or 0 for decision in undecided.values())
    schemes = {row.spec: row.scheme for row in audit.measurements if row.bit_class in undecided}
    names = [schemes[spec] for spec in audit.plan.specs if spec in schemes]
    files = {file.label for file in audit.plan.shipped}
    named = zip(audit.plan.shipped, audit.plan.recipe.shipped, strict=False)  # or the base itself
    changed: dict[str, Any] = {
        "schemes": tuple(name for name in names if name not in files) or (NO_SCHEME,),
        "shipped": tuple(place for file, place in named if file.label in names),
        "bits": tuple(undecided),
        "evaluation_documents": documents,
    }
    available = audit.protocol.get(AVAILABLE)
    if available is not None and available < documents:
        changed["evaluation"] = "FILE"
    if policy is not None:
        changed["policy"] = policy
    bits = (f"{text}bit" if text.isdecimal() else text for text in undecided)
    folder = f"{default_folder(audit)}-{'-'.join(bits)}"  # what is decided stays where it is
    command = f"{rescan(audit, **changed)} --out {shlex.quote(folder)}"
    return NextStep(tuple(undecided), command, documents, available)


def default_folder(audit: AuditRecord) -> str:
    """Return the folder that a scan of an audit's targets writes into where none is named."""
    targets = audit.plan.recipe.targets
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(targets[0]).name if targets else "audit")
    return f"qaudit-out/{name}"


# ------------------------------------------------------------------ the first screen

LONGEST = 22  # columns of what ships: with the others the table fits into 80
MOST_NAMES = 4
_RULE = re.compile(r"\(rule `([^`]+)`\)$")


def measured(view: View) -> str:
    """Return what was measured, on how much text."""
    audit = view.audit
    targets = listing(list(audit.plan.recipe.targets) or ["nothing"])
    if not audit.measurements:
        return "Nothing was measured."
    parts = [plural(len(view.checkpoints), "checkpoint")] * bool(view.checkpoints)
    parts += [plural(len(view.soups), "soup")] * bool(view.soups)
    parts += [plural(len(view.schemes), "scheme")]
    tokens = max(score.tokens for score in audit.measurements)
    text = f"{plural(view.documents, view.unit)} ({tokens:,} tokens)"
    return f"{shortened(targets, 40)}: {', '.join([*parts, text])}"


def screen(view: View, folder: str | None = None) -> tuple[doc.Block, ...]:
    """Return the table, what it leaves out, and the next command; `folder` has the audit."""
    verdict = view.audit.verdict
    if verdict is None or not verdict.classes:
        nothing = "No quantized loss was measured: no verdict."
        return (doc.paragraph(nothing),) if view.audit.measurements else ()
    sentences = tuple(map(doc.prose, _sentences(view, verdict)))
    beside = (doc.Lines(sentences),) if sentences else ()
    place = folder or default_folder(view.audit)
    here, commands = shlex.quote(place), []
    if verdict.next_step is not None:
        commands.append(f"next  {verdict.next_step.command}")
    elif verdict.status == "ship" and view.main is not None:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", place.rstrip("/").rpartition("/")[2]) or "audit"
        bits = view.main.bit_class
        out = f"{name}-{bits if not bits.isdecimal() else f'w{bits}'}"
        commands.append(f"next  qaudit export {here} --bits {bits} --out {out}")
    commands += [f"why   qaudit pick {here}", f"page  {place.rstrip('/')}/report.html"]
    return table(verdict.classes), *beside, doc.CodeBlock("\n".join(commands))


def table(classes: Sequence[ClassVerdict]) -> doc.TableBlock:
    """Return one row for each bit class: what ships, what it adds, its margin and its status."""
    rows = []
    for one in classes:
        ships = "not measured"
        if one.subject is not None and one.scheme is not None:
            room = max(6, LONGEST - len(one.scheme) - 1)
            ships = f"{shortened(one.subject, room)} {one.scheme}"
        margin = None  # of the loss, in percent; the ends of what is added keep their side of it
        if one.margin is not None and one.metric in (None, "relative_error"):
            margin = 100 * one.margin
        warns = " (warns)" * (one.level == "warn" and one.status != "ship")
        cells = (
            label(one),
            ships,
            "" if one.bits_per_weight is None else f"{one.bits_per_weight:.2f}",
            "" if one.nbytes is None else size(one.nbytes),
            or_dash(one.relative_error, partial(added, margin=margin)),
            or_dash(margin, "{:g} %".format),
            doc.status_in_words(one.status).upper() + warns,
        )
        rows.append(cells)
    names = ("", "ships", "bits", "size", "adds to loss", "margin", "")
    return doc.table(names, rows, name="ships")


def added(error: Interval, margin: float | None = None) -> str:
    """Print a fraction in percent with the digits that its width deserves: `1.4 % [1.2, 1.7]`."""
    values = [100 * end for end in (error.estimate, error.low, error.high)]
    half = (values[2] - values[1]) / 2
    if half == 0:
        return f"{values[0]:.2g} %"
    if not all(map(math.isfinite, values)):
        return f"{values[0]:.2g} % [{values[1]:.2g}, {values[2]:.2g}]"
    digits = min(6, max(1 if half < 10 else 0, -math.floor(math.log10(half))))
    while (
        margin is not None
        and digits < 6
        and any((round(end, digits) <= margin) != (end <= margin) for end in values[1:])
    ):
        digits += 1  # until rounding puts no end on the other side of the margin
    estimate, low, high = (f"{round(value, digits) + 0.0:.{digits}f}" for value in values)  # no -0
    return f"{estimate} % [{low}, {high}]"


def _sentences(view: View, verdict: Verdict) -> Iterator[str]:
    """Yield what the table does not show: reasons, what is beside the verdict, and warnings."""
    for row in verdict.classes:
        if row.status in ("undecided", "incomplete") and row.needs:
            yield f"{label(row)}: {row.needs[0]}."
        elif row.status == "hold" and row.metric != "relative_error" and row.breaches:
            yield f"{label(row)}: {row.breaches[0]}."
    yield from (f"{other}." for other in verdict.others[:MOST_NAMES])
    step = verdict.next_step
    if step is not None and step.available is not None and step.available < step.documents:
        documents = plural(step.available, "document")
        yield f"The text has {documents}: name a longer one with `--evaluation`."
    main, last = view.main, view.last
    if main and last and main.subject not in (None, last.label) and main.scheme:
        ships, end = (view.score(name, main.scheme) for name in (main.subject or "", last.label))
        if ships is not None and end is not None and math.isfinite(end.ce.estimate):
            apart = ships.ce.estimate - end.ce.estimate
            name = f"The loss of `{main.subject}`"
            name = "The soup's loss" if main.subject == "soup" else name
            yield (
                f"{name} at {label(main)} is {abs(apart):.2g} nats "
                f"{'lower' if apart < 0 else 'higher'} than the last checkpoint's."
            )
    for search in view.audit.diagnostics.greedy:
        if search.counted and len(search.members) > 1:
            yield (
                f"The search for `{search.label}` chose on the {search.documents} documents that "
                f"judge it: its {plural(search.counted, 'mean')} count."
            )
    if view.documents:
        rarest = 1 - 0.05 ** (1 / view.documents)
        yield f"Not covered: kinds of text rarer than 1 in {max(1, int(1 / rarest))}."
    cells = {(row.subject, row.scheme) for row in verdict.classes}
    names = [m[1] for row in verdict.classes for text in row.warnings if (m := _RULE.search(text))]
    names += [
        finding.rule
        for finding in view.audit.findings
        if finding.level != "info"
        and (finding.subject, finding.scheme) in cells
        and finding.rule in ABOUT_NUMBERS
    ]
    if names := list(dict.fromkeys(names)):
        rules = listing(names, MOST_NAMES)
        yield f"{plural(len(names), 'warning')}: {rules} (`qaudit explain {names[0]}`)."
    if missing := len(view.audit.skipped):
        yield f"Planned and not measured: {missing}."


ABOUT_NUMBERS = frozenset(("QA028", "QA029", "QA043", "QA046"))
"""Findings that say that the numbers of what ships are not what they seem."""


# ------------------------------------------------------------------ fewer bits


@dataclass(frozen=True)
class Point(Row):
    """The best subject under a scheme."""

    subject: str
    scheme: str
    bits_per_weight: float
    ce: Interval
    on_front: bool
    bits_per_parameter: float | None  # embeddings and head included
    nbytes: int | None


def points(view: View) -> tuple[Point, ...]:
    scores = [
        score
        for scheme in (*view.schemes, FULL_PRECISION)
        if (best := view.best(scheme)) and (score := view.score(best, scheme))
    ]
    every, lowest = [], float("inf")
    for s in sorted(scores, key=lambda score: (score.bits_per_weight, score.ce.estimate)):
        on_front, lowest = s.ce.estimate < lowest, min(lowest, s.ce.estimate)
        whole = s.bits_per_parameter, s.nbytes
        every.append(Point(s.subject, s.scheme, s.bits_per_weight, s.ce, on_front, *whole))
    return tuple(every)


PARETO_COLUMNS: doc.Columns[Point] = {
    "scheme": lambda point: point.scheme,
    "bits per weight": lambda point: f"{point.bits_per_weight:.2f}",
    "bits per parameter": lambda point: or_dash(point.bits_per_parameter, "{:.2f}".format),
    "size": lambda point: or_dash(point.nbytes, size),
    "best subject": lambda point: doc.name_cell(point.subject),
    "loss": lambda point: spread(point.ce),
    "front": lambda point: "yes" if point.on_front else "",
}


def pareto_section(view: View) -> tuple[doc.Block, ...]:
    """Name the front, show it, and fold the numbers."""
    if len(view.schemes) < 2:
        return ()
    every = points(view)
    front = [p for p in every if p.on_front]
    sentence = (
        "Fewest bits first, each better by estimate than all with fewer: "
        + listing([f"{p.scheme} ({p.bits_per_weight:.2f} bits, {loss(p.ce)})" for p in front])
        + ". The loss, in nats per token, is that of the best subject under each scheme. Bits per "
        + "weight count the quantized linears with their scales; bits per parameter and the size "
        + "count the whole model, embeddings and head as they are stored."
    )
    table = doc.fold(f"All {len(every)} schemes", doc.table_of(every, PARETO_COLUMNS))
    return (doc.paragraph(sentence), *picture(view, "pareto"), table)


def render_pick(audit: AuditRecord) -> str:
    """Render the verdict with its evidence, for a terminal."""
    view = View(audit)
    if audit.verdict is None or audit.pick is None:
        return _with_points(view, "Nothing is picked: no measurement meets the objective.")
    return _with_points(view, answer(audit.verdict), *evidence(view))


def render_pareto(audit: AuditRecord) -> str:
    headline = "On the front: nothing with fewer bits is better. Intervals are for each loss alone."
    return _with_points(View(audit), headline)


def _with_points(view: View, headline: str, *blocks: doc.Block) -> str:
    every = doc.table_of(points(view), PARETO_COLUMNS)
    return terminal.render(doc.Page("", doc.prose(headline), (*blocks, every)))


def pick_to_json(audit: AuditRecord, pick: Pick | None) -> str:
    rows = [encode(point) for point in points(View(audit))]
    verdict = None if audit.verdict is None or pick is None else encode(audit.verdict)
    chosen = None if pick is None else encode(pick)
    return text_of({"pick": chosen, "verdict": verdict, "pareto": rows})
