"""Sentences on the parts of an audit, every one computed from its numbers.

Names are between backticks. Where an interval does not decide, the sentence is inconclusive and
never leans to the side of the estimate.
"""

from __future__ import annotations

from collections.abc import Sequence

from qaudit.report.format import (
    NOT_MEASURED,
    duration,
    listing,
    plural,
    points,
    size,
)
from qaudit.report.views import View
from qaudit.types import Comparison, Noise


def trajectory(view: View) -> str:
    """Name the schemes under which the relative error moved from the end of a stage to the end."""
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
        "inconclusive": "shows no detectable change under",
    }
    parts = [f"{words[key]} {listing(found[key])}" for key in words if key in found]
    return f"From `{b}` to `{a}`, the relative error {'; it '.join(parts)}." if parts else ""


# --------------------------------------------------------------------- soups


def soup_reading(outright: Comparison, difference: Comparison) -> str:
    """Put two comparisons of a soup `a` with a checkpoint `b` into words."""
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
        return "indistinguishable"
    left = first.get(better, "no detectable difference")
    return f"{left}; {second.get(loses, 'what it loses is inconclusive')}"


def disagree(outright: Comparison, difference: Comparison) -> bool:
    """Return whether the better model is the one that loses more."""
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
        counted += [f"inconclusive under {len(rows) - a - b - same}"]
        parts.append(", ".join(counted))
    schemes = plural(len(rows), "scheme")
    text = f"Over {schemes}, `{soup}` against the best of its ingredients at each: outright "
    text += f"{parts[0]}; in what quantization adds to the loss, {parts[1]}."
    against = [scheme for scheme, outright, difference in rows if disagree(outright, difference)]
    if against:
        text += f" The two questions have opposite answers under {listing(against)}."
    return text


# --------------------------------------------------------------------- the run


def memory(view: View) -> str:
    """Return the plan's estimate of memory and the measured peak."""
    planned = f"{size(view.audit.plan.nbytes_memory)} planned above the libraries"
    peak = view.audit.environment.get("memory_peak_nbytes")
    baseline = view.audit.environment.get("memory_baseline_nbytes")
    if not isinstance(peak, int) or not isinstance(baseline, int):
        return f"{planned}, peak not measured"
    return f"{planned}, {size(max(0, peak - baseline))} measured"


def noise(view: View) -> str:
    """Name the three sources of noise, and which of them the intervals include."""
    level = f"{100 * view.audit.plan.recipe.confidence:g} %"
    paired = f"paired on the same {plural(view.documents, view.unit)}"
    if view.draws > 1:
        return (
            f"Intervals are at {level} over {view.unit}s and over calibration text, {paired}, "
            f"with {view.draws} calibration draws of every scheme that calibrates."
        )
    return (
        f"Intervals are at {level} over {view.unit}s, {paired}. They leave out the one "
        f"calibration draw (`{NOT_MEASURED}`: `--repeats` measures it) and the numerical floor "
        f"(`{NOT_MEASURED}`)."
    )


def noise_budget(label: str, drawn: Sequence[Noise], full: Sequence[Noise]) -> str:
    """Explain the columns of the noise budget, and what rounding does by itself."""
    text = (
        f"What makes the relative errors of `{label}` uncertain, in percentage points: the "
        f"standard error over documents, the standard deviation of one calibration draw "
        f"({drawn[0].draws} were made), and the change when the same sums are added in another "
        "order. In brackets: their shares of the squared width of the interval."
    )
    moved = [row.numerical for row in full if row.numerical is not None]
    if not moved:
        return text
    return f"{text} Full precision in another order moved by {points(moved[0])}."


def seconds(view: View) -> str:
    """Return how long the measurements took, and what the plan estimated."""
    spent = sum(score.seconds for score in view.audit.measurements)
    plan = view.audit.plan
    return (
        f"{duration(spent)} ({duration(plan.seconds_low)} to {duration(plan.seconds_high)} planned)"
    )
