"""Every rule by its code: what it says, and why anybody should care.

Codes stay: a rule that goes leaves its number empty, because policies, ignores and dashboards
name them. QA001 and QA020 to QA027 hold an audit to a policy; the others judge what was found.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """What a rule says in one line, and what is behind it in a sentence or two."""

    title: str
    help: str


CODES: dict[str, Code] = {
    "QA001": Code(
        "a scheme costs more than its margin",
        "The relative error of the loss under a scheme is held to a margin, by its interval.",
    ),
    "QA002": Code(
        "the pick and its runner-up cannot be told apart",
        "On documents that neither was chosen on, their difference may be zero.",
    ),
    "QA003": Code(
        "a note: a fallback taken, a part left out",
        "What was measured differently from what was asked for is said, never only logged.",
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
        "what loses least is not what is best when quantized",
        "A model that has learned less can have less to lose: ship by quantized loss.",
    ),
    "QA008": Code(
        "quantization costs more at the end than at the end of an earlier stage",
        "Error that grows while the learning rate decays is what averaging weights takes back.",
    ),
    "QA009": Code(
        "checkpoints of different places in the run serve the same weights",
        "An upload went wrong: at most one of them is what its name says.",
    ),
    "QA010": Code(
        "a soup, or a release, holds the weights of one of its ingredients",
        "It is no average, and comparing it with that ingredient shows nothing.",
    ),
    "QA011": Code(
        "two names for one checkpoint",
        "It is measured and fetched once.",
    ),
    "QA012": Code("a revision holds no weights", "It is left out."),
    "QA013": Code(
        "a revision is said to be bad, and its hashes neither confirm nor refute it",
        "Others have reported it; its numbers deserve distrust.",
    ),
    "QA014": Code(
        "revisions that were said to be equal differ",
        "What is known of this family no longer holds.",
    ),
    "QA015": Code(
        "a checkpoint has some of its files from another one",
        "Its weights are a mixture that was never trained.",
    ),
    "QA016": Code(
        "a revision holds more than one set of weights",
        "One of them is measured, and the finding says which.",
    ),
    "QA017": Code(
        "a search for a soup stays at one candidate",
        "No other candidate made it better on the documents to choose on.",
    ),
    "QA018": Code(
        "the calibration draw makes more of the noise than the documents do",
        "More documents do not narrow such an interval; more draws do.",
    ),
    "QA019": Code(
        "a release is held against the soup that its makers say it is",
        "It is rebuilt from its ingredients and compared tensor by tensor.",
    ),
    "QA020": Code(
        "a scheme adds more loss than its margin",
        "The change in nats per token under a scheme is held to a margin, by its interval.",
    ),
    "QA021": Code(
        "a quantized loss is worse than the baseline's",
        "The difference is paired on the same documents and held to a margin.",
    ),
    "QA022": Code(
        "a relative error is worse than the baseline's",
        "The difference is paired on the same documents and held to a margin.",
    ),
    "QA023": Code(
        "a scheme costs more accuracy than its margin",
        "The drop is a part of what was left to get wrong.",
    ),
    "QA024": Code(
        "a soup is worse than its best member",
        "Averaging should not cost: the soup's quantized loss is compared with every member's.",
    ),
    "QA025": Code(
        "what a policy requires was not measured",
        "An audit that leaves it out cannot pass.",
    ),
    "QA026": Code(
        "too few documents for a verdict of the policy",
        "The policy asks for more of them before it judges.",
    ),
    "QA027": Code(
        "an ignore has expired, or matches nothing",
        "Ignores rot silently; this one no longer does what it was written for.",
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
        "A change point of the error along the series, set against the learning rate.",
    ),
    "QA035": Code(
        "one role makes most of the error",
        "With each role quantized alone, one of them adds more than all others together.",
    ),
    "QA036": Code(
        "a mixture of bits loses otherwise than its parts add up to",
        "What parts add by themselves is a prediction; the mixture was measured.",
    ),
}
