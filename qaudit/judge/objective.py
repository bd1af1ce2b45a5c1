"""What "best" means: the objective of a pick.

loss              the lowest quantized loss, at gptq-4bit or else the first scheme measured
loss@awq-3bit     the same at a scheme of one's own
bits@1%           the fewest bits per weight whose loss stays within 1 % of the best loss in
                  full precision, over all subjects
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from qaudit.core.keys import nearest
from qaudit.errors import UsageError

PREFERRED = "gptq-4bit"
EXAMPLES = ("loss", f"loss@{PREFERRED}", "bits@1%", "pareto")


@dataclass(frozen=True)
class Objective:
    """One of the forms above."""

    kind: Literal["loss", "bits"] = "loss"
    scheme: str | None = None
    margin: float | None = None

    def __str__(self) -> str:
        """Print what `parse_objective` reads."""
        if self.kind == "bits":
            return f"bits@{100 * (self.margin or 0):g}%"
        return f"loss@{self.scheme}" if self.scheme else "loss"


def parse_objective(text: str) -> Objective:
    """Read an objective."""
    kind, at, rest = text.strip().partition("@")
    if kind == "loss" and (rest or not at):
        return Objective("loss", scheme=rest or None)
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
