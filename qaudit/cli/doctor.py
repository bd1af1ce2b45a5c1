"""`qaudit doctor`: what this machine can do."""

from __future__ import annotations

import sys

from qaudit.cli import options as o


def doctor(as_json: o.AsJson = False) -> None:
    """Look at device, memory, libraries, Hub and cache, and say what to install for what.

    Exits with 4 when something is broken that audits need.

    Example: qaudit doctor
    """
    from qaudit.cli.doctoring import as_rows, as_text, examined
    from qaudit.cli.speech import print_result

    facts = examined()
    print_result(as_rows(facts) if as_json else as_text(facts))
    sys.exit(4 if any(fact.state == "fault" for fact in facts) else 0)
