"""Write what repeats the code: docs/options.md.

make readme
"""

from __future__ import annotations

from tests.house import commands

if __name__ == "__main__":
    commands.PAGE.write_text(commands.page(), encoding="utf-8")
