"""Names and sentences of others, put into Markdown so that they stay names and sentences.

Revision names, notes and reasons come from repositories and files; none of them may open a
tag, end a table cell, start a link or imitate the markers around the card.
"""

from __future__ import annotations

import re

from qaudit.report.format import printable

_ACTIVE = re.compile(r"([\\`*_|~]|(?<=\])[(:])|(^\s*[-+#>])")


def code(name: str) -> str:
    """Show a name as code."""
    safe = printable(name).replace("`", "'").replace("<!--", "<! --")
    return f"`{safe.strip() or '?'}`"


def cell(name: str) -> str:
    """Show a name as code inside a table, where a bar would end the cell even in code."""
    return code(name).replace("|", "\\|")


def plain(text: str) -> str:
    """Show text as it is."""
    safe = printable(text).replace("&", "&amp;").replace("<", "&lt;")
    return _ACTIVE.sub(r"\\\g<0>", safe)


def prose(text: str) -> str:
    """Show a sentence of ours, in which names stand between backticks."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # an odd backtick belongs to a name: nothing can be trusted as code
        return plain(text)
    return "".join(code(part) if k % 2 else plain(part) for k, part in enumerate(parts) if part)


def folded(title: str, body: str) -> str:
    """Hide a part until it is asked for."""
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"
