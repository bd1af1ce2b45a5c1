"""What to ship according to an audit, and what that is based on.

Names are between backticks. Where an interval does not decide, the sentence is inconclusive and
never leans to the side of the estimate. What breaches a policy is never called shippable,
whatever its loss.
"""

from __future__ import annotations

from qaudit.report.format import listing, percent, plural, spread
from qaudit.report.views import BREACH, UNCLEAR, View, is_ignored, judged, policy_findings
from qaudit.types import Comparison, Interval, Pick, Subject

MINIMUM_DOCUMENTS = 10  # below, no verdict is drawn (as in core/statistics.py)


def verdict(view: View) -> str:
    """Return one sentence: what to ship, or why the audit does not decide it."""
    if not view.audit.measurements:
        return "Nothing was measured."
    if view.documents < MINIMUM_DOCUMENTS:
        few = plural(view.documents, f"evaluation {view.unit}")
        return f"{few} are too few for a verdict: evaluate on at least {MINIMUM_DOCUMENTS}."
    if view.audit.pick is None:
        return "No quantized loss was measured, so there is nothing to decide."
    return f"{_ship(view, view.audit.pick)}."


def _ship(view: View, pick: Pick) -> str:
    """Name what to ship; a breach of the policy comes before any reason for it."""
    what = f"`{pick.subject}` at {pick.scheme}"
    best = pick.objective.removesuffix(f" at {pick.scheme}")
    held = {f.outcome for f in judged(view, pick.subject, pick.scheme) if f.level == "error"}
    if "fail" in held:
        return f"Nothing to ship by this policy: {what} has the {best}, and breaches it"
    if pick.reference is None and (pick.runner_up is None or pick.interval is None):
        return f"`{pick.subject}` is the only subject measured at {pick.scheme}{_taken(view, pick)}"
    if pick.reference is None and pick.interval is not None and pick.interval.high >= 0:
        names = f"`{pick.subject}` and `{pick.runner_up}`"
        seen = plural(view.documents, view.unit)
        return f"Either may ship: {names} are indistinguishable at {pick.scheme} on {seen}"
    text = f"Ship {what}: it has the {best} of {plural(len(view.subjects), 'subject')}"
    text += f", confirmed on {pick.confirmed_on}" if pick.confirmed_on else ""
    text += "; whether it stays within its margin is inconclusive" if "inconclusive" in held else ""
    return f"{text}{_taken(view, pick)}"


def _taken(view: View, pick: Pick) -> str:
    if view.last is not None and pick.subject == view.last.label:
        return ""  # the next sentence says it
    error = view.error(pick.subject, pick.scheme)
    return "" if error is None else f"; {_effect(pick.scheme, error, 'its loss')}"


def standing(view: View) -> list[str]:
    """Return what the verdict is based on: the last checkpoint, the policy, what was measured."""
    if not view.audit.measurements:
        return []
    pick, enough = view.audit.pick, view.documents >= MINIMUM_DOCUMENTS
    sentences = [f"{cost(view, pick.scheme)}."] if pick and view.last and enough else []
    return [*sentences, *_policy(view), _coverage(view)]


def _policy(view: View) -> list[str]:
    """Count how the checks of a policy came out, where there was one."""
    checks = policy_findings(view)
    words = {
        "pass": "within its margin",
        "fail": f"over it (`{BREACH}`)",
        "inconclusive": f"inconclusive (`{UNCLEAR}`)",
    }
    counts = {key: sum(f.outcome == key for f in checks) for key in words}
    parts = [f"{number} {words[key]}" for key, number in counts.items() if number]
    if not parts:
        return []
    name = view.audit.plan.recipe.policy
    text = f"Of {plural(len(checks), 'check')} of the policy `{name}`: {listing(parts)}"
    ignored = sum(is_ignored(f) for f in checks)
    return [f"{text}; {ignored} ignored, with a reason." if ignored else f"{text}."]


def _coverage(view: View) -> str:
    tokens = max((score.tokens for score in view.audit.measurements), default=0)
    schemes = plural(len(view.schemes), "scheme")
    text = f"Measured: {plural(len(view.subjects), 'subject')} under {schemes}"
    text += f" on {plural(view.documents, view.unit)}, {plural(tokens, 'token')}."
    missing = len(view.audit.skipped)
    return f"{text} Planned and not measured: {missing}." if missing else text


def cost(view: View, scheme: str) -> str:
    """Return what a scheme costs the last checkpoint, and what it cost at the end of a stage."""
    assert view.last is not None
    now = view.error(view.last.label, scheme)
    if now is None:
        return f"{scheme} was not measured on the last checkpoint `{view.last.label}`"
    what = f"the loss of the last checkpoint `{view.last.label}`"
    text = _effect(scheme, now, what)
    if view.stage_end is None or view.last.label == view.stage_end.label:
        return text
    before = view.error(view.stage_end.label, scheme)
    change = view.compared(
        "relative_error_difference", scheme, view.last.label, view.stage_end.label
    )
    if before is None or change is None:
        return text
    return f"{text}, {_since(change, before, view.stage_end)}"


def _effect(scheme: str, error: Interval, what: str) -> str:
    shown = percent(error, unit=" %")
    if error.low > 0:
        return f"{scheme} raises {what} by {shown}"
    if error.high < 0:
        return f"{scheme} lowers {what} ({shown})"
    if error.low == error.high == 0:
        return f"{scheme} leaves {what} as it is"
    return f"{scheme} makes no detectable change to {what} ({shown})"


def _since(change: Comparison, before: Interval, end: Subject) -> str:
    where = percent(before, unit=" %")
    where += f" at the end of {end.first.stage} (`{end.label}`)"
    words = {
        "b_better": f"up from {where}",
        "a_better": f"down from {where}",
        "equivalent": f"no different from {where}",
        "inconclusive": f"no detectable change from {where}",
    }
    return words[change.verdict]


def pick_reasons(view: View) -> list[str]:
    """Return why the pick is the pick: how far it leads, and what that is based on."""
    pick = view.audit.pick
    if pick is None:
        return ["Nothing is picked: no subject has a finite quantized loss."]
    best = view.score(pick.subject, pick.scheme)
    level = f", {spread(best.ce)} nats per token" if best else ""
    what = pick.objective.removesuffix(f" at {pick.scheme}")
    sentences = [f"`{pick.subject}` at {pick.scheme} has the {what}{level}."]
    if pick.interval and pick.reference:
        above = percent(pick.interval, unit=" %")
        sentences.append(f"Its loss is {above} above that of `{pick.reference}` in full precision.")
    elif pick.interval and pick.runner_up:
        sentences += [_lead(view, pick, pick.interval), least_against_best(view, pick)]
    if pick.interval:
        sentences += [_confirmation(pick), _contenders(pick)]
    if pick.changes:
        sentences.append(f"What would change it: {'; '.join(pick.changes)}.")
    return [sentence for sentence in sentences if sentence]


def _confirmation(pick: Pick) -> str:
    if pick.confirmed_on is not None:
        return f"Confirmed on {pick.confirmed_on}."
    if pick.reference is None and pick.interval and pick.interval.high >= 0:
        return ""  # the lead is none, which the verdict says
    return (
        "It was chosen and measured on the same documents, which flatters the winner: "
        "confirm it on others before shipping."
    )


def _contenders(pick: Pick) -> str:
    """Name the other subjects that may be the best, where that is not the runner-up alone."""
    others = [label for label in pick.contenders if label != pick.runner_up]
    if not others:
        return ""
    shown = listing([f"`{label}`" for label in others[:3]])
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return f"With all compared at once, {shown}{more} may be as good."


def _lead(view: View, pick: Pick, lead: Interval) -> str:
    seen = plural(view.documents, view.unit)
    shown = (
        f"Its loss minus that of the runner-up `{pick.runner_up}` is {spread(lead)} nats per token"
    )
    if view.documents < MINIMUM_DOCUMENTS:
        return f"{shown}: {seen} are too few to call it a lead."
    if lead.high < 0:
        return f"{shown}: a lead beyond the noise of {seen}."
    if lead.low > 0:
        return f"{shown}: it was chosen on other documents, and on these the runner-up is better."
    return f"{shown}: no detectable difference."


def least_against_best(view: View, pick: Pick) -> str:
    """Return what loses least to quantization, which need not be what is best when quantized."""
    errors = [
        (error.estimate, subject.label, error)
        for subject in view.subjects
        if (error := view.error(subject.label, pick.scheme)) is not None
    ]
    if not errors:
        return ""
    _, least, error = min(errors)
    shown = percent(error, unit=" %")
    if least == pick.subject:
        return f"It is also the one that loses least to {pick.scheme} ({shown})."
    own, other = view.score(pick.subject, pick.scheme), view.score(least, pick.scheme)
    assert own is not None and other is not None
    behind = other.ce.estimate - own.ce.estimate
    return (
        f"`{least}` loses least to {pick.scheme} ({shown}), but its quantized loss is "
        f"{behind:.4f} nats per token higher."
    )
