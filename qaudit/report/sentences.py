"""What an audit says, in sentences, every one computed from its numbers.

Names stand between backticks; each surface makes of them what it can. Where an interval cannot
tell, the sentence says so and never leans to the side of the estimate.
"""

from __future__ import annotations

from collections.abc import Sequence

from qaudit.report.format import (
    NOT_MEASURED,
    duration,
    listing,
    percent,
    plural,
    points,
    size,
    spread,
)
from qaudit.report.views import View
from qaudit.types import Comparison, Interval, Noise, Pick, Score, Subject

MINIMUM_DOCUMENTS = 10  # below, no verdict is drawn (as in core/statistics.py)


def verdict(view: View) -> str:
    """Say in one sentence what quantization costs and what to ship."""
    if not view.audit.scores:
        return "Nothing was measured."
    if view.documents < MINIMUM_DOCUMENTS:
        few = plural(view.documents, f"evaluation {view.unit}")
        return f"{few} cannot carry a verdict: evaluate on at least {MINIMUM_DOCUMENTS}."
    scheme = view.audit.pick.scheme if view.audit.pick else None
    if scheme is None or view.last is None:
        return "No quantized loss was measured, so there is nothing to decide."
    return f"{cost(view, scheme)}; {_short_pick(view, view.audit.pick)}."


def cost(view: View, scheme: str) -> str:
    """Say what a scheme costs the last checkpoint, and what it cost at the end of a stage."""
    assert view.last is not None
    now = view.score(view.last.label, scheme)
    if now is None or now.relative_error is None:
        return f"{scheme} was not measured on the last checkpoint `{view.last.label}`"
    text = f"{_effect(scheme, now.relative_error)} the last checkpoint `{view.last.label}`"
    if view.stage_end is None or view.last.label == view.stage_end.label:
        return text
    before = view.score(view.stage_end.label, scheme)
    change = view.compared(
        "relative_error_difference", scheme, view.last.label, view.stage_end.label
    )
    if before is None or before.relative_error is None or change is None:
        return text
    return f"{text}, {_since(change, before, view.stage_end)}"


def _effect(scheme: str, error: Interval) -> str:
    shown = percent(error, unit=" %")
    if error.low > 0:
        return f"{scheme} raises the loss by {shown} at"
    if error.high < 0:
        return f"{scheme} lowers the loss ({shown}) at"
    if error.low == error.high == 0:
        return f"{scheme} changes nothing at"
    return f"{scheme} costs nothing that these documents can show ({shown}) at"


def _since(change: Comparison, before: Score, end: Subject) -> str:
    assert before.relative_error is not None
    where = percent(before.relative_error, unit=" %")
    where += f" at the end of {end.first.stage} (`{end.label}`)"
    words = {
        "b_better": f"up from {where}",
        "a_better": f"down from {where}",
        "equivalent": f"no different from {where}",
        "inconclusive": f"not to be told from {where}",
    }
    return words[change.verdict]


def _short_pick(view: View, pick: Pick | None) -> str:
    assert pick is not None
    if pick.reference is not None:
        return f"`{pick.subject}` at {pick.scheme} has the {pick.objective}"
    if pick.runner_up is None or pick.interval is None:
        return f"`{pick.subject}` is the only subject measured at {pick.scheme}"
    if pick.interval.high < 0:
        return f"the best to ship at {pick.scheme} is `{pick.subject}`"
    names = f"`{pick.subject}` and `{pick.runner_up}`"
    return f"the best to ship at {pick.scheme} is {names}: they cannot be told apart"


def pick_reasons(view: View) -> list[str]:
    """Say what to ship, how far it leads, and what that rests on."""
    pick = view.audit.pick
    if pick is None:
        return ["Nothing is picked: no subject has a finite quantized loss."]
    best = view.score(pick.subject, pick.scheme)
    level = f", {spread(best.ce)} nats per token" if best else ""
    what = pick.objective.removesuffix(f" at {pick.scheme}")
    said = [f"`{pick.subject}` at {pick.scheme} has the {what}{level}."]
    if pick.interval and pick.reference:
        said.append(_within(pick, pick.interval))
    elif pick.interval and pick.runner_up:
        said += [_lead(view, pick, pick.interval), least_against_best(view, pick)]
    if pick.interval:
        said += [_confirmation(pick), _contenders(pick)]
    if pick.changes:
        said.append(f"What would change it: {'; '.join(pick.changes)}.")
    return [sentence for sentence in said if sentence]


def _confirmation(pick: Pick) -> str:
    if pick.confirmed_on is not None:
        return f"Confirmed on {pick.confirmed_on}."
    if pick.reference is None and pick.interval and pick.interval.high >= 0:
        return ""  # the lead is none, which is said already
    return (
        "It was chosen and measured on the same documents, which flatters the winner: "
        "confirm it on others before shipping."
    )


def _contenders(pick: Pick) -> str:
    """Say who else may be the best, where that is not the runner-up alone."""
    others = [label for label in pick.contenders if label != pick.runner_up]
    if not others:
        return ""
    shown = listing([f"`{label}`" for label in others[:3]])
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return f"With all compared at once, {shown}{more} may be as good."


def _within(pick: Pick, excess: Interval) -> str:
    shown = percent(excess, unit=" %")
    return f"Its loss is {shown} above that of `{pick.reference}` in full precision."


def _lead(view: View, pick: Pick, lead: Interval) -> str:
    shown = f"Against the runner-up `{pick.runner_up}` it stands at {spread(lead)} nats per token"
    if view.documents < MINIMUM_DOCUMENTS:
        return f"{shown}: too few documents to call it a lead."
    if lead.high < 0:
        return f"{shown}: a lead that these documents confirm."
    if lead.low > 0:
        return f"{shown}: it was chosen on other documents, and on these the runner-up is better."
    return f"{shown}: these documents cannot tell the two apart."


def least_against_best(view: View, pick: Pick) -> str:
    """Tell what loses least to quantization from what is best when quantized."""
    errors = [
        (score.relative_error.estimate, subject.label, score.relative_error)
        for subject in view.subjects
        for score in [view.score(subject.label, pick.scheme)]
        if score is not None and score.relative_error is not None
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
        f"What loses least is another: `{least}` loses {shown}, "
        f"and ends {behind:.4f} nats per token behind."
    )


def trajectory(view: View) -> str:
    """Say under which schemes the relative error moved from the end of a stage to the end."""
    if view.last is None or view.stage_end is None:
        return ""
    a, b = view.last.label, view.stage_end.label
    found: dict[str, list[str]] = {}
    for scheme in view.schemes:
        change = view.compared("relative_error_difference", scheme, a, b)
        if change is not None:
            found.setdefault(change.verdict, []).append(scheme)
    words = {
        "b_better": "grew under",
        "a_better": "shrank under",
        "equivalent": "stayed the same under",
        "inconclusive": "cannot be told to have moved under",
    }
    parts = [f"{words[key]} {listing(found[key])}" for key in words if key in found]
    return f"From `{b}` to `{a}`, the relative error {'; it '.join(parts)}." if parts else ""


# --------------------------------------------------------------------- soups


def soup_reading(outright: Comparison, difference: Comparison) -> str:
    """Read two comparisons of a soup `a` with a checkpoint `b`, and say when they disagree."""
    better, loses = outright.verdict, difference.verdict
    readings = {
        ("a_better", "a_better"): "better, and loses less",
        ("a_better", "b_better"): "better, although it loses more",
        ("b_better", "a_better"): "worse, although it loses less",
        ("b_better", "b_better"): "worse, and loses more",
    }
    if (better, loses) in readings:
        return readings[better, loses]
    first = {"a_better": "better", "b_better": "worse", "equivalent": "as good"}
    second = {"a_better": "loses less", "b_better": "loses more", "equivalent": "loses as much"}
    if better == loses == "inconclusive":
        return "cannot be told apart"
    left = first.get(better, "not clearly better or worse")
    return f"{left}; {second.get(loses, 'not clear which loses more')}"


def disagree(outright: Comparison, difference: Comparison) -> bool:
    """Say whether the better model is the one that loses more."""
    return {outright.verdict, difference.verdict} == {"a_better", "b_better"}


def soup_summary(rows: list[tuple[str, Comparison, Comparison]], soup: str) -> str:
    """Count over schemes how a soup fares against its best ingredient."""
    parts = []
    for position, words in ((1, ("better", "worse")), (2, ("loses less", "loses more"))):
        verdicts = [row[position].verdict for row in rows]  # type: ignore[union-attr]
        a, b = verdicts.count("a_better"), verdicts.count("b_better")
        same = verdicts.count("equivalent")
        counted = [f"{words[0]} under {a}", f"{words[1]} under {b}"]
        counted += [f"the same under {same}"] if same else []
        counted += [f"unclear under {len(rows) - a - b - same}"]
        parts.append(", ".join(counted))
    schemes = plural(len(rows), "scheme")
    text = f"Over {schemes}, `{soup}` against the best of its ingredients at each: outright "
    text += f"{parts[0]}; in what quantization takes, {parts[1]}."
    against = [scheme for scheme, outright, difference in rows if disagree(outright, difference)]
    if against:
        text += f" The two questions have opposite answers under {listing(against)}."
    return text


# --------------------------------------------------------------------- the run


def memory(view: View) -> str:
    """Set the plan's estimate of memory beside the measured peak."""
    planned = f"{size(view.audit.plan.nbytes_memory)} planned above the libraries"
    peak = view.audit.environment.get("memory_peak_nbytes")
    baseline = view.audit.environment.get("memory_baseline_nbytes")
    if not isinstance(peak, int) or not isinstance(baseline, int):
        return f"{planned}, peak not measured"
    return f"{planned}, {size(max(0, peak - baseline))} measured"


def noise(view: View) -> str:
    """Name the three sources of noise and say which of them the intervals hold."""
    level = f"{100 * view.audit.plan.recipe.confidence:g} %"
    paired = f"paired on the same {plural(view.documents, view.unit)}"
    if view.draws > 1:
        return (
            f"Intervals hold {level} over {view.unit}s and over calibration text, {paired}, "
            f"with {view.draws} calibration draws of every scheme that calibrates."
        )
    return (
        f"Intervals hold {level} over {view.unit}s, {paired}. What is not in them: the luck of "
        f"the one calibration draw (`{NOT_MEASURED}`: `--repeats` measures it) and the numerical "
        f"floor (`{NOT_MEASURED}`)."
    )


def noise_budget(label: str, drawn: Sequence[Noise], full: Sequence[Noise]) -> str:
    """Say what the columns of the noise budget are, and what rounding does by itself."""
    text = (
        f"What the relative errors of `{label}` rest on, in percentage points: the standard "
        f"error over documents, the standard deviation of one calibration draw "
        f"({drawn[0].draws} were made), and what the same sums in another order moved it by. "
        "In brackets: their parts of the squared width of the interval."
    )
    moved = [row.numerical for row in full if row.numerical is not None]
    if not moved:
        return text
    return f"{text} Full precision in another order moved by {points(moved[0])}."


def seconds(view: View) -> str:
    """Say how long the measurements took, and what the plan thought."""
    spent = sum(score.seconds for score in view.audit.scores)
    plan = view.audit.plan
    return (
        f"{duration(spent)} ({duration(plan.seconds_low)} to {duration(plan.seconds_high)} planned)"
    )
