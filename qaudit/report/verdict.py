"""The verdict in words: the same on card, page, terminal, pick, gate and badge.

Names are between backticks. Every number in a sentence is in `verdict` of audit.json too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qaudit.report import document as doc
from qaudit.report.format import listing, percent, plural, spread
from qaudit.report.views import View
from qaudit.types import NEAR_BASELINE, ClassVerdict, NextStep, Status, Verdict

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
    return answer(view.verdict) if view.verdict else "No quantized loss was measured: no verdict."


def answer(verdict: Verdict) -> str:
    by_status = {status: _of(verdict, status) for status in STATUSES}
    parts = [_classes(status, classes) for status, classes in by_status.items() if classes]
    details = f": {'; '.join(parts)}" if parts else ""
    levels = {decision.level for decision in verdict.classes} - {"off"}
    status = verdict.status.upper()
    if verdict.status == "ship" and levels == {"warn"}:  # SHIP, and everything beyond its margin
        status = "WARNINGS ONLY"
    return f"{status} by the policy `{verdict.policy}`{details}."


def _of(verdict: Verdict, status: Status) -> list[ClassVerdict]:
    return [decision for decision in verdict.classes if decision.status == status]


def _classes(status: Status, classes: Sequence[ClassVerdict]) -> str:
    """Name what ships; of other classes their number of bits."""
    if status == "ship":
        return f"ship {listing([what(decision) for decision in classes])}"
    bits = listing([label(decision) for decision in classes])
    return f"hold {bits}" if status == "hold" else f"{bits} {status}"


def label(one: ClassVerdict) -> str:
    """Return `4 bits`; of classes with activations their name; and the bits of a cache."""
    number, _, cache = one.bit_class.partition("kv")
    name = f"{number} bit{'s' * (number != '1')}" if number.isdecimal() else number
    return f"{name} (cache {cache})" if cache else name


def what(one: ClassVerdict) -> str:
    if one.subject is None or one.scheme is None:
        return "not measured"
    return f"`{one.subject}` at {one.scheme}"


def next_blocks(step: NextStep | None) -> Iterator[doc.Block]:
    """Yield the command that decides, and whether the text has as many documents."""
    if step is None:
        return
    bits = listing([f"{name} bits" if name.isdecimal() else name for name in step.bits])
    sentences = [f"This decides {bits} in four of five cases:"]
    if step.available is not None and step.available < step.documents:
        sentences.insert(
            0,
            f"The text at hand has {plural(step.available, 'document')}: name a longer one with "
            "`--evaluation`.",
        )
    yield doc.paragraph(*sentences)
    yield doc.CodeBlock(step.command, "sh")


def evidence(view: View) -> tuple[doc.Section, ...]:
    classes = view.verdict.classes if view.verdict else ()
    return tuple(
        doc.Section(label(decision), (doc.bullets(*_evidence(view, decision)),))
        for decision in classes
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
        yield f"{what(one)} may have the {best}, as others do, and has the fewest bits: {loss}."
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
