"""Names and sentences of others, put into Markdown so that they stay names and sentences.

Revision names, notes and reasons come from repositories and files; none of them may open a
tag, end a table cell, start a link or imitate the markers around the card.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from tabulate import tabulate

from qaudit.report.format import printable

LONGEST_NAME = 255
_NUMBERED = re.compile(r"^(\s*\d{1,9})([.)])(?=\s|$)")
_ACTIVE = re.compile(r"([\\`*_|~]|(?<=\])[(:])|(^\s*[-+#>])")


def code(name: str) -> str:
    """Show a name as code; of a name without end, both ends."""
    safe = printable(name).replace("`", "'").replace("<!--", "<! --").strip()
    if len(safe) > LONGEST_NAME:
        safe = f"{safe[: LONGEST_NAME // 2]}..{safe[-LONGEST_NAME // 2 :]}"
    return f"`{safe or '?'}`"


def cell(name: str) -> str:
    """Show a name as code inside a table.

    A bar ends a cell even in code, and what a backslash before it does depends on who reads:
    names with either are spelled in entities, which all readers agree on.
    """
    shown = code(name)
    if not set(shown) & set("|\\"):
        return shown
    return f"<code>{re.sub(r'[^A-Za-z0-9 ]', lambda m: f'&#{ord(m[0])};', shown[1:-1])}</code>"


def plain(text: str) -> str:
    """Show text as it is."""
    safe = printable(text).replace("&", "&amp;").replace("<", "&lt;")
    return _NUMBERED.sub(r"\1\\\2", _ACTIVE.sub(r"\\\g<0>", safe))


def prose(text: str) -> str:
    """Show a sentence of ours, in which names stand between backticks."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # an odd backtick belongs to a name: nothing can be trusted as code
        return plain(text)
    return "".join(code(part) if k % 2 else plain(part) for k, part in enumerate(parts) if part)


def folded(title: str, body: str) -> str:
    """Hide a part until it is asked for; a title is HTML, in which Markdown is not read."""
    safe = html.escape(printable(title), quote=False)
    return f"<details><summary>{safe}</summary>\n\n{body}\n\n</details>"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, without the spaces that align it: they are a third of a long card."""
    text = tabulate(rows, header, tablefmt="pipe", disable_numparse=True, stralign="left")
    head, rule, *body = text.split("\n")
    return "\n".join([_tight(head), re.sub(":-+", ":--", rule), *map(_tight, body)])


def _tight(line: str) -> str:
    return re.sub(r" +\|", " |", line)
