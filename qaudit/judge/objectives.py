"""What "best" means, as a text.

loss              the lowest quantized loss
loss@awq-3bit     the same at one scheme
kl                the lowest KL divergence to full precision, among the schemes of the subject that
                  has the lowest quantized loss
bits@1%           the fewest bits per weight whose loss stays within 1 % of the best loss in
                  full precision, over all subjects
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from qaudit.errors import UsageError
from qaudit.settings import SEARCHED_AT
from qaudit.support.keys import nearest

EXAMPLES = ("loss", f"loss@{SEARCHED_AT}", "kl", "bits@1%", "pareto")


@dataclass(frozen=True)
class Objective:
    """One of the forms above."""

    kind: Literal["loss", "kl", "bits"] = "loss"
    scheme: str | None = None
    margin: float | None = None

    def __str__(self) -> str:
        if self.kind == "bits":
            return f"bits@{100 * (self.margin or 0):g}%"
        return f"{self.kind}@{self.scheme}" if self.scheme else self.kind


LOSS = Objective()


def parse_objective(text: str) -> Objective:
    kind, at, rest = text.strip().partition("@")
    if kind == "loss" and (rest or not at):
        return Objective("loss", scheme=rest or None)
    if kind == "kl" and not at:
        return Objective("kl")
    if kind == "bits":
        return Objective("bits", margin=_margin(text, rest))
    raise UsageError(f"there is no objective `{text}`", hint=nearest(text, EXAMPLES))


def _margin(text: str, rest: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", rest)
    if match is None:
        raise UsageError(f"`{text}` has no margin in percent", hint="write `bits@1%`")
    margin = float(match[1]) / (100 if match[2] else 1)
    if not 0 < margin < 1:
        raise UsageError(
            f"a margin of {100 * margin:g} % is not between 0 and 100 %", hint="write `bits@1%`"
        )
    return margin
