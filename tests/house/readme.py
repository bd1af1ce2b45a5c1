"""Write what repeats the code: docs/options.md and docs/findings.md.

make readme
"""

from __future__ import annotations

from qaudit.types.codes import CODES
from tests.house import commands
from tests.house.source import ROOT

FINDINGS = ROOT / "docs" / "findings.md"
HEAD = """# Every finding, by its code

<!-- written by `make readme` from the codes themselves: edit those -->

A finding has a code, which never changes its meaning: policies, ignores and dashboards name it.
QA001, QA020 to QA027, QA037 to QA041, QA045 and QA047 to QA049 hold an audit to a
[policy](policy.md); the others judge the audit itself. The card shows the worst of each code,
`audit.json` all of them under `findings`, and `qaudit list rules` prints the codes.

| code | finding | why it matters |
| --- | --- | --- |
"""


def findings() -> str:
    """Return the page of findings."""
    rows = (f"| {code} | {entry.title} | {entry.help} |\n" for code, entry in CODES.items())
    return HEAD + "".join(rows)


if __name__ == "__main__":
    commands.PAGE.write_text(commands.page(), encoding="utf-8")
    FINDINGS.write_text(findings(), encoding="utf-8")
