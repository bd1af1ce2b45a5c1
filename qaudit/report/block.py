"""The card inside a README: its own block between two markers is replaced, all else is kept.

A marker counts where it has a line of its own and is not part of an example between fences. Of
anything but no block or one whole block nobody can say what belongs to whom, so it is refused:
a README is somebody's text, and half of it replaced cannot be had back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from qaudit.errors import UsageError

BEGIN, END = "<!-- qaudit:begin -->", "<!-- qaudit:end -->"
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


def put_block(text: str, card: str) -> str:
    """Return a README with the card in place of the one it holds, or at its end.

    Line endings are those of the README; nothing outside of the markers is touched.
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    block = card.rstrip("\r\n").replace("\r\n", "\n").replace("\n", newline)
    found = _block(text)
    if found is not None:
        return text[: found[0]] + block + text[found[1] :]
    if not text.strip("\ufeff"):
        return f"{text}{block}{newline}"
    gap = newline if text.endswith("\n") else newline * 2
    return f"{text}{gap}{block}{newline}"


def _block(text: str) -> tuple[int, int] | None:
    """Return where the block begins and ends, without the newline after it."""
    marked = list(_marked(text))
    if not marked:
        return None
    if [what for what, _, _, _ in marked] != [BEGIN, END]:
        said = ", ".join(f"`{what[5:-4]}` in line {line}" for what, line, _, _ in marked)
        raise UsageError(
            f"the markers of the card do not enclose one block: {said}",
            hint=f"leave one `{BEGIN}` and one `{END}` after it, or none, and try again",
        )
    return marked[0][2], marked[1][3]


def _marked(text: str) -> Iterator[tuple[str, int, int, int]]:
    """Yield each marker with its line, and where it begins and ends."""
    fence, at = "", 0
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        bare = line.strip().strip("\ufeff")
        opened = _FENCE.match(line)
        if fence:
            closes = opened and opened[1].startswith(fence) and not bare.strip(fence[0])
            fence = "" if closes else fence
        elif opened:
            fence = opened[1]
        elif bare in (BEGIN, END):
            start = at + line.index(bare)
            yield bare, number, start, start + len(bare)
        at += len(line)
