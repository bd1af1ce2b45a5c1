"""Every finding by its code: its title, and why it matters.

Codes stay: a rule that goes leaves its number empty, because policies, ignores and dashboards
name them. QA001, QA020 to QA027, QA037 to QA041, QA045 and QA047 to QA050 hold an audit to a
policy; the others judge the audit itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from qaudit.types.metrics import METRICS


@dataclass(frozen=True)
class Code:
    """A finding in one line, and the reason for it in a sentence or two."""

    title: str
    help: str


_OF_AUDITS: dict[str, Code] = {
    "QA002": Code(
        "the pick is indistinguishable from its runner-up",
        "On documents that neither was chosen on, their difference may be zero.",
    ),
    "QA003": Code(
        "a note: a fallback, or a part that was left out",
        "Whatever was measured differently from the request is in the report, not only in a log.",
    ),
    "QA004": Code(
        "few documents", "Intervals over few documents are wide, and below ten there is no verdict."
    ),
    "QA005": Code(
        "the last checkpoint is not the best one quantized",
        "Another subject has a lower quantized loss, beyond what choosing among many explains.",
    ),
    "QA006": Code("a loss is not finite", "The model is broken, or the scheme breaks it."),
    "QA007": Code(
        "the subject that loses least is not the best one quantized",
        "A model that has learned less can have less to lose: ship by quantized loss.",
    ),
    "QA008": Code(
        "quantization costs more at the end than at the end of an earlier stage",
        "Averaging weights takes back error that grows while the learning rate decays.",
    ),
    "QA009": Code(
        "checkpoints of different places in the run have the same weights",
        "An upload went wrong: at most one of them matches its name.",
    ),
    "QA010": Code(
        "a soup, or a release, has the weights of one of its ingredients",
        "It is no average, and comparing it with that ingredient shows nothing.",
    ),
    "QA011": Code("two names for one checkpoint", "It is measured and fetched once."),
    "QA012": Code("a revision has no weights", "It is left out."),
    "QA013": Code(
        "a revision is reported to be bad, and its hashes neither confirm nor refute it",
        "Do not rely on its numbers before the report is settled.",
    ),
    "QA014": Code(
        "revisions that were reported to be equal differ",
        "The family file is out of date for them.",
    ),
    "QA015": Code(
        "a checkpoint has some of its files from another one",
        "Its weights are a mixture that was never trained.",
    ),
    "QA016": Code(
        "a revision has more than one set of weights",
        "One of them is measured, and the finding names it.",
    ),
    "QA017": Code(
        "a search for a soup stays at one candidate",
        "No other candidate made it better on the documents to choose on.",
    ),
    "QA025": Code(
        "a measurement that the policy requires is missing", "An audit without it cannot pass."
    ),
    "QA026": Code(
        "too few documents for a verdict of the policy",
        "The policy requires more of them before it judges.",
    ),
    "QA027": Code(
        "an ignore has expired, or matches nothing",
        "It no longer does what it was written for: remove or renew it.",
    ),
    "QA028": Code(
        "a model's predictions ignore the text",
        "Its loss per token is the same on every document, as with weights that are all zero.",
    ),
    "QA029": Code(
        "one document carries much of the added loss",
        "Any interval over documents can miss an added loss that is rare, as this one may be.",
    ),
    "QA030": Code(
        "ship an earlier checkpoint",
        "Quantization costs more from some point of the series on than full precision gains.",
    ),
    "QA031": Code(
        "train no further",
        "Full-precision loss has stopped improving while quantization error grows.",
    ),
    "QA032": Code(
        "quantization error changes its course",
        "A change point of the error along the series, compared with the learning rate.",
    ),
    "QA035": Code(
        "one role causes most of the error",
        "With each role quantized alone, one of them adds more than all others together.",
    ),
    "QA036": Code(
        "a mixture of bits loses other than the sum of its parts",
        "The sum of what parts add alone is a prediction; the mixture was measured.",
    ),
    "QA040": Code(
        "a bit class has no answer",
        "The policy asks for it, and no rule covers what ships, or nothing of it was measured.",
    ),
    "QA042": Code(
        "a shipped file is dominated",
        "Another file, or a scheme, takes no more bytes and diverges less from full precision.",
    ),
    "QA043": Code(
        "a shipped file looks broken",
        "Its weights are farther from those of the base than its codes explain, in a known way.",
    ),
    "QA046": Code(
        "documents have equal sums",
        "Documents with the same losses in every measurement are copies, and one observation.",
    ),
}

_OF_METRICS = {metric.code: Code(metric.title, metric.reason) for metric in METRICS.values()}
CODES: dict[str, Code] = dict(sorted((_OF_AUDITS | _OF_METRICS).items()))
