"""The card inside a README: its own block between two markers is replaced, all else is kept.

A marker counts where it has a line of its own and is not part of an example in code, by the rules
of CommonMark. Where there is anything but no block or one whole block, the README is refused:
replacing the wrong half of it cannot be undone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from qaudit.errors import UsageError

BEGIN, END = "<!-- qaudit:begin -->", "<!-- qaudit:end -->"
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


def put_block(text: str, card: str) -> str:
    """Return a README with the card in place of the one it has, or at its end.

    Line endings are those of the README; nothing outside of the markers is touched.
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    block = card.rstrip("\r\n").replace("\r\n", "\n").replace("\n", newline)
    place = _block(text)
    if place is not None:
        return text[: place[0]] + block + text[place[1] :]
    if not text.strip("\ufeff"):
        return f"{text}{block}{newline}"
    gap = newline if text.endswith("\n") else newline * 2
    result = f"{text}{gap}{block}{newline}"
    if [marker for marker, _, _, _ in _marked(result)] != [BEGIN, END]:
        raise UsageError(
            "the README ends inside of a code block that is never closed, and so would the card",
            hint="close it, with a line of ``` or ~~~ like the one that opens it, and try again",
        )
    return result


def _block(text: str) -> tuple[int, int] | None:
    """Return where the block begins and ends, without the newline after it."""
    marked = list(_marked(text))
    if not marked:
        return None
    if [marker for marker, _, _, _ in marked] != [BEGIN, END]:
        places = ", ".join(f"`{marker[5:-4]}` in line {line}" for marker, line, _, _ in marked)
        raise UsageError(
            f"the markers of the card do not enclose one block: {places}",
            hint=f"leave one `{BEGIN}` and one `{END}` after it, or none, and try again",
        )
    return marked[0][2], marked[1][3]


def _marked(text: str) -> Iterator[tuple[str, int, int, int]]:
    if BEGIN not in text and END not in text:
        return
    from markdown_it import MarkdownIt  # takes longer to load than a small audit to render

    bom = len(text) - len(text.removeprefix("\ufeff"))
    lines = list(_LINE.finditer(text, bom))
    for token in MarkdownIt("commonmark").parse(text[bom:]):
        if token.type != "html_block" or token.map is None:
            continue
        for number in range(token.map[0], min(token.map[1], len(lines))):
            bare = lines[number][0].strip()
            if bare in (BEGIN, END):
                start = lines[number].start() + lines[number][0].index(bare)
                yield bare, number + 1, start, start + len(bare)
