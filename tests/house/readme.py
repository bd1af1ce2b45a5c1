"""Write what repeats the code: the help in README.md, between two markers, and docs/options.md.

make readme
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.house import commands
from tests.house.source import ROOT

README = ROOT / "README.md"


def help_text() -> str:
    """Return what `qaudit --help` prints in a terminal of 80 columns."""
    code = "import sys; sys.argv = ['qaudit', '--help']; from qaudit.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "80", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = (line.rstrip() for line in done.stdout.strip().splitlines())
    return "```console\n$ qaudit --help\n" + "\n".join(lines) + "\n```"


def rendered(text: str) -> str:
    """Return README's text with the help brought up to date."""
    marked = re.compile(r"(<!-- help -->\n).*?(\n<!-- /help -->)", re.S)
    assert marked.search(text), "README.md lacks the markers of its help"
    return marked.sub(lambda match: match[1] + help_text() + match[2], text)


if __name__ == "__main__":
    README.write_text(rendered(README.read_text(encoding="utf-8")), encoding="utf-8")
    commands.PAGE.write_text(commands.page(), encoding="utf-8")
