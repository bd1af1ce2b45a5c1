"""What `qaudit doctor` prints: the facts by what they are about, then what to do."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

from qaudit import __version__
from qaudit.engine.doctor import Fact, examine

_MARKS = {"ok": " ", "without": "-", "fault": "!"}


def examined() -> tuple[Fact, ...]:
    """Look at everything, without what libraries mutter when they load."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return examine()


def as_rows(facts: Sequence[Fact]) -> str:
    """Return the facts as JSON."""
    return json.dumps({"qaudit": __version__, "facts": [asdict(f) for f in facts]}, indent=1)


def as_text(facts: Sequence[Fact]) -> str:
    """Return the facts for a person; `-` is without, `!` is broken."""
    width = max(len(fact.name) for fact in facts)
    lines = [f"qaudit {__version__}"]
    for about, group in groupby(facts, key=lambda fact: fact.about):
        lines += ["", about]
        for fact in group:
            lines.append(f"{_MARKS[fact.state]} {fact.name:<{width}}  {fact.value}")
            if fact.hint:
                lines.append(f"  {'':<{width}}  {fact.hint}")
    return "\n".join(lines)
