"""Every finding by its code: its title, and why it matters.

Codes stay: a rule that goes leaves its number empty, because policies, ignores and dashboards
name them. QA001, QA020 to QA027 and QA037 to QA041 hold an audit to a policy; the others judge
the audit itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """A finding in one line, and the reason for it in a sentence or two."""

    title: str
    help: str


CODES: dict[str, Code] = {
    "QA001": Code(
        "a scheme costs more than its margin",
        "The interval of the relative error of the loss is compared with a margin.",
    ),
    "QA002": Code(
        "the pick is indistinguishable from its runner-up",
        "On documents that neither was chosen on, their difference may be zero.",
    ),
    "QA003": Code(
        "a note: a fallback, or a part that was left out",
        "Whatever was measured differently from the request is in the report, not only in a log.",
    ),
    "QA004": Code(
        "few documents",
        "Intervals over few documents are wide, and below ten there is no verdict.",
    ),
    "QA005": Code(
        "the last checkpoint is not the best one quantized",
        "Another subject has a lower quantized loss, beyond what choosing among many explains.",
    ),
    "QA006": Code(
        "a loss is not finite",
        "The model is broken, or the scheme breaks it.",
    ),
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
    "QA011": Code(
        "two names for one checkpoint",
        "It is measured and fetched once.",
    ),
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
    "QA018": Code(
        "the calibration draw contributes more noise than the documents",
        "More documents do not narrow such an interval; more draws do.",
    ),
    "QA019": Code(
        "a release is compared with the soup that its makers describe",
        "It is rebuilt from its ingredients and compared tensor by tensor.",
    ),
    "QA020": Code(
        "a scheme adds more loss than its margin",
        "The interval of the change in nats per token is compared with a margin.",
    ),
    "QA021": Code(
        "a quantized loss is worse than the baseline's",
        "The difference is paired on the same documents and compared with a margin.",
    ),
    "QA022": Code(
        "a relative error is worse than the baseline's",
        "The difference is paired on the same documents and compared with a margin.",
    ),
    "QA023": Code(
        "a scheme costs more accuracy than its margin",
        "The drop is a fraction of the answers that full precision gets wrong.",
    ),
    "QA024": Code(
        "a soup is worse than its best member",
        "Averaging should not cost: the soup's quantized loss is compared with every member's.",
    ),
    "QA025": Code(
        "a measurement that the policy requires is missing",
        "An audit without it cannot pass.",
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
        "one document carries much of the damage",
        "Rare damage can be missed by any interval over documents, and this may be a sign of it.",
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
    "QA037": Code(
        "a scheme diverges from full precision by more than its margin",
        "The mean KL divergence of its predictions is compared with a margin.",
    ),
    "QA038": Code(
        "a scheme diverges by more than its margin at one token in a thousand",
        "The mean hides rare tokens at which predictions change beyond recognition.",
    ),
    "QA039": Code(
        "a scheme changes the likeliest token more often than its margin",
        "Greedy decoding takes another way at such a token.",
    ),
    "QA040": Code(
        "a bit class has no answer",
        "The policy asks for it, and no rule covers what ships, or nothing of it was measured.",
    ),
    "QA041": Code(
        "a scheme flips more answers than its margin",
        "Accuracy may stand still while answers change both ways; users see each of them.",
    ),
    "QA042": Code(
        "a shipped file is dominated",
        "Another file, or a scheme, takes no more bytes and diverges less from full precision.",
    ),
    "QA043": Code(
        "a shipped file looks broken",
        "Its weights are farther from those of the base than its codes explain, in a known way.",
    ),
    "QA044": Code(
        "subjects were measured on devices of several kinds",
        "Each kind rounds otherwise; one subject is measured on each of them to show how far.",
    ),
}
