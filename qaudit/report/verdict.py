"""The verdict in words: the same on card, page, terminal, pick, gate and badge.

Names are between backticks. Every number in a sentence is in `verdict` of audit.json too.

Beside it: the one command that decides what is undecided, the pick on its own, and what fewer bits
cost, by the best subject of every scheme.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from qaudit.core.registry import NO_SCHEME
from qaudit.report import document as doc
from qaudit.report import terminal
from qaudit.report.format import listing, loss, or_dash, percent, size, spread
from qaudit.report.protocol import rescan
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


def _divergence(view: View, one: ClassVerdict) -> Iterator[str]:
    if one.kl is None:
        return
    yield f"KL divergence to full precision: {spread(one.kl)} nats per token."
    if one.kl.estimate >= NEAR_BASELINE:
        return
    yield NOT_A_RANK
    answered = [(row.subject, row.scheme) for row in view.audit.tasks]
    answered += [(row.subject, row.scheme) for row in view.audit.diagnostics.rollouts]
    if (one.subject, one.scheme) not in answered:
        yield "Neither tasks nor rollouts were measured: add `--tasks NAMES`."


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
    yield from _divergence(view, one)
    if one.rule is not None and one.margin is not None:
        is_percent = one.unit == "fraction"
        margin = f"{100 * one.margin:g} %" if is_percent else f"{one.margin:g} {one.unit}"
        verb = "requires" if one.unit == "tokens" else "allows"
        yield f"The rule `{one.rule}` of the policy {verb} {margin}."
    rival = f"{one.runner_up} at {one.runner_up_scheme}"
    if rivals := [f"`{name}`" for name in one.contenders if name != rival]:
        more = [f"{len(rivals) - SHOWN} more"] if len(rivals) > SHOWN else []
        yield f"With all compared at once, {listing(rivals[:SHOWN] + more)} may be as good."
    yield from (f"Warning: {warning}." for warning in one.warnings)
    if one.changes:
        yield f"What would change it: {'; '.join(one.changes)}."
    yield from _least(view, one)


def _least(view: View, one: ClassVerdict) -> Iterator[str]:
    assert one.subject is not None and one.scheme is not None
    errors = [
        (error.estimate, subject.label, error)
        for subject in view.subjects
        if (error := view.error(subject.label, one.scheme)) is not None
    ]
    score = view.score(one.subject, one.scheme)
    if not errors or score is None:
        return
    _, least, error = min(errors, key=lambda entry: entry[:2])
    other = view.score(least, one.scheme)
    if least != one.subject and other is not None:
        yield (
            f"`{least}` loses least to {one.scheme} ({percent(error, unit=' %')}), but its "
            f"quantized loss is {other.ce.estimate - score.ce.estimate:.4f} nats per token higher."
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
    command = f"{rescan(audit, **changed)} --out {shlex.quote(_folder(audit, [*undecided]))}"
    return NextStep(tuple(undecided), command, documents, available)


def _folder(audit: AuditRecord, bits: Sequence[str]) -> str:
    """Return a folder of its own: what is decided stays where it is."""
    classes = (f"{text}bit" if text.isdecimal() else text for text in bits)
    return f"{default_folder(audit)}-{'-'.join(classes)}"


def default_folder(audit: AuditRecord) -> str:
    """Return the folder that a scan of an audit's targets writes into where none is named."""
    targets = audit.plan.recipe.targets
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(targets[0]).name if targets else "audit")
    return f"qaudit-out/{name}"


@dataclass(frozen=True)
class Point(Row):
    """The best subject under a scheme."""

    subject: str
    scheme: str
    bits_per_weight: float
    ce: Interval
    on_front: bool = False
    bits_per_parameter: float | None = None  # embeddings and head included
    nbytes: int | None = None


def points(view: View) -> tuple[Point, ...]:
    best_points = [
        Point(
            best,
            scheme,
            score.bits_per_weight,
            score.ce,
            bits_per_parameter=score.bits_per_parameter,
            nbytes=score.nbytes,
        )
        for scheme in (*view.schemes, FULL_PRECISION)
        if (best := view.best(scheme)) and (score := view.score(best, scheme))
    ]
    best_points.sort(key=lambda point: (point.bits_per_weight, point.ce.estimate))
    marked, lowest = [], float("inf")
    for point in best_points:
        marked.append(replace(point, on_front=point.ce.estimate < lowest))
        lowest = min(lowest, point.ce.estimate)
    return tuple(marked)


def pareto_table(view: View) -> doc.TableBlock:
    """Return the points as a table, fewest bits first."""
    names = (
        "scheme", "bits per weight", "bits per parameter", "size", "best subject", "loss", "front",
    )  # fmt: skip
    rows = (
        (
            point.scheme,
            f"{point.bits_per_weight:.2f}",
            or_dash(point.bits_per_parameter, "{:.2f}".format),
            or_dash(point.nbytes, size),
            doc.name_cell(point.subject),
            spread(point.ce),
            "yes" if point.on_front else "",
        )
        for point in points(view)
    )
    return doc.table(names, rows)


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
    table = doc.fold(f"All {len(every)} schemes", pareto_table(view))
    return (doc.paragraph(sentence), *picture(view, "pareto"), table)


def render_pick(audit: AuditRecord) -> str:
    """Render the verdict with its evidence, for a terminal."""
    view = View(audit)
    if audit.verdict is None or audit.pick is None:
        nothing = doc.prose("Nothing is picked: no measurement meets the objective.")
        return terminal.render(doc.Page("", nothing, (pareto_table(view),)))
    blocks: tuple[doc.Block, ...] = (*evidence(view), pareto_table(view))
    return terminal.render(doc.Page("", doc.prose(answer(audit.verdict)), blocks))


def render_pareto(audit: AuditRecord) -> str:
    headline = "On the front: nothing with fewer bits is better. Intervals are for each loss alone."
    return terminal.render(doc.Page("", doc.prose(headline), (pareto_table(View(audit)),)))


def pick_to_json(audit: AuditRecord, pick: Pick | None) -> str:
    rows = [encode(point) for point in points(View(audit))]
    verdict = None if audit.verdict is None or pick is None else encode(audit.verdict)
    chosen = None if pick is None else encode(pick)
    return text_of({"pick": chosen, "verdict": verdict, "pareto": rows})
