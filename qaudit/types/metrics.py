"""What a policy may bound: a record for each metric, which says everything about it.

A new metric is a name in `Metric` and a record here. Its statistic is a function of
`core/statistics.py`, of `core/items.py` for tasks, or a new one there. The published schemas are
made again by `python -m qaudit.policy.keys` and `python -m qaudit.saved.audits`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from qaudit.types.rows import Interval

NEAR_BASELINE = 0.005
"""Nats per token: below it a KL divergence says how much predictions move, and not which way.

Over 69 quantized files its rank correlation with benchmark scores is -0.7 to -0.9 in all and none
near full precision (2606.19558); over ten subjects of the demo that with the added loss is 0.3 at
8 bits, 0.6 to 0.9 at 4 and 0.95 at 3.
"""

Metric = Literal[
    "relative_error",  # what quantization adds, as a part of the loss in full precision
    "absolute_change",  # the same in nats per token
    "loss_against_baseline",  # nats per token: this quantized loss minus the baseline's
    "error_against_baseline",  # a fraction: this added loss minus the baseline's
    "accuracy_drop",  # a fraction of the answers that full precision gets wrong
    "soup_against_members",  # nats per token: the soup's quantized loss minus its best member's
    "kl",  # nats per token: KL divergence to full precision
    "kl_p999",  # nats: what the KL divergence of one token in a thousand exceeds
    "flips",  # a fraction of items whose answer went from right to wrong or back
    "top1",  # a fraction of tokens whose likeliest token is another than in full precision
    "sure_top1",  # the same of tokens whose likeliest one has at least 0.5 in full precision
    "routing_agreement",  # a fraction of tokens with other experts than in full precision
    "tokens_to_divergence",  # of greedy rollouts, until the first that is another: the median
    "answer_length",  # a fraction: the change of the probability of ending a turn, up or down
    "expected_score_drop",  # of marked rollouts: the score of full precision less the scheme's
]
Unit = Literal["fraction", "nats", "tokens"]
Sums = Literal[
    "losses", "divergences", "disagreements", "sure_flips", "reroutings", "items", "rollouts"
]


@dataclass(frozen=True, kw_only=True)
class MetricRecord:
    """A metric of a policy."""

    code: str  # of its finding
    title: str
    reason: str  # why it matters
    unit: Unit
    sentence: str  # of a check, before its margin
    hint: str = "ship another subject or scheme: `qaudit pick` names one"  # about a breach
    sums: Sums = "losses"  # what is summed over the tokens of each document; of tasks the items
    statistic: str
    quantile: float | None = None  # of tokens, in place of a mean
    worse: str | None = None  # the statistic of being worse than before; None: by both intervals
    against: Literal["baseline", "members"] | None = None  # None: against full precision
    by_stratum: bool = False  # whether the worst stratum can be judged
    compared: str = ""  # what is missing where it was not measured
    at_least: bool = False  # the margin is the least that is enough, and not the most

    @property
    def of_fidelity(self) -> bool:
        """Whether predictions are compared with those of full precision, token by token."""
        return self.sums in ("divergences", "disagreements", "sure_flips", "reroutings")

    @property
    def of_tasks(self) -> bool:
        """Whether the items of tasks are counted."""
        return self.sums == "items"

    @property
    def of_rollouts(self) -> bool:
        """Whether prompts are counted, and what was written behind them."""
        return self.sums == "rollouts"

    def reaches(self, interval: Interval, margin: float) -> tuple[bool, bool]:
        """Return whether an interval is wholly within the margin, and wholly beyond it."""
        if self.at_least:
            return interval.low >= margin, interval.high < margin
        return interval.high <= margin, interval.low > margin

    @property
    def needs_baseline(self) -> bool:
        return self.against == "baseline"

    @property
    def has_full_precision(self) -> bool:
        """Whether full precision can be judged: losses are compared as they are."""
        return self.against is not None and self.statistic == "change"


METRICS: Mapping[str, MetricRecord] = {
    "relative_error": MetricRecord(
        code="QA001",
        title="a scheme costs more than its margin",
        reason="The interval of the added loss is compared with a margin.",
        unit="fraction",
        sentence="{scheme} raises the loss of `{subject}` by {change}",
        statistic="excess",
        worse="excess_difference",
        by_stratum=True,
    ),
    "absolute_change": MetricRecord(
        code="QA020",
        title="a scheme adds more loss than its margin",
        reason="The interval of the change in nats per token is compared with a margin.",
        unit="nats",
        sentence="{scheme} raises the loss of `{subject}` by {change}",
        statistic="change",
        worse="change_difference",
        by_stratum=True,
    ),
    "loss_against_baseline": MetricRecord(
        code="QA021",
        title="a quantized loss is worse than the baseline's",
        reason="The difference is paired on the same documents and compared with a margin.",
        unit="nats",
        sentence="at {scheme} the loss of `{subject}` minus that of the baseline's "
        "`{against}` is {change}",
        statistic="change",
        against="baseline",
        hint="ship another subject, or keep the release before",
    ),
    "error_against_baseline": MetricRecord(
        code="QA022",
        title="the added loss is worse than the baseline's",
        reason="The difference is paired on the same documents and compared with a margin.",
        unit="fraction",
        sentence="at {scheme} the added loss of `{subject}` minus that of the "
        "baseline's `{against}` is {change}",
        statistic="excess_difference",
        against="baseline",
        hint="ship another subject: this one is more fragile than the last",
    ),
    "accuracy_drop": MetricRecord(
        code="QA023",
        title="a scheme costs more accuracy than its margin",
        reason="The drop is a fraction of the answers that full precision gets wrong.",
        unit="fraction",
        sentence="{scheme} raises the errors of `{subject}` on tasks by {change}",
        sums="items",
        statistic="error_increase",
    ),
    "soup_against_members": MetricRecord(
        code="QA024",
        title="a soup is worse than its best member",
        reason="Averaging should not cost: the soup's quantized loss is compared with "
        "every member's.",
        unit="nats",
        sentence="at {scheme} the loss of `{subject}` minus that of its best member "
        "`{against}` is {change}",
        statistic="change",
        worse="change",
        against="members",
        hint="ship that member, or leave it out of the soup",
    ),
    "kl": MetricRecord(
        code="QA037",
        title="a scheme diverges from full precision by more than its margin",
        reason="The mean KL divergence of its predictions is compared with a margin.",
        unit="nats",
        sentence="at {scheme} the KL divergence of `{subject}` to full precision is {change}",
        sums="divergences",
        statistic="per_token",
        worse="change",
        by_stratum=True,
        compared="the KL divergence",
    ),
    "kl_p999": MetricRecord(
        code="QA038",
        title="a scheme diverges by more than its margin at one token in a thousand",
        reason="The mean hides rare tokens at which predictions change beyond recognition.",
        unit="nats",
        sentence="at {scheme} the KL divergence of `{subject}` at one token in a "
        "thousand exceeds {change}",
        sums="divergences",
        statistic="per_token",
        quantile=0.999,
        compared="the KL divergence of one token in a thousand",
    ),
    "flips": MetricRecord(
        code="QA041",
        title="a scheme flips more answers than its margin",
        reason="Accuracy may stand still while answers change both ways; users see each of them.",
        unit="fraction",
        sentence="{scheme} flips {change} of the answers of `{subject}`",
        sums="items",
        statistic="flips",
    ),
    "top1": MetricRecord(
        code="QA039",
        title="a scheme changes the likeliest token more often than its margin",
        reason="Greedy decoding takes another way at such a token.",
        unit="fraction",
        sentence="{scheme} changes the likeliest token of `{subject}` at {change} of tokens",
        sums="disagreements",
        statistic="per_token",
        worse="change",
        compared="the likeliest token",
    ),
    "sure_top1": MetricRecord(
        code="QA050",
        title="a scheme changes a sure token more often than its margin",
        reason="Near full precision most changes are between tokens about as likely as each other; "
        "where it is sure, a change is an error of quantization.",
        unit="fraction",
        sentence="{scheme} changes the likeliest token of `{subject}`, where full precision gives "
        "it at least 0.5, at {change} of these tokens",
        sums="sure_flips",
        statistic="per_token",
        compared="how often sure tokens change",
    ),
    "routing_agreement": MetricRecord(
        code="QA045",
        title="a scheme sends tokens to other experts more often than its margin",
        reason="A router that is not quantized reads what quantized blocks return.",
        unit="fraction",
        sentence="{scheme} sends tokens of `{subject}` to other experts at {change} of tokens and "
        "layers",
        sums="reroutings",
        statistic="per_token",
        worse="change",
        compared="the choice of experts",
    ),
    "tokens_to_divergence": MetricRecord(
        code="QA047",
        title="greedy answers change earlier than the margin",
        reason="Along greedy rollouts, the first token that the scheme would not choose: from "
        "there on users read another answer.",
        unit="tokens",
        sentence="at {scheme} half of the greedy answers of `{subject}` change within {change}",
        sums="rollouts",
        statistic="tokens_to_divergence",
        compared="the length of equal greedy answers",
        at_least=True,
    ),
    "answer_length": MetricRecord(
        code="QA048",
        title="a scheme changes when answers end by more than its margin",
        reason="The probability of ending a turn, summed over rollouts: more makes answers "
        "shorter, less makes them longer.",
        unit="fraction",
        sentence="{scheme} changes the probability that answers of `{subject}` end by {change}",
        sums="rollouts",
        statistic="answer_length",
        compared="the length of answers",
    ),
    "expected_score_drop": MetricRecord(
        code="QA049",
        title="a scheme is expected to score less than its margin allows",
        reason="Marked answers of full precision, weighed by how much more or less the scheme "
        "would write them.",
        unit="fraction",
        sentence="{scheme} lowers the expected score of `{subject}` by {change}",
        sums="rollouts",
        statistic="expected_drop",
        compared="the expected score",
    ),
}


@dataclass(frozen=True)
class Code:
    """A finding in one line, and the reason for it in a sentence or two."""

    title: str
    help: str


_OF_AUDITS = """
QA002 the pick is indistinguishable from its runner-up
    The interval of their difference, over all documents, holds zero.
QA003 a note: a fallback, or a part that was left out
    Whatever was measured differently from the request is in the report, not only in a log.
QA004 few documents
    Intervals over few documents are wide, and below ten there is no verdict.
QA005 the last checkpoint is not the best one quantized
    Another subject has a lower quantized loss, beyond what choosing among many explains.
QA006 a loss is not finite
    The model is broken, or the scheme breaks it.
QA007 the subject that loses least is not the best one quantized
    A model that has learned less can have less to lose: ship by quantized loss.
QA008 quantization costs more at the end than at the end of an earlier stage
    Averaging weights takes back error that grows while the learning rate decays.
QA009 checkpoints of different places in the run have the same weights
    An upload went wrong: at most one of them matches its name.
QA010 a soup, or a release, has the weights of one of its ingredients
    It is no average, and comparing it with that ingredient shows nothing.
QA011 two names for one checkpoint
    It is measured and fetched once.
QA012 a revision has no weights
    It is left out.
QA013 a revision is reported to be bad, and its hashes neither confirm nor refute it
    Do not rely on its numbers before the report is settled.
QA014 revisions that were reported to be equal differ
    The family file is out of date for them.
QA015 a checkpoint has some of its files from another one
    Its weights are a mixture that was never trained.
QA016 a revision has more than one set of weights
    One of them is measured, and the finding names it.
QA017 a search for a soup stays at one candidate
    No other candidate made it better.
QA025 a measurement that the policy requires is missing
    An audit without it cannot pass.
QA026 too few documents for a verdict of the policy
    The policy requires more of them before it judges.
QA027 an ignore has expired, or matches nothing
    It no longer does what it was written for: remove or renew it.
QA028 a model's predictions ignore the text
    Its loss per token is the same on every document, as with weights that are all zero.
QA029 one document carries much of the added loss
    Any interval over documents can miss an added loss that is rare, as this one may be.
QA030 ship an earlier checkpoint
    Quantization costs more from some point of the series on than full precision gains.
QA031 train no further
    Full-precision loss has stopped improving while quantization error grows.
QA032 quantization error changes its course
    A change point of the error along the series, compared with the learning rate.
QA035 one role causes most of the error
    With each role quantized alone, one of them adds more than all others together.
QA040 a bit class has no answer
    The policy asks for it, and no rule covers what ships, or nothing of it was measured.
QA042 a shipped file is dominated
    Another file, or a scheme, takes no more bytes and diverges less from full precision.
QA043 a shipped file looks broken
    Its weights are farther from those of the base than its codes explain, in a known way.
QA046 documents have equal sums
    Documents with the same losses in every measurement are copies, and one observation.
"""
"""A title, and beneath it a reason, for each code of what is no metric."""

_ENTRIES = re.findall(r"(QA\d+) (.+)\n +(.+)", _OF_AUDITS)
CODES: dict[str, Code] = {code: Code(title, text) for code, title, text in _ENTRIES}
CODES |= {metric.code: Code(metric.title, metric.reason) for metric in METRICS.values()}
CODES = dict(sorted(CODES.items()))


def bound_of(margin: float, unit: Unit) -> str:
    """Print a margin: `2 %`, `1 nat`, `0.5 nats`."""
    if unit == "fraction":
        return f"{100 * margin:g} %"
    return f"{margin:g} {unit.removesuffix('s') if margin == 1 else unit}"


def in_unit(interval: Interval, unit: Unit) -> str:
    """Print an interval in its unit, with two significant digits of its half-width."""
    values = (interval.estimate, interval.low, interval.high)
    if unit == "tokens":
        estimate, low, high = (f"{value:,.0f}" for value in values)
        named = f"{estimate} tokens" if math.isfinite(interval.estimate) else "more than is written"
        return f"{named} [{low}, {high}]"
    scale, name = (100.0, "%") if unit == "fraction" else (1.0, "nats per token")
    if not any(values):
        return f"0 {name}"
    half, digits = scale * (interval.high - interval.low) / 2, 3
    if math.isfinite(half) and half > 0:
        digits = min(6, max(1, 1 - math.floor(math.log10(half))))
    estimate, low, high = (f"{scale * value:.{digits}f}" for value in values)
    return f"{estimate} {name} [{low}, {high}]"
