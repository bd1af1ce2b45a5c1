"""`qaudit doctor`: what this machine can do."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

from qaudit.cli.options import AsJson
from qaudit.cli.terminal import print_result
from qaudit.version import __version__

if TYPE_CHECKING:
    from qaudit.engine.doctor import Fact

_MARKS = {"ok": " ", "without": "-", "fault": "!"}


def doctor(as_json: AsJson = False) -> int:
    """Check device, memory, libraries, Hub and cache, and print what to install for what.

    Exits with 4 when something is broken that scans need.

    Example: qaudit doctor
    """
    from qaudit.engine.doctor import examine

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what libraries print when they load
        facts = examine()
    if as_json:
        rows = {"qaudit": __version__, "facts": [asdict(fact) for fact in facts]}
        print_result(json.dumps(rows, indent=1))
    else:
        print_result(_text(facts))
    return 4 if any(fact.state == "fault" for fact in facts) else 0


def _text(facts: Sequence[Fact]) -> str:
    from qaudit.report.terminal import hanging

    width = max(len(fact.name) for fact in facts)
    lines = [f"qaudit {__version__}"]
    for about, group in groupby(facts, key=lambda fact: fact.about):
        lines += ["", about]
        for fact in group:
            head = f"{_MARKS[fact.state]} {fact.name:<{width}}  "
            lines.append(hanging(head, fact.value))
            lines += [hanging(" " * len(head), fact.hint)] if fact.hint else []
    return "\n".join(lines)
